"""A config-driven DeepSpeed fine-tuning toolkit for causal language models, ChatGLM first."""

__version__ = "0.1.0"
