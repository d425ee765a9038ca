"""The prefill server: the engine in role prefill."""
