"""Between text and tokens: templates, tokenizers, large prompts."""
