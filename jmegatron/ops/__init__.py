"""Local mathematics of a transformer layer: norms, activations, rotary positions, attention. No communication."""
