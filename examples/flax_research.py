"""Two of jmegatron's layers in a Flax model of one's own, trained in a shard_map loop of one's own.

    python examples/flax_research.py            # 8 virtual CPU devices: dp 2 x tp 4

A residual network learns y = sin(x W) with its wide layer divided over "tp" and the batch over "dp". Nothing else of
jmegatron is needed: the layers bring their own collectives and tell Flax how their parameters are divided.
"""

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmegatron.layers import ColumnParallelLinear, RowParallelLinear

FEATURES, WIDE, BATCH, SEQ = 32, 256, 16, 8


class Block(nnx.Module):
    """x + down(silu(up(x))), its wide side divided over `axis`."""

    def __init__(self, axis: str | None, rngs: nnx.Rngs):
        """Creates both layers; axis=None gives the same model on one device."""
        self.up = ColumnParallelLinear(FEATURES, WIDE, axis=axis, rngs=rngs)
        self.down = RowParallelLinear(WIDE, FEATURES, axis=axis, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, seq, features] to the same shape."""
        return x + self.down(nnx.silu(self.up(x)))


def train(num_steps: int = 200, axis: str | None = "tp") -> list[float]:
    """Trains on the mesh dp 2 x tp 4 (axis="tp") or dp 8 (axis=None) and returns the losses."""
    shape = (2, 4) if axis else (8, 1)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(shape), ("dp", "tp"))
    graph, state = nnx.split(Block(axis, nnx.Rngs(0)))
    specs = nnx.get_partition_spec(state)
    optimizer = optax.adam(1e-2)

    def local_loss(state, x, y):  # the model sees this rank's part of everything
        error = nnx.merge(graph, state)(x) - y
        return jax.lax.pmean(jnp.square(error).mean(), "dp")

    loss = jax.shard_map(local_loss, mesh=mesh, in_specs=(specs, P("dp"), P("dp")), out_specs=P())

    @jax.jit
    def step(state, optimizer_state, x, y):
        value, gradients = jax.value_and_grad(loss)(state, x, y)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, state)
        return optax.apply_updates(state, updates), optimizer_state, value

    place = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda s: isinstance(s, P))
    state = jax.device_put(state, place)
    optimizer_state = optimizer.init(state)
    weights = jax.random.normal(jax.random.key(1), (FEATURES, FEATURES)) / FEATURES**0.5
    losses = []
    for i in range(num_steps):
        x = jax.random.normal(jax.random.fold_in(jax.random.key(2), i), (BATCH, SEQ, FEATURES))
        state, optimizer_state, value = step(state, optimizer_state, x, jnp.sin(x @ weights))
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    history = train()
    print(f"loss {history[0]:.4f} -> {history[-1]:.4f}")
