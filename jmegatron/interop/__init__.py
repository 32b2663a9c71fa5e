"""Weights of other frameworks: Megatron-Core's checkpoints, Hugging Face's folders."""
