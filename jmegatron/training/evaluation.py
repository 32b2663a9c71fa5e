"""Evaluation of the validation and test splits. The sums over tokens are reduced inside the evaluation step."""

import dataclasses
from typing import Any

import jax

from jmegatron.data.gpt_dataset import Sources
from jmegatron.data.loader import build_global_batch
from jmegatron.training.program import Program
from jmegatron.training.step import make_eval_step


class Evaluator:
    """Evaluates on the same first eval_iters global batches every time, so that losses of a run compare.

    (The reference walks on through the validation samples instead.) The training state is only read.
    """

    def __init__(self, program: Program, sources: Sources):
        self._program = program
        self._sources = {"valid": sources[1], "test": sources[2]}
        # Without smoothing: the plain cross-entropy is what compares between runs, and what a perplexity is of.
        model = dataclasses.replace(program.settings.model, label_smoothing=0.0)
        settings = dataclasses.replace(program.settings, model=model)
        self._step = jax.jit(make_eval_step(settings, program.mesh))

    def has(self, split: str) -> bool:
        """Returns whether there is something to evaluate."""
        return self._sources[split] is not None and self._program.config.training.eval_iters > 0

    def __call__(self, parameters: Any, split: str) -> float:
        """Returns the loss: sum over all counted tokens divided by their number."""
        training = self._program.config.training
        size = training.global_batch_size
        source = self._sources[split]
        assert size is not None
        assert source is not None
        rows = self._program.placer.rows
        sums = [
            self._step(parameters, self._program.put(build_global_batch(source, i * size, size, rows=rows)))
            for i in range(training.eval_iters)
        ]
        loss = sum(float(s["loss_sum"]) for s in sums)
        return loss / max(sum(float(s["num_tokens"]) for s in sums), 1.0)
