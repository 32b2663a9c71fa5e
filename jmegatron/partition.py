"""Parameter declarations: the one place where a parameter's shape, sharding, start value and gradient rule are stated.

No communication. A model is a nested dict of `ParameterSpec`; everything else that has the model's structure (start
values, shardings, abstract arrays, weight-decay mask, gradient reductions) is a map over that tree.
"""

import dataclasses
from collections.abc import Callable
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
    """Global shape, stacked layers first if `num_stacked` is set."""
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
    num_stacked: int = 0
    """Layers stacked along dim 0 (0: not stacked)."""

    def __post_init__(self) -> None:
        if len(self.spec) > len(self.shape):
            raise ValueError(f"spec {self.spec} has more entries than shape {self.shape} has dims")


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


def stack(specs: Tree, num_layers: int, axis: str | None = None) -> Tree:
    """Returns the declarations of `num_layers` equal layers stacked along a new leading dim that lies on `axis`."""

    def leaf(s: ParameterSpec) -> ParameterSpec:
        return dataclasses.replace(s, shape=(num_layers, *s.shape), spec=P(axis, *s.spec), num_stacked=num_layers)

    return map_specs(leaf, specs)


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
    """Returns the number of elements, vocabulary padding included."""
    return sum(int(np.prod(s.shape)) for _, s in named_specs(specs))


def init_parameters(specs: Tree, key: Key[Array, ""], dtype: Any = jnp.float32) -> Tree:
    """Returns the start values; equal for every sharding, since each depends on (path, global layer, index) alone.

    Call under `jax.jit(..., out_shardings=shardings(specs, mesh))`, so that no device ever holds a whole parameter.
    """

    def leaf(key_path: tuple[Any, ...], s: ParameterSpec) -> Array:
        own = random.parameter_key(key, path_of(key_path))
        if not s.num_stacked:
            return s.init(own, s.shape, dtype)
        return jax.vmap(lambda k: s.init(k, s.shape[1:], dtype))(random.layer_keys(own, s.num_stacked))

    return jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=is_spec)


def local_bytes(specs: Tree, mesh_shape: dict[str, int], itemsize: int) -> int:
    """Returns the bytes that one device holds of parameters of `itemsize` bytes an element."""
    total = 0
    for _, s in named_specs(specs):
        ranks = 1
        for entry in s.spec:
            for axis in (entry,) if isinstance(entry, str) else (entry or ()):
                ranks *= mesh_shape[axis]
        total += int(np.prod(s.shape)) * itemsize // ranks
    return total
