"""The decode server: the engine in role decode."""
