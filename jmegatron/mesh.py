"""The device mesh: five named axes in Megatron's rank order, and where the batch lies on them.

No communication. Corresponds to Megatron-LM parallel_state.py (order "tp-cp-ep-dp-pp", tp fastest).

| axis | what is divided | who talks on it |
|------|-----------------|-----------------|
| pp   | layers          | the pipeline: activations and their gradients, neighbour to neighbour |
| dp   | the batch       | one gradient reduction and one parameter gather a step |
| ep   | the batch; experts of MoE layers | tokens to their experts; otherwise as dp |
| cp   | the sequence    | attention: keys and values |
| tp   | heads, FFN, vocabulary; the sequence between them | every layer |
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jmegatron.errors import ConfigError

AXES = ("pp", "dp", "ep", "cp", "tp")
BATCH_AXES = ("dp", "ep")
"""Axes over which the sequences of a batch are divided (expert parallelism folds into data parallelism)."""
SEQUENCE_AXIS = "cp"
DATA_AXES = (*BATCH_AXES, SEQUENCE_AXIS)
"""Axes whose ranks hold the same dense parameters and different tokens: gradients are summed over them."""
PIPELINE_AXIS = "pp"
"""Stages of the pipeline."""
EXPERT_AXIS = "ep"
"""Experts of a layer; replicas of the model for everything else."""
TENSOR_AXIS = "tp"


def build_mesh(devices: Sequence[Any], *, pp: int = 1, dp: int = 1, ep: int = 1, cp: int = 1, tp: int = 1) -> Mesh:
    """Returns the mesh of shape (pp, dp, ep, cp, tp) over `devices` in the order given.

    Raises:
      ConfigError: the product of the degrees is not the number of devices, or a degree is below 1.
    """
    shape = dict(pp=pp, dp=dp, ep=ep, cp=cp, tp=tp)
    if any(size < 1 for size in shape.values()):
        raise ConfigError(f"mesh: every degree must be at least 1, got {shape}")
    if int(np.prod(list(shape.values()))) != len(devices):
        raise ConfigError(
            f"mesh: pp x dp x ep x cp x tp = {' x '.join(map(str, shape.values()))} = {np.prod(list(shape.values()))},"
            f" but there are {len(devices)} devices; change a degree or the number of devices"
        )
    grid = np.empty(len(devices), dtype=object)
    grid[:] = list(devices)
    return Mesh(grid.reshape(tuple(shape.values())), AXES)


def batch_spec(*leading: None) -> PartitionSpec:
    """Returns the spec of an array [*leading, batch, ...]: batch over (dp, ep), sequences whole (a step cuts them)."""
    return PartitionSpec(*leading, BATCH_AXES)


def rank_coordinates(mesh: Mesh, rank: int) -> dict[str, int]:
    """Returns the coordinate on each axis of the device at position `rank` of the mesh.

    Raises:
      IndexError: rank is outside 0 .. number of devices - 1.
    """
    if not 0 <= rank < mesh.devices.size:
        raise IndexError(f"rank {rank} is outside 0..{mesh.devices.size - 1}")
    return {
        axis: int(coordinate) for axis, coordinate in zip(AXES, np.unravel_index(rank, mesh.devices.shape), strict=True)
    }
