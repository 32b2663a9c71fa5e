"""Checkpoints: saving and restoring a training state by Orbax."""
