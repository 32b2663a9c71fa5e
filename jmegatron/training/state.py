"""What a training step changes, and where each array lies. No communication."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key

from jmegatron import partition
from jmegatron.optimizer.adamw import state_shardings
from jmegatron.partition import Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and replaces. A pytree."""

    step: Any
    """Updates done (int32 scalar)."""
    parameters: Tree
    """In the compute dtype."""
    master: Tree | None
    """fp32 parameters that the optimizer updates; None where the compute dtype is fp32 (then `parameters` are they)."""
    optimizer: Any
    """optax state, fp32."""


def init_state(
    specs: Tree, key: Key[Array, ""], optimizer: optax.GradientTransformation, compute_dtype: Any
) -> TrainState:
    """Returns the state before the first step; call under jit with `train_state_shardings` as out_shardings."""
    master = partition.init_parameters(specs, key, jnp.float32)
    mixed = jnp.dtype(compute_dtype) != jnp.float32
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        parameters=jax.tree.map(lambda p: p.astype(compute_dtype), master),
        master=master if mixed else None,
        optimizer=optimizer.init(master),
    )


def train_state_shardings(
    specs: Tree, optimizer: optax.GradientTransformation, compute_dtype: Any, mesh: Mesh
) -> TrainState:
    """Returns the TrainState of NamedSharding that belongs to `init_state`."""
    parameters = partition.shardings(specs, mesh)
    mixed = jnp.dtype(compute_dtype) != jnp.float32
    return TrainState(
        step=NamedSharding(mesh, PartitionSpec()),
        parameters=parameters,
        master=parameters if mixed else None,
        optimizer=state_shardings(optimizer, partition.abstract(specs, jnp.float32, mesh), parameters, mesh),
    )
