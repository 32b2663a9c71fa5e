"""Checks that what several devices hold copies of is the same on all of them, bit by bit.

Talks: an all-gather of four bytes a leaf and device. Megatron-LM core/utils.py (check_param_hashes_across_dp_replicas),
for all of the state and over all axes, not for parameters over dp alone.

A checksum is the sum of (2 i + 1) x bits of element i, modulo 2^32: a single element that differs always changes it, as
an odd factor has an inverse; more than one go unnoticed once in 2^32. Nothing of a leaf's size is made or moved.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from jmegatron import partition
from jmegatron.errors import TrainingError
from jmegatron.mesh import rank_coordinates


class ReplicaCheck:
    """Compares the replicas of every leaf of a state.

    Args:
      mesh: the mesh.
      shardings: NamedSharding of each leaf of the state.
    """

    def __init__(self, mesh: Mesh, shardings: Any):
        self._mesh = mesh
        specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
        named = jax.tree_util.tree_flatten_with_path(shardings)[0]
        self._leaves = [(_path(path), sharding.spec) for path, sharding in named]
        # A copy is a copy to the compiler as well: each device sums its own, and the sums are laid out as if divided.
        sums = jax.shard_map(
            lambda state: jnp.stack([checksum(leaf) for leaf in jax.tree.leaves(state)])[None],
            mesh=mesh,
            in_specs=(specs,),
            out_specs=PartitionSpec(mesh.axis_names),
        )
        self._checksums = jax.jit(sums, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self, step: int, state: Any) -> None:
        """Compares the state after a step; waits for it.

        Raises:
          TrainingError: replicas differ; the message names the step, the first such leaf and the ranks.
        """
        sums = np.asarray(self._checksums(state)).reshape(*self._mesh.devices.shape, -1)
        wrong = []
        for number, (path, spec) in enumerate(self._leaves):
            wrong += [(path, split) for split in _differing(self._mesh, spec, sums[..., number])[:1]]
        if not wrong:
            return
        path, split = wrong[0]
        groups = " against ".join("rank" + "s" * (len(g) > 1) + " " + ", ".join(map(str, g)) for g in split)
        more = f" (and {len(wrong) - 1} more leaves)" if len(wrong) > 1 else ""
        odd = min(split, key=len)[0]
        where = ", ".join(f"{axis} {rank}" for axis, rank in rank_coordinates(self._mesh, odd).items())
        raise TrainingError(
            f"step {step}: replicas of {path}{more} differ: {groups} (rank {odd} is {where}); a device or a link made a"
            " mistake, or another program wrote there; fix: go on from the last checkpoint without that device"
        )


def checksum(x: Array) -> UInt32[Array, ""]:
    """Returns a checksum of the bits of x. Communication: none."""
    width = x.dtype.itemsize * 8
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}")).astype(jnp.uint32).reshape(-1)
    factors = 2 * jax.lax.iota(jnp.uint32, bits.size) + 1
    return jnp.sum(bits * factors, dtype=jnp.uint32)


def _differing(mesh: Mesh, spec: PartitionSpec, sums: np.ndarray) -> list[list[list[int]]]:
    """Returns for each part of a leaf whose replicas differ their ranks, grouped by what they hold."""
    divided = {axis for entry in spec for axis in partition.axes_of(entry)}
    axes = mesh.axis_names
    copies = [dim for dim, axis in enumerate(axes) if axis not in divided]
    order = [*(dim for dim in range(len(axes)) if dim not in copies), *copies]
    shape = (-1, int(np.prod([mesh.devices.shape[dim] for dim in copies])))
    ranks = np.arange(sums.size).reshape(mesh.devices.shape).transpose(order).reshape(shape)
    held = sums.transpose(order).reshape(shape)
    return [
        [own[values == value].tolist() for value in dict.fromkeys(values.tolist())]
        for own, values in zip(ranks, held, strict=True)
        if (values != values[0]).any()
    ]


def _path(key_path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(key_path, simple=True, separator="/")
