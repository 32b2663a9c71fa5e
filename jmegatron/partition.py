"""Parameter declarations: the one place where a parameter's shape, sharding, start value and gradient rule are stated.

No communication. A model is a nested dict of `ParameterSpec`; everything else that has the model's structure (start
values, shardings, abstract arrays, weight-decay mask, gradient reductions) is a map over that tree.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Key

from jmegatron import random

Initializer = Callable[[Any, tuple[int, ...], Any], Any]
"""(key, shape, dtype) -> array; the signature of jax.nn.initializers."""
Tree = Any
"""A nested dict of strings; the leaves are said where it is used."""

zeros: Initializer = jax.nn.initializers.zeros
ones: Initializer = jax.nn.initializers.ones


def normal(std: float) -> Initializer:
    """Returns the initializer N(0, std)."""
    return jax.nn.initializers.normal(std)


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """What a parameter is, independent of any device."""

    shape: tuple[int, ...]
    """Global shape, stacked layers first if `stacked` is set."""
    spec: P
    """Mesh axis (or None) of each dim of `shape`."""
    init: Initializer
    """Start value of one layer's parameter."""
    partial_axes: tuple[str, ...] = ()
    """Axes over which the value is replicated while each rank's gradient is only its part: summed once a step.

    Norm scales under sequence parallelism (each rank sees its tokens), q/k norms (its heads), kv kernels that are
    replicated because there are fewer kv heads than ranks. Megatron-LM finalize_model_grads.py:452.
    """
    weight_decay: bool = True
    """By what the parameter is, not by its rank: a stacked norm scale has two dims and still does not decay."""
    matrix: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """(dims summed over, dims of the result) of a matrix that multiplies activations, counted from the end; the other
    dims count independent matrices. None: a bias, a scale, or a table of the vocabulary or the positions."""
    vocabulary: bool = False
    """Word embedding or output layer, which may have a learning rate of their own."""
    padded: tuple[int, int] | None = None
    """(dim, number of its entries that count): the others are padding, zero from the start on, and no update moves
    them. None: all count."""
    undivided: tuple[int, ...] = ()
    """Dims of `shape` that no data axis divides: `canonical` marks those of which it has cut padding."""
    fp32: bool = False
    """Whether a step computes with it in fp32, whatever the compute dtype is."""
    stacked: tuple[tuple[int, ...], ...] = ()
    """Global layer number of each place of the leading dim, -1 where there is none; several rows: of the two leading
    dims (chunks of a pipeline's stages). Empty: not stacked."""

    def __post_init__(self) -> None:
        if len(self.spec) > len(self.shape):
            raise ValueError(f"spec {self.spec} has more entries than shape {self.shape} has dims")

    @property
    def num_stacked_dims(self) -> int:
        """Leading dims of `shape` that count layers."""
        return min(len(self.stacked), 2)


def is_spec(x: Any) -> bool:
    """Returns whether x is a leaf of a declaration tree."""
    return isinstance(x, ParameterSpec)


def map_specs(function: Callable[..., Any], specs: Tree, *rest: Tree) -> Tree:
    """Returns function(spec, *leaves) over the tree."""
    return jax.tree.map(function, specs, *rest, is_leaf=is_spec)


def path_of(key_path: tuple[Any, ...]) -> str:
    """Returns "layers/mlp/up/kernel" for a key path of a nested dict."""
    return "/".join(str(entry.key) for entry in key_path)


def named_specs(specs: Tree) -> list[tuple[str, ParameterSpec]]:
    """Returns (path, spec) of every parameter, in tree order."""
    return [(path_of(path), spec) for path, spec in jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]]


def stack(specs: Tree, layers: int | np.ndarray, axis: str | None = None) -> Tree:
    """Returns the declarations of equal layers stacked along a new leading dim that lies on `axis`.

    Args:
      specs: of one layer.
      layers: their number, or int [chunks, places] as of `PipelineLayout.places`: the global layer number of each place
        (-1: none). With several chunks the new leading dims are [chunks, places]; the second lies on `axis`.
      axis: mesh axis, or None.
    """
    places = np.arange(layers)[None] if isinstance(layers, int) else np.asarray(layers)
    rows = tuple(tuple(int(n) for n in row) for row in places)
    lead = places.shape if len(rows) > 1 else places.shape[1:]
    lead_spec = (None, axis) if len(rows) > 1 else (axis,)

    def leaf(s: ParameterSpec) -> ParameterSpec:
        return dataclasses.replace(s, shape=(*lead, *s.shape), spec=P(*lead_spec, *s.spec), stacked=rows)

    return map_specs(leaf, specs)


