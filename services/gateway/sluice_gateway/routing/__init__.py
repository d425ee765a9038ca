"""Which engines there are, where a request goes, and what is tried again."""
