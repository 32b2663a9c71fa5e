"""The order in which micro-batches pass through the model."""