def canonical(spec: ParameterSpec, sizes: Mapping[str, int]) -> ParameterSpec:
    """Returns the declaration as a checkpoint holds it: layers in order along one leading dim, no padding.

    Its shape is the same on every mesh. A dim of which layers are moved or padding is cut is on no axis: the axes that
    divided it divide another one, the longest that they can, so that each device moves and cuts for itself.

    Args:
      spec: the declaration.
      sizes: size of each mesh axis.
    """
    shape, entries = list(spec.shape), [*spec.spec, *[None] * (len(spec.shape) - len(spec.spec))]
    lead, stacked, moved, undivided = spec.num_stacked_dims, spec.stacked, [], spec.undivided
    if stacked:
        order = _order(spec)
        if not _in_order(spec):
            moved += [axis for entry in entries[:lead] for axis in axes_of(entry)]
            entries[:lead] = [None] * lead
        shape[:lead], entries[:lead] = [len(order)], entries[lead - 1 : lead]
        stacked = (tuple(range(len(order))),)
    if spec.padded is not None:
        dim, count = spec.padded
        dim += 1 - lead if stacked else 0
        moved += axes_of(entries[dim])
        shape[dim], entries[dim], undivided = count, None, (*undivided, dim)
    result = dataclasses.replace(
        spec, shape=tuple(shape), spec=P(*entries), stacked=stacked, padded=None, undivided=undivided
    )
    # All of the axes if some dim can be divided by all, else as many of them as can.
    for count in range(len(moved), 0, -1):
        for axes in itertools.combinations(moved, count):
            divided, found = data_sharded(result, axes, sizes)
            if found is not None:
                return dataclasses.replace(result, spec=divided)
    return result


def _order(spec: ParameterSpec) -> np.ndarray:
    """Returns the place of each layer of a stacked parameter."""
    places = np.asarray(spec.stacked).reshape(-1)
    # Numbers of layers, not of rows: where only some layers have the parameter they go beyond the rows.
    return np.argsort(np.where(places < 0, places.max() + 1, places), kind="stable")[: int((places >= 0).sum())]


def _in_order(spec: ParameterSpec) -> bool:
    """Returns whether the layers of a stacked parameter lie in order along one dim, each place with one."""
    if spec.num_stacked_dims != 1:
        return False
    layers = spec.stacked[0]
    return all(a < b for a, b in zip((-1, *layers), layers, strict=False))


def is_canonical(spec: ParameterSpec) -> bool:
    """Returns whether a checkpoint holds the parameter as it is."""
    return spec.padded is None and (not spec.stacked or _in_order(spec))


def to_canonical(spec: ParameterSpec, value: Array, sharding: NamedSharding | None = None) -> Array:
    """Returns a parameter (or its moment) as a checkpoint holds it.

    Communication: under jit, an all-to-all where `sharding` divides other dims than the value's own does.

    Args:
      spec: the declaration.
      value: of its shape.
      sharding: of the result; None: XLA may choose, and bring the whole to each device on the way.
    """
    if is_canonical(spec):
        return value
    lead = spec.num_stacked_dims
    if spec.stacked and not _in_order(spec):
        value = _constrained(value, sharding, lead).reshape(-1, *value.shape[lead:])
        value = jnp.take(value, _order(spec), axis=0)
    if spec.padded is not None:
        dim, count = spec.padded
        value = _constrained(value, sharding)
        value = jax.lax.slice_in_dim(value, 0, count, axis=dim - lead + 1 if spec.stacked else dim)
    return value


def from_canonical(spec: ParameterSpec, value: Array, sharding: NamedSharding | None = None) -> Array:
    """Returns what `to_canonical` was given; padding and places without a layer are zero. Communication: as there.

    Args:
      spec: the declaration.
      value: as a checkpoint holds it.
      sharding: that `value` has; None as for `to_canonical`.
    """
    if is_canonical(spec):
        return value
    lead = spec.num_stacked_dims
    if spec.padded is not None:
        dim, count = spec.padded
        widths = [(0, 0)] * value.ndim
        widths[dim - lead + 1 if spec.stacked else dim] = (0, spec.shape[dim] - count)
        value = _constrained(jnp.pad(value, widths), sharding)
    if spec.stacked and not _in_order(spec):
        places = np.asarray(spec.stacked).reshape(-1)
        rows = np.zeros_like(places)
        rows[_order(spec)] = np.arange(len(value))
        value = jnp.take(value, rows, axis=0)
        if (places < 0).any():
            absent = (places < 0).reshape(-1, *[1] * (value.ndim - 1))
            value = jnp.where(absent, jnp.zeros((), value.dtype), value)
        value = _constrained(value.reshape(spec.shape), sharding, lead)
    return value


