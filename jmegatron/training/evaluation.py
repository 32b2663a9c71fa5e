"""Evaluation of the validation and test splits. The sums over tokens are reduced inside the evaluation step."""

import dataclasses
from typing import Any

import jax

from jmegatron.data.gpt_dataset import Sources
from jmegatron.data.loader import build_global_batch
from jmegatron.training.job import SLOW_MINUTES, Job
from jmegatron.training.program import Program
from jmegatron.training.step import make_eval_step


class Evaluator:
    """Evaluates on the same first eval_iters global batches every time, so that losses of a run compare.

    (The reference walks on through the validation samples instead.) The training state is only read.
    """

    def __init__(self, program: Program, sources: Sources, job: Job | None = None):
        self._program, self._job = program, job or Job()
        self._minutes: float | None = SLOW_MINUTES  # the first batch is compiled for
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
        losses, tokens = [], []
        sums = []
        for i in range(training.eval_iters):
            self._job.watch(f"evaluation on the {split} split, batch {i + 1}", self._minutes)
            sums.append(
                self._step(parameters, self._program.put(build_global_batch(source, i * size, size, rows=rows)))
            )
        for i, s in enumerate(sums):
            self._job.watch(f"evaluation on the {split} split, result {i + 1}", self._minutes)
            losses.append(float(s["loss_sum"]))
            tokens.append(float(s["num_tokens"]))
            self._minutes = None
        return sum(losses) / max(sum(tokens), 1.0)
