"""Parameter declarations: the one place where a parameter's shape, sharding, start value and gradient rule are stated.

No communication. A model is a nested dict of `ParameterSpec`; everything else that has the model's structure (start
values, shardings, abstract arrays, weight-decay mask, gradient reductions) is a map over that tree.
"""

import dataclasses
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


def canonical(spec: ParameterSpec) -> ParameterSpec:
    """Returns the declaration with its layers in order along one leading dim: the same on every mesh.

    The leading dim keeps its axis if it can be divided over it as before, that is if no place is without a layer.
    """
    if not spec.stacked:
        return spec
    rest = spec.num_stacked_dims
    layers = np.asarray(spec.stacked)
    axis = spec.spec[rest - 1] if (layers >= 0).all() else None
    count = int((layers >= 0).sum())
    rows = (tuple(range(count)),)
    return dataclasses.replace(spec, shape=(count, *spec.shape[rest:]), spec=P(axis, *spec.spec[rest:]), stacked=rows)


def to_canonical(spec: ParameterSpec, value: Array) -> Array:
    """Returns the layers of a stacked parameter (or of its moments) in order, [layers, ...].

    Communication: under jit, what brings each layer to where the output's sharding wants it.
    """
    if not spec.stacked:
        return value
    places = np.asarray(spec.stacked).reshape(-1)
    order = np.argsort(np.where(places < 0, len(places), places), kind="stable")[: int((places >= 0).sum())]
    flat = value.reshape(len(places), *value.shape[spec.num_stacked_dims :])
    return flat if np.array_equal(order, np.arange(len(places))) else jnp.take(flat, order, axis=0)


def from_canonical(spec: ParameterSpec, value: Array) -> Array:
    """Returns the layers [layers, ...] at their places, zeros where there is none. Communication: as `to_canonical`."""
    if not spec.stacked:
        return value
    places = np.asarray(spec.stacked).reshape(-1)
    if len(places) != len(value) or (places != np.arange(len(places))).any():
        filled = jnp.take(value, np.maximum(places, 0), axis=0)
        absent = (places < 0).reshape(-1, *[1] * (value.ndim - 1))
        value = jnp.where(absent, jnp.zeros((), value.dtype), filled) if (places < 0).any() else filled
    return value.reshape(spec.shape)


def data_sharded(spec: ParameterSpec, axes: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[P, int | None]:
    """Returns (spec, dim) with one more dim, or a dim once more, divided over data axes (arXiv:1910.02054, stage 1).

    The dim that is longest on a device among those that can be divided; never one that counts layers, so that each
    layer can be gathered and reduced by itself. A parameter without such a dim stays as it is: dim None.

    Args:
      spec: the declaration.
      axes: data axes, the first one slowest.
      sizes: size of each mesh axis.
    """
    ranks = math.prod(sizes[axis] for axis in axes)
    entries = [*spec.spec, *[None] * (len(spec.shape) - len(spec.spec))]
    best, length = None, 0
    for dim in range(spec.num_stacked_dims, len(spec.shape)):
        local = spec.shape[dim] // math.prod(sizes[axis] for axis in axes_of(entries[dim]))
        if local % ranks == 0 and local > length:
            best, length = dim, local
    if ranks == 1 or best is None:
        return spec.spec, None
    entries[best] = (*axes_of(entries[best]), *axes)
    return P(*entries), best


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


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
