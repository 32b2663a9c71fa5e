"""Models built from the parallel layers: the transformer stack and GPT."""
