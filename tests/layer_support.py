"""One layer at any mesh against a dense formula: values, and gradients of every parameter and of the input."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tolerances import LAYER_RELATIVE

from jmegatron import partition
from jmegatron.collectives import sum_over, varying_axes
from jmegatron.mesh import AXES, build_mesh

Tree = Any


QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Half the compile time; the numbers of runs this small do not depend on it."""


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function, compiler_options=QUICK_COMPILE)


def mesh_of(dp: int, tp: int) -> Mesh:
    return build_mesh(jax.devices()[: dp * tp], dp=dp, tp=tp)


def noisy(tree: Tree, seed: int = 0) -> Tree:
    """The tree with a little noise on every leaf: zero biases and unit scales would hide mistakes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: a + 0.2 * rng.standard_normal(a.shape).astype(np.float32), tree)


def normal(*shape: int, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@dataclasses.dataclass
class Result:
    y: Any
    parameter_gradients: Tree
    x_gradient: Any

    def named(self) -> dict[str, np.ndarray]:
        leaves = jax.tree_util.tree_flatten_with_path({"y": self.y, "x": self.x_gradient, **self.parameter_gradients})[
            0
        ]
        return {partition.path_of(path): np.asarray(leaf) for path, leaf in leaves if leaf is not None}


def assert_equal_results(got: Result, expected: Result, tolerance: float = LAYER_RELATIVE) -> None:
    got_leaves, expected_leaves = got.named(), expected.named()
    assert got_leaves.keys() == expected_leaves.keys()
    for name, reference in expected_leaves.items():
        assert got_leaves[name].shape == reference.shape, name
        error = np.abs(got_leaves[name] - reference).max() / np.abs(reference).max()
        assert error <= tolerance, f"{name} differs by {error:.2e}"


def dense(function: Callable[[Tree, Any], Any], parameters: Tree, x: Any) -> Result:
    """The formula `function(parameters, x)` on one device, with the gradients of sum(y x fixed random numbers)."""

    def loss(parameters, x):
        y = function(parameters, x)
        return (y * normal(*y.shape, seed=9)).sum(), y

    arguments = (0, 1) if jnp.issubdtype(x.dtype, jnp.floating) else (0,)
    (_, y), gradients = _jit(jax.value_and_grad(loss, arguments, has_aux=True))(parameters, x)
    return Result(y, gradients[0], gradients[1] if len(gradients) > 1 else None)


def sharded(
    function: Callable[[Tree, Any], Any],
    parameters: Tree,
    parameter_specs: Tree,
    x: Any,
    *,
    dp: int = 1,
    tp: int,
    x_spec: P,
    y_spec: P,
    inside: bool = False,
) -> Result:
    """The same of `function` mapped over a mesh; `inside`: differentiated within the map instead of outside it."""
    mesh = mesh_of(dp, tp)
    arguments = (0, 1) if jnp.issubdtype(x.dtype, jnp.floating) else (0,)
    out_shape = jax.eval_shape(
        jax.shard_map(function, mesh=mesh, in_specs=(parameter_specs, x_spec), out_specs=y_spec), parameters, x
    ).shape
    cotangent = normal(*out_shape, seed=9)

    def local_loss(parameters, x, cotangent):
        y = function(parameters, x)
        part = (y * cotangent).sum()
        return (sum_over(part, tuple(a for a in AXES if a in varying_axes(part)) or None) if inside else part), y

    if inside:
        body = jax.value_and_grad(local_loss, arguments, has_aux=True)
        gradient_specs = (parameter_specs, x_spec)[: len(arguments)]
        (_, y), gradients = _jit(
            jax.shard_map(
                body,
                mesh=mesh,
                in_specs=(parameter_specs, x_spec, y_spec),
                out_specs=((P(), y_spec), gradient_specs),
            )
        )(parameters, x, cotangent)
    else:
        mapped = jax.shard_map(function, mesh=mesh, in_specs=(parameter_specs, x_spec), out_specs=y_spec)

        def loss(parameters, x):
            y = mapped(parameters, x)
            return (y * cotangent).sum(), y

        (_, y), gradients = _jit(jax.value_and_grad(loss, arguments, has_aux=True))(parameters, x)
    return Result(y, gradients[0], gradients[1] if len(gradients) > 1 else None)


def module_tree(graph: Any, state: Any) -> Tree:
    return nnx.merge(graph, state).tree()


def module_on_one_device(module: nnx.Module, x: Any) -> tuple[Result, Tree]:
    """Returns (result of a module made with axis=None, the noisy parameters it had)."""
    graph, state = nnx.split(module)
    state = noisy(state)
    result = dense(lambda state, x: nnx.merge(graph, state)(x), state, x)
    return dataclasses.replace(result, parameter_gradients=module_tree(graph, result.parameter_gradients)), module_tree(
        graph, state
    )


def module_on_mesh(module: nnx.Module, x: Any, **layout: Any) -> Result:
    """The result of a module made with axis="tp", mapped as its docstring says; parameters as on one device."""
    graph, state = nnx.split(module)
    specs = nnx.get_partition_spec(state)
    result = sharded(lambda state, x: nnx.merge(graph, state)(x), noisy(state), specs, x, **layout)
    return dataclasses.replace(result, parameter_gradients=module_tree(graph, result.parameter_gradients))


def check_module(
    make: Callable[[str | None], nnx.Module], formula: Callable[[Tree, Any], Any], x: Any, **layout: Any
) -> None:
    """`make(axis)` at a mesh equals `make(None)` equals the dense formula."""
    alone, parameters = module_on_one_device(make(None), x)
    assert_equal_results(alone, dense(formula, parameters, x))
    assert_equal_results(module_on_mesh(make("tp"), x, **layout), alone)


# Specs of activations [batch, seq, features].
WHOLE = P("dp")
SEQUENCE = P("dp", "tp")
FEATURES = P("dp", None, "tp")
