"""The supervisor of an engine: starts its processes, watches them and says why they ended."""
