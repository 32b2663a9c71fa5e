"""AdamW as the reference has it, on global arrays. The norm of sharded gradients talks on the axes that divide them.

Source: Megatron-LM core/optimizer/__init__.py:546-590, clip_grads.py:107-191. Order: norm -> clip -> Adam on the fp32
master weights (decoupled decay, eps outside the root, bias correction) -> cast to the compute dtype. optax does the
update; clipping is here because the reference's coefficient is clip / (norm + 1e-6), and because inside shard_map
optax would see one rank's norm only.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jmegatron.optimizer.schedules import LearningRateSchedule
from jmegatron.partition import Tree


@dataclasses.dataclass(frozen=True)
class AdamWSettings:
    """Plain numbers of the optimizer."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    """Largest global gradient norm; 0: no clipping."""


def adamw(settings: AdamWSettings, schedule: LearningRateSchedule, decay_mask: Tree) -> optax.GradientTransformation:
    """Returns the stock optax AdamW; `decay_mask` says which parameters decay (by what they are, not by rank)."""
    return optax.adamw(
        schedule,
        b1=settings.beta1,
        b2=settings.beta2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        mask=decay_mask,
    )


def global_norm(gradients: Tree) -> Float[Array, ""]:
    """Returns the fp32 L2 norm over all gradients, each global element once.

    Communication: on global arrays, one scalar all-reduce over the axes that divide leaves, added by XLA.
    """
    return jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients)))


def clip_by_norm(gradients: Tree, norm: Float[Array, ""], limit: float) -> Tree:
    """Returns gradients times limit / (norm + 1e-6) where that is below 1 (limit 0: unchanged). Communication: none."""
    if limit <= 0:
        return gradients
    coefficient = jnp.minimum(1.0, limit / (norm + 1e-6))
    return jax.tree.map(lambda g: g * coefficient, gradients)


def state_shardings(
    optimizer: optax.GradientTransformation, parameters: Tree, parameter_shardings: Tree, mesh: Mesh
) -> Any:
    """Returns the shardings of the optimizer's state: moments lie as their parameters, counters on every device.

    A counter needs a sharding on the mesh, too: on a single device a resumed step would refuse it.

    Args:
      optimizer: whose state it is.
      parameters: arrays or ShapeDtypeStructs.
      parameter_shardings: NamedSharding of each.
      mesh: the mesh.
    """
    abstract = jax.eval_shape(optimizer.init, parameters)
    return optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        abstract,
        parameter_shardings,
        transform_non_params=lambda _: NamedSharding(mesh, PartitionSpec()),
    )


def map_parameters(
    optimizer: optax.GradientTransformation, function: Callable[[Any, Any], Any], state: Any, specs: Tree
) -> Any:
    """Returns the optimizer's state with function(declaration, value) in place of what belongs to a parameter."""
    return optax.tree.map_params(optimizer, lambda value, spec: function(spec, value), state, specs)
