"""Cross-entropy over a vocabulary divided over ranks, with or without its matmul. Talks on the axis it is given (tp).

Source: arXiv:1909.08053 section 3 (communicate losses, not logits); Megatron-LM tensor_parallel/cross_entropy.py.
With z the logits, V the vocabulary, y the label and e the label smoothing:

    loss = (1 - s) (log sum_v exp z_v - z_y) + s (log sum_v exp z_v - mean_v z_v),   s = e V / (V - 1)
    dloss/dz_v = softmax(z)_v - (1 - s) [v = y] - s / V

Everything in fp32. V is the whole vocabulary: the reference smooths over a rank's part, so that its loss depends on
tp; here every mesh gives the tp = 1 loss. Columns from `vocab_size` on are padding and take no part.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from jmegatron.collectives import Axes, axis_rank, axis_size, max_over, reduce_from, vary_like

LOGITS_BYTES = 64 * 2**20
"""fp32 logits that may exist at once on a device: longer sequences are cut into chunks."""


class _Settings(NamedTuple):
    axis: Axes
    vocab_size: int | None
    label_smoothing: float
    transposed: bool
    num_chunks: int


def vocab_parallel_cross_entropy(
    logits: Float[Array, "*batch vocab_local"],
    labels: Integer[Array, "*batch"],
    *,
    axis: str | None,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
) -> Float[Array, "*batch"]:
    """Returns the fp32 loss of each token; differentiable with respect to the logits.

    Communication over axis, T = bytes of one fp32 number a token: forward all-reduce of T (maximum) and of 2 T (3 T
    with smoothing), backward none.

    Args:
      logits: this rank's columns.
      labels: ids in [0, vocab_size).
      axis: mesh axis, or None.
      vocab_size: columns from here on (counted over all ranks) are padding; None: there is none.
      label_smoothing: e above, in [0, 1).
    """
    settings = _Settings(axis, vocab_size, label_smoothing, False, 1)
    logits = vary_like(logits, labels, axis_rank(axis))
    return _logits_cross_entropy(settings, logits, labels)


def linear_cross_entropy(
    x: Float[Array, "batch seq hidden"],
    kernel: Float[Array, "inner outer"],
    labels: Integer[Array, "batch seq"],
    weights: Float[Array, "batch seq"],
    *,
    axis: Axes,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    transposed: bool = False,
    num_chunks: int | None = None,
) -> tuple[Float[Array, ""], Float[Array, "batch seq"]]:
    """Returns (sum of weight x loss, loss of each token) of logits x K, without ever holding all logits.

    The weights are an input so that the forward pass already knows each logit's gradient: both gradients are formed
    chunk by chunk while the chunk's logits exist, nothing is recomputed (FLOPs: 3 x forward, 1 x without a gradient)
    and no logits are kept. Only the sum is differentiable (x and kernel); the per-token losses are for reporting and
    the weights count as constants.

    Communication over axis, T as above: forward all-reduces of T and 2 T (3 T), in num_chunks pieces; backward none
    if x already varies over axis (after `gather_sequence` or `copy_to`), else an all-reduce of x's bytes.

    Args:
      x: hidden states, whole sequence.
      kernel: [hidden, vocab_local], or [vocab_local, hidden] with `transposed` (a tied embedding).
      labels: ids in [0, vocab_size).
      weights: fp32 weight of each token (0: does not count).
      axis: mesh axis or axes, or None.
      vocab_size: columns from here on are padding; None: there is none.
      label_smoothing: in [0, 1).
      transposed: see kernel.
      num_chunks: pieces of the sequence; None: as many as keep the logits below LOGITS_BYTES.

    Raises:
      ValueError: seq is not divisible by num_chunks.
    """
    batch, seq, _ = x.shape
    vocab_local = kernel.shape[0 if transposed else 1]
    chunks = num_chunks or _choose_chunks(batch, seq, vocab_local)
    if seq % chunks:
        raise ValueError(f"num_chunks: the sequence of {seq} tokens cannot be cut into {chunks} equal chunks")
    settings = _Settings(axis, vocab_size, label_smoothing, transposed, chunks)
    # Outside the custom gradient, so that autodiff adds whatever reduction the caller's sharding asks for.
    x, kernel = vary_like(x, kernel, labels, weights), vary_like(kernel, x, labels, weights)
    weighted, losses = _linear_cross_entropy(settings, x, kernel, labels, lax.stop_gradient(weights))
    return weighted, lax.stop_gradient(losses)


def _choose_chunks(batch: int, seq: int, vocab_local: int) -> int:
    wanted = -(-batch * seq * vocab_local * 4 // LOGITS_BYTES)
    return next(n for n in range(min(max(wanted, 1), seq), seq + 1) if seq % n == 0)


# ---- one block of logits ------------------------------------------------------------------------------------------
def _prepare(logits: Array, settings: _Settings) -> tuple[Array, Array, Array | None]:
    """Returns fp32 logits with padding at the lowest number, the global column numbers, and which are real."""
    z = logits.astype(jnp.float32)
    vocab_local = z.shape[-1]
    columns = axis_rank(settings.axis) * vocab_local + jnp.arange(vocab_local)
    if settings.vocab_size is None:
        return z, columns, None
    real = columns < settings.vocab_size
    return jnp.where(real, z, jnp.finfo(jnp.float32).min), columns, real


def _num_classes(vocab_local: int, settings: _Settings) -> int:
    return settings.vocab_size or vocab_local * axis_size(settings.axis)


def _smoothing(vocab_local: int, settings: _Settings) -> float:
    classes = _num_classes(vocab_local, settings)
    return settings.label_smoothing * classes / (classes - 1) if settings.label_smoothing else 0.0


def _losses(z: Array, columns: Array, real: Array | None, labels: Array, settings: _Settings) -> tuple[Array, Array]:
    """Returns (loss, log sum exp) of a block of logits."""
    axis, vocab_local = settings.axis, z.shape[-1]
    largest = max_over(z.max(-1), axis)
    # Read one logit instead of summing over a one-hot row: that would be one more pass over all logits.
    place = labels - columns[0]
    owned = (place >= 0) & (place < vocab_local)
    label_logit = jnp.take_along_axis(z, jnp.clip(place, 0, vocab_local - 1)[..., None], axis=-1)[..., 0]
    sums = [jnp.exp(z - largest[..., None]).sum(-1), jnp.where(owned, label_logit, 0)]
    smoothing = _smoothing(vocab_local, settings)
    if smoothing:
        sums.append((z if real is None else jnp.where(real, z, 0)).sum(-1))
    # One all-reduce for all sums.
    totals = reduce_from(jnp.stack(sums), axis)
    lse = jnp.log(totals[0]) + largest
    loss = (1 - smoothing) * (lse - totals[1])
    if smoothing:
        loss = loss + smoothing * (lse - totals[2] / _num_classes(vocab_local, settings))
    return loss, lse


def _logit_gradients(
    z: Array, columns: Array, real: Array | None, labels: Array, lse: Array, settings: _Settings
) -> Array:
    smoothing = _smoothing(z.shape[-1], settings)
    gradients = jnp.exp(z - lse[..., None]) - (1 - smoothing) * (columns == labels[..., None])
    if smoothing:
        share = smoothing / _num_classes(z.shape[-1], settings)
        gradients = gradients - (share if real is None else share * real)
    return gradients


# ---- on logits ----------------------------------------------------------------------------------------------------
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logits_cross_entropy(settings: _Settings, logits: Array, labels: Array) -> Array:
    return _losses(*_prepare(logits, settings), labels, settings)[0]


def _logits_forward(settings: _Settings, logits: Array, labels: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    losses, lse = _losses(*_prepare(logits, settings), labels, settings)
    return losses, (logits, labels, lse)


def _logits_backward(
    settings: _Settings, residuals: tuple[Array, Array, Array], cotangent: Array
) -> tuple[Array, None]:
    logits, labels, lse = residuals
    gradients = _logit_gradients(*_prepare(logits, settings), labels, lse, settings)
    return (gradients * cotangent[..., None]).astype(logits.dtype), None


_logits_cross_entropy.defvjp(_logits_forward, _logits_backward)


# ---- with the matmul ----------------------------------------------------------------------------------------------
def _chunked(array: Array, num_chunks: int) -> Array:
    """[batch, seq, ...] -> [num_chunks, batch, seq / num_chunks, ...]."""
    batch, seq, *rest = array.shape
    return jnp.moveaxis(array.reshape(batch, num_chunks, seq // num_chunks, *rest), 1, 0)


def _joined(array: Array) -> Array:
    """[num_chunks, batch, chunk, ...] -> [batch, seq, ...]."""
    chunks, batch, length, *rest = array.shape
    return jnp.moveaxis(array, 0, 1).reshape(batch, chunks * length, *rest)


def _logits(x: Array, kernel: Array, settings: _Settings) -> Array:
    equation = "bsh,vh->bsv" if settings.transposed else "bsh,hv->bsv"
    return jnp.einsum(equation, x, kernel)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_cross_entropy(
    settings: _Settings, x: Array, kernel: Array, labels: Array, weights: Array
) -> tuple[Array, Array]:
    def block(_: None, inputs: tuple[Array, Array]) -> tuple[None, Array]:
        x_chunk, labels_chunk = inputs
        z, columns, real = _prepare(_logits(x_chunk, kernel, settings), settings)
        return None, _losses(z, columns, real, labels_chunk, settings)[0]

    inputs = jax.tree.map(lambda a: _chunked(a, settings.num_chunks), (x, labels))
    losses = _joined(lax.scan(block, None, inputs)[1])
    return (losses * weights).sum(), losses


def _forward(settings: _Settings, x: Array, kernel: Array, labels: Array, weights: Array):
    transposed = settings.transposed

    def block(kernel_gradient: Array, inputs: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        x_chunk, labels_chunk, weights_chunk = inputs
        z, columns, real = _prepare(_logits(x_chunk, kernel, settings), settings)
        losses, lse = _losses(z, columns, real, labels_chunk, settings)
        gradients = _logit_gradients(z, columns, real, labels_chunk, lse, settings)
        # Rounded to the compute dtype like any other activation gradient; the reference rounds to bf16 always.
        dz = (gradients * weights_chunk[..., None]).astype(x.dtype)
        dx = jnp.einsum("bsv,vh->bsh" if transposed else "bsv,hv->bsh", dz, kernel)
        equation = "bsv,bsh->vh" if transposed else "bsh,bsv->hv"
        operands = (dz, x_chunk) if transposed else (x_chunk, dz)
        # fp32: the sum over chunks must not round at each chunk.
        dk = jnp.einsum(equation, *operands, preferred_element_type=jnp.float32)
        return kernel_gradient + dk, (losses, dx)

    inputs = jax.tree.map(lambda a: _chunked(a, settings.num_chunks), (x, labels, weights))
    start = vary_like(jnp.zeros(kernel.shape, jnp.float32), x, kernel, labels, weights)
    kernel_gradient, (losses, dx) = lax.scan(block, start, inputs)
    losses = _joined(losses)
    return ((losses * weights).sum(), losses), (_joined(dx), kernel_gradient.astype(kernel.dtype))


def _backward(settings: _Settings, residuals: tuple, cotangents: tuple):
    dx, kernel_gradient = residuals
    scale = cotangents[0]
    return (dx * scale).astype(dx.dtype), (kernel_gradient * scale).astype(kernel_gradient.dtype), None, None


_linear_cross_entropy.defvjp(_forward, _backward)
