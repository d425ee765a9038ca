"""What crosses a boundary between processes: frozen dataclasses, one codec, the lease table."""
