"""The collectives of the layers, in Megatron's words, each with its transpose. They talk on the axis they are given.

Source: arXiv:1909.08053 section 3 (f and g), arXiv:2205.05198 section 4.2 (the two of sequence parallelism);
Megatron-LM tensor_parallel/mappings.py.

Inside `jax.shard_map(check_vma=True)` an array is either the same on every rank of an axis ("replicated") or may
differ ("varying"), and its type says so. The type picks the transpose, which is why no function here needs a custom
gradient but `scatter_to`, whose automatic transpose would move twice the bytes.

| function           | in -> out               | forward        | backward       | paper |
|--------------------|-------------------------|----------------|----------------|-------|
| copy_to            | replicated -> varying   | nothing        | all-reduce     | f     |
| reduce_from        | varying -> replicated   | all-reduce     | nothing        | g     |
| gather_from        | varying -> replicated   | all-gather     | own slice      |       |
| scatter_to         | replicated -> varying   | own slice      | all-gather     |       |
| gather_sequence    | varying -> varying      | all-gather     | reduce-scatter | g     |
| reduce_scatter_to  | varying -> varying      | reduce-scatter | all-gather     | g bar |

Every function is the identity for `axis=None`. Bytes: with n ranks and an array of B bytes (the whole one), an
all-reduce sends 2 (n-1)/n B per rank, the others (n-1)/n B.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

import jax
from jax import lax
from jaxtyping import Array, Shaped

Axes = str | tuple[str, ...] | None
T = TypeVar("T")


# ---- what an array varies over ------------------------------------------------------------------------------------
def varying_axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes over which x may differ between ranks (empty outside shard_map). Communication: none."""
    return frozenset(getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", ()) or ())


def vary(tree: T, axes: Iterable[str]) -> T:
    """Returns the tree marked as varying over `axes` as well.

    Communication: forward none; backward an all-reduce of each leaf over the axes it did not vary over before. To
    keep that reduction out of a loop, call this outside the loop and differentiate with respect to the result.
    """
    axes = tuple(axes)

    def leaf(x: Array) -> Array:
        missing = tuple(a for a in axes if a not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(leaf, tree)


def vary_like(tree: T, *references: Any) -> T:
    """Returns the tree marked as varying over every axis that any leaf of `references` varies over (for carries)."""
    axes: frozenset[str] = frozenset().union(*(varying_axes(r) for r in jax.tree.leaves(references)))
    return vary(tree, sorted(axes))


def _checked(axis: Axes) -> None:
    """Refuses an axis that is not there, and a shard_map that does not track what varies.

    With `check_vma=False` the types that pick the transposes are missing, and gradients taken inside the map come out
    too large by the axis size, without a word.
    """
    for name in (axis,) if isinstance(axis, str) else axis or ():
        try:
            index = lax.axis_index(name)
        except NameError as error:
            raise ValueError(
                f"axis {name!r} is not there: call a layer with axis={name!r} inside jax.shard_map over a mesh that has"
                " this axis, or give it axis=None"
            ) from error
        if name not in varying_axes(index):
            raise ValueError(
                f"axis {name!r}: the layers need jax.shard_map(..., check_vma=True), its default; without it gradients"
                " taken inside are too large by the axis size"
            )


# ---- position on an axis ------------------------------------------------------------------------------------------
def axis_size(axis: Axes) -> int:
    """Returns the number of ranks on `axis` (product for a tuple; 1 for None)."""
    return 1 if axis is None else lax.axis_size(axis)


def axis_rank(axis: Axes) -> Any:
    """Returns this rank's place on `axis` (int32 scalar that varies over it; 0 for None)."""
    return 0 if axis is None else lax.axis_index(axis)


def own_slice(x: Shaped[Array, "..."], axis: Axes, dim: int) -> Shaped[Array, "..."]:
    """Returns this rank's part of x along `dim`. Communication: forward none; backward as autodiff finds it.

    Raises:
      ValueError: x.shape[dim] is not divisible by the axis size.
    """
    if axis is None:
        return x
    _check_divisible(x, axis, dim)
    length = x.shape[dim] // axis_size(axis)
    return lax.dynamic_slice_in_dim(x, axis_rank(axis) * length, length, dim)


def _check_divisible(x: Array, axis: Axes, dim: int) -> None:
    if x.shape[dim] % axis_size(axis):
        raise ValueError(
            f"dimension {dim} of an array of shape {x.shape} must be divisible by the {axis_size(axis)} ranks of"
            f" axis {axis!r} to be divided over them"
        )


# ---- the regions --------------------------------------------------------------------------------------------------
def copy_to(x: Shaped[Array, "..."], axis: Axes) -> Shaped[Array, "..."]:
    """Enters a tensor-parallel region (the paper's f). Communication: forward none, backward all-reduce over axis."""
    return x if axis is None else vary(x, (axis,) if isinstance(axis, str) else axis)


def reduce_from(x: Shaped[Array, "..."], axis: Axes) -> Shaped[Array, "..."]:
    """Leaves a region with the sum (the paper's g). Communication: forward all-reduce, backward none."""
    return x if axis is None else lax.psum(x, axis)


def gather_from(x: Shaped[Array, "..."], axis: Axes, dim: int) -> Shaped[Array, "..."]:
    """Leaves a region with the parts joined along `dim`. Communication: forward all-gather, backward none."""
    return x if axis is None else lax.all_gather(x, axis, axis=dim % x.ndim, tiled=True, to="invarying")


def scatter_to(x: Shaped[Array, "..."], axis: Axes, dim: int) -> Shaped[Array, "..."]:
    """Enters a region with this rank's slice along `dim`. Communication: forward none, backward all-gather over axis.

    Raises:
      ValueError: x.shape[dim] is not divisible by the axis size.
    """
    if axis is None:
        return x
    _check_divisible(x, axis, dim % x.ndim)
    return _scatter(x, axis, dim % x.ndim)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _scatter(x: Array, axis: Axes, dim: int) -> Array:
    return own_slice(x, axis, dim)


# Autodiff of a slice pads with zeros and all-reduces: 2 (n-1)/n of the bytes, where joining the parts needs half.
_scatter.defvjp(
    lambda x, axis, dim: (own_slice(x, axis, dim), None),
    lambda axis, dim, _, cotangent: (gather_from(cotangent, axis, dim),),
)


def gather_sequence(x: Shaped[Array, "..."], axis: Axes, dim: int = 1) -> Shaped[Array, "..."]:
    """Enters a region from sequence shards. Communication: forward all-gather, backward reduce-scatter."""
    return x if axis is None else lax.all_gather(x, axis, axis=dim % x.ndim, tiled=True)


def reduce_scatter_to(x: Shaped[Array, "..."], axis: Axes, dim: int = 1) -> Shaped[Array, "..."]:
    """Leaves a region with a shard of the sum. Communication: forward reduce-scatter, backward all-gather.

    Raises:
      ValueError: x.shape[dim] is not divisible by the axis size.
    """
    if axis is None:
        return x
    _check_divisible(x, axis, dim % x.ndim)
    return lax.psum_scatter(x, axis, scatter_dimension=dim % x.ndim, tiled=True)


def enter_region(x: Shaped[Array, "..."], axis: Axes, *, sequence_parallel: bool) -> Shaped[Array, "..."]:
    """Returns the whole-sequence input of a column-parallel layer: `gather_sequence` or `copy_to`.

    Raises:
      ValueError: the axis is not there, or the shard_map has check_vma=False.
    """
    _checked(axis)
    return gather_sequence(x, axis) if sequence_parallel else copy_to(x, axis)


def leave_region(x: Shaped[Array, "..."], axis: Axes, *, sequence_parallel: bool) -> Shaped[Array, "..."]:
    """Returns the summed output of a row-parallel layer: `reduce_scatter_to` or `reduce_from`.

    Raises:
      ValueError: the axis is not there, or the shard_map has check_vma=False.
    """
    _checked(axis)
    return reduce_scatter_to(x, axis) if sequence_parallel else reduce_from(x, axis)


# ---- sums and maxima of small things ------------------------------------------------------------------------------
def sum_over(tree: T, axes: Axes) -> T:
    """Returns the tree summed over `axes`, in one collective where XLA can join them.

    Leaves that are replicated over an axis already hold the sum there: only the axes they vary over are reduced.
    Communication: one all-reduce of the tree's bytes over `axes`.
    """
    if axes is None:
        return tree
    names = (axes,) if isinstance(axes, str) else axes
    leaves, treedef = jax.tree.flatten(tree)
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(tuple(a for a in names if a in varying_axes(leaf)), []).append(i)
    for group, indices in groups.items():
        if group:
            for i, total in zip(indices, lax.psum([leaves[i] for i in indices], group), strict=True):
                leaves[i] = total
    return jax.tree.unflatten(treedef, leaves)


def max_over(x: Shaped[Array, "..."], axis: Axes) -> Shaped[Array, "..."]:
    """Returns the maximum over axis, cut from the gradient. Communication: forward all-reduce (max), backward none."""
    x = lax.stop_gradient(x)
    return x if axis is None else lax.pmax(x, axis)
