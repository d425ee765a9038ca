"""Operations on cache records and activations, one folder each: `reference.py` is torch, readable, and serves CPUs."""
