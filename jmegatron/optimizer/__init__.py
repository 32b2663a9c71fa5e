"""Optimizer: stock optax transformations, the reference's schedules and clip, and where the state lives."""
