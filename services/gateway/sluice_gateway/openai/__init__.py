"""The OpenAI-compatible API: requests, answers, errors."""
