"""jmegatron: Megatron-LM's parallel training of transformer language models, rebuilt in JAX with named mesh axes."""

__version__ = "0.1.0"
