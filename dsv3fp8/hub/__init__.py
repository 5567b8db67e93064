"""Hugging Face checkpoints in and out: DeepSeek's published layout, as `transformers`, vLLM and others read it."""
