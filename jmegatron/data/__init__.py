"""Training data: from text files to batches of token ids (no communication).

The way of the data: `preprocess` writes an indexed dataset, `gpt_dataset` cuts it into samples of `seq_len + 1` tokens,
`sampler` says which sample ids form a global batch, `loader` builds the batches ahead of the training step. `build`
puts these together. See README.md in this folder.

The package imports numpy and the standard library only (and the `tokenizers` library when a tokenizer file is read), so
that corpora can be prepared on a machine without JAX.
"""
