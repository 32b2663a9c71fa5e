"""What a training step changes, and where each array lies. No communication."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key

from jmegatron import partition
from jmegatron.mesh import DATA_AXES
from jmegatron.optimizer import loss_scaler
from jmegatron.optimizer.loss_scaler import LossScale, LossScalerSettings
from jmegatron.optimizer.optimizers import state_shardings
from jmegatron.partition import Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and replaces. A pytree."""

    step: Any
    """Steps done, skipped ones as well (int32 scalar)."""
    parameters: Tree
    """In the compute dtype."""
    master: Tree | None
    """fp32 parameters that the optimizer updates; None where the compute dtype is fp32 (then `parameters` are they)."""
    optimizer: Any
    """optax state, fp32."""
    loss_scale: Any = None
    """`LossScale` where the loss is scaled. (Not in the hint: jax also puts its own marks into the tree.)"""
    skipped: Any = None
    """Steps skipped since the run began (int32 scalar), where the loss is scaled."""


def init_state(
    specs: Tree,
    key: Key[Array, ""],
    optimizer: optax.GradientTransformation,
    compute_dtype: Any,
    scaler: LossScalerSettings | None = None,
) -> TrainState:
    """Returns the state before the first step; call under jit with `train_state_shardings` as out_shardings."""
    return start_of(specs, partition.init_parameters(specs, key, jnp.float32), optimizer, compute_dtype, scaler)


def start_of(
    specs: Tree,
    weights: Tree,
    optimizer: optax.GradientTransformation,
    compute_dtype: Any,
    scaler: LossScalerSettings | None = None,
) -> TrainState:
    """Returns the state before the first step with these fp32 weights; under jit as `init_state`."""
    mixed = jnp.dtype(compute_dtype) != jnp.float32
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        parameters=partition.cast(specs, weights, compute_dtype),
        master=weights if mixed else None,
        optimizer=optimizer.init(weights),
        loss_scale=None if scaler is None else loss_scaler.init(scaler),
        skipped=None if scaler is None else jnp.zeros((), jnp.int32),
    )


def named_arrays(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a state by name, such as "parameters/embedding/word/embedding" or "optimizer/0/mu/...".

    Equal parts of the optimizer's state are numbered: what it is follows from the optimizer and the model alone.
    """
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def name_of(path: tuple[Any, ...]) -> str:
    """Returns the name of a leaf of a state from its key path."""
    return "/".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path)


def train_state_shardings(
    specs: Tree,
    optimizer: optax.GradientTransformation,
    compute_dtype: Any,
    mesh: Mesh,
    *,
    distributed_optimizer: bool = False,
    overlap_param_gather: bool = False,
    scaler: LossScalerSettings | None = None,
) -> TrainState:
    """Returns the TrainState of NamedSharding that belongs to `init_state`.

    Args:
      specs: declarations of the parameters.
      optimizer: whose state it is.
      compute_dtype: of the parameters that a step computes with.
      mesh: the mesh.
      distributed_optimizer: divide master weights and the optimizer's state over the data axes as well.
      overlap_param_gather: divide the parameters between steps like these.
      scaler: how the loss is scaled, None: not.
    """
    scalar = NamedSharding(mesh, PartitionSpec())
    parameters = partition.shardings(specs, mesh)
    master = data_shardings(specs, mesh) if distributed_optimizer else parameters
    mixed = jnp.dtype(compute_dtype) != jnp.float32
    return TrainState(
        step=scalar,
        parameters=master if overlap_param_gather else parameters,
        master=master if mixed else None,
        optimizer=state_shardings(optimizer, partition.abstract(specs, jnp.float32, mesh), master, mesh),
        loss_scale=None if scaler is None else LossScale(scalar, scalar, scalar),
        skipped=None if scaler is None else scalar,
    )


def data_shardings(specs: Tree, mesh: Mesh) -> Tree:
    """Returns the NamedSharding of each parameter's optimizer state: its own, divided over the data axes as well."""
    shape = dict(mesh.shape)
    return partition.map_specs(lambda s: NamedSharding(mesh, partition.data_sharded(s, DATA_AXES, shape)[0]), specs)
