"""Runs the micro-batches of a step and adds up their gradients in fp32. With one stage: no communication of its own.

Source: Megatron-LM pipeline_parallel/schedules.py (forward_backward_no_pipelining). One scan, so that neither compile
time nor memory grows with the number of micro-batches. The loss function must not reduce over data axes: mark the
parameters as varying over them first (`collectives.vary`), and no reduction hides inside the loop.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmegatron.collectives import vary_like
from jmegatron.partition import Tree

LossFunction = Callable[[Tree, Any], tuple[jax.Array, Tree]]
"""(parameters, micro-batch) -> (objective, tree of sums to report)."""


def accumulate_gradients(loss_function: LossFunction, parameters: Tree, microbatches: Any) -> tuple[Tree, Tree]:
    """Returns (sums of the reported tree, fp32 sums of the gradients of the objective) over micro-batches.

    Communication: that of loss_function, once a micro-batch forward and once backward.

    Args:
      loss_function: see `LossFunction`; its reported sums are added in their own dtype.
      parameters: in the compute dtype; gradients come in it and are accumulated in fp32.
      microbatches: pytree whose leaves have a leading dim `num_microbatches`.
    """
    gradient = jax.value_and_grad(loss_function, has_aux=True)

    def microbatch(parameters: Tree, one: Any) -> tuple[Tree, Tree]:
        (_, report), gradients = gradient(parameters, one)
        return report, gradients

    first = jax.tree.map(lambda a: a[0], microbatches)
    report_type, gradient_type = jax.eval_shape(microbatch, parameters, first)
    start = (
        jax.tree.map(lambda t: vary_like(jnp.zeros(t.shape, t.dtype), t), report_type),
        jax.tree.map(lambda t: vary_like(jnp.zeros(t.shape, jnp.float32), t), gradient_type),
    )

    def body(sums: tuple[Tree, Tree], one: Any) -> tuple[tuple[Tree, Tree], None]:
        report, gradients = microbatch(parameters, one)
        add = lambda total, new: total + new.astype(total.dtype)  # noqa: E731
        return (jax.tree.map(add, sums[0], report), jax.tree.map(add, sums[1], gradients)), None

    return lax.scan(body, start, microbatches)[0]