def _constrained(value: Array, sharding: NamedSharding | None, lead: int = 1) -> Array:
    """Returns the value with a canonical sharding whose first dim `lead` undivided dims stand for."""
    if sharding is None:
        return value
    if lead != 1:
        sharding = NamedSharding(sharding.mesh, P(*[None] * lead, *sharding.spec[1:]))
    return jax.lax.with_sharding_constraint(value, sharding)


def data_sharded(spec: ParameterSpec, axes: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[P, int | None]:
    """Returns (spec, dim) with one more dim, or a dim once more, divided over data axes (arXiv:1910.02054, stage 1).

    The dim that is longest on a device among those that can be divided; never one that counts layers, so that each
    layer can be gathered and reduced by itself, nor one of `undivided`. A parameter without such a dim stays as it is:
    dim None. Only `replica_axes` are added.

    Args:
      spec: the declaration.
      axes: data axes, the first one slowest.
      sizes: size of each mesh axis.
    """
    axes = replica_axes(spec, axes)
    ranks = math.prod(sizes[axis] for axis in axes)
    entries = [*spec.spec, *[None] * (len(spec.shape) - len(spec.spec))]
    best, length = None, 0
    for dim in range(spec.num_stacked_dims, len(spec.shape)):
        if dim in spec.undivided:
            continue
        local = spec.shape[dim] // math.prod(sizes[axis] for axis in axes_of(entries[dim]))
        if local % ranks == 0 and local > length:
            best, length = dim, local
    if ranks == 1 or best is None:
        return spec.spec, None
    entries[best] = (*axes_of(entries[best]), *axes)
    return P(*entries), best


def replica_axes(spec: ParameterSpec, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those of the data axes over which a parameter is replicated: all, but for experts, which ep divides."""
    own = {axis for entry in spec.spec for axis in axes_of(entry)}
    return tuple(axis for axis in axes if axis not in own)


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def cast(specs: Tree, tree: Tree, dtype: Any) -> Tree:
    """Returns the parameters that a step with this compute dtype takes, from fp32 ones."""
    return map_specs(lambda s, p: p.astype(jnp.float32 if s.fp32 else dtype), specs, tree)


def partition_specs(specs: Tree) -> Tree:
    """Returns the tree of PartitionSpec (in_specs and out_specs of a shard_map over parameters or gradients)."""
    return map_specs(lambda s: s.spec, specs)


def shardings(specs: Tree, mesh: Mesh) -> Tree:
    """Returns the tree of NamedSharding on `mesh`."""
    return map_specs(lambda s: NamedSharding(mesh, s.spec), specs)


def abstract(specs: Tree, dtype: Any, mesh: Mesh) -> Tree:
    """Returns the tree of ShapeDtypeStruct with shardings: what a compile needs instead of arrays."""
    return map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, dtype, sharding=NamedSharding(mesh, s.spec)), specs)


def weight_decay_mask(specs: Tree) -> Tree:
    """Returns the tree of bools that optax's weight decay takes."""
    return map_specs(lambda s: s.weight_decay, specs)


def num_parameters(specs: Tree) -> int:
    """Returns the number of elements, vocabulary padding included, places without a layer not."""
    total = 0
    for _, s in named_specs(specs):
        size = int(np.prod(s.shape))
        if s.stacked:
            layers = np.asarray(s.stacked)
            size = size // layers.size * int((layers >= 0).sum())
        total += size
    return total


def init_parameters(specs: Tree, key: Key[Array, ""], dtype: Any = jnp.float32) -> Tree:
    """Returns the start values; equal for every sharding, since each depends on (path, global layer, index) alone.

    Call under `jax.jit(..., out_shardings=shardings(specs, mesh))`, so that no device ever holds a whole parameter.
    """

    def leaf(key_path: tuple[Any, ...], s: ParameterSpec) -> Array:
        own = random.parameter_key(key, path_of(key_path))
        if not s.stacked:
            return s.init(own, s.shape, dtype)
        layers = np.asarray(s.stacked).reshape(-1)
        one = s.shape[s.num_stacked_dims :]
        values = jax.vmap(lambda k: s.init(k, one, dtype))(random.layer_keys(own, jnp.asarray(np.maximum(layers, 0))))
        if (layers < 0).any():  # places without a layer hold zeros, which no update moves
            values = jnp.where((layers >= 0).reshape(-1, *[1] * len(one)), values, 0)
        return values.reshape(s.shape)

    return jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=is_spec)


def local_bytes(specs: Tree, mesh_shape: dict[str, int], itemsize: int) -> int:
    """Returns the bytes that one device holds of parameters of `itemsize` bytes an element."""
    total = 0
    for _, s in named_specs(specs):
        ranks = 1
        for entry in s.spec:
            for axis in axes_of(entry):
                ranks *= mesh_shape[axis]
        total += int(np.prod(s.shape)) * itemsize // ranks
    return total
