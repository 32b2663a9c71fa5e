"""Norm layers: declarations, and the choice between LayerNorm and RMSNorm. No communication.

Under sequence parallelism a norm works on the rank's own tokens, so its gradients are parts that are summed over the
axis once a step. Megatron-LM transformer/torch_norm.py.
"""

from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jmegatron.ops.norms import layer_norm, rms_norm
from jmegatron.partition import ParameterSpec, ones, zeros

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


def norm_specs(
    features: int, normalization: str, *, partial_axes: tuple[str, ...] = (), zero_centered: bool = False
) -> dict[str, ParameterSpec]:
    """Returns the declarations of scale [features] and, for LayerNorm, bias [features].

    Raises:
      ValueError: unknown normalization.
    """
    _check(normalization)
    start = zeros if zero_centered else ones
    specs = {"scale": ParameterSpec((features,), P(None), start, partial_axes, weight_decay=False)}
    if normalization == "LayerNorm":
        specs["bias"] = ParameterSpec((features,), P(None), zeros, partial_axes, weight_decay=False)
    return specs


def norm(
    parameters: dict[str, Array],
    x: Float[Array, "*batch features"],
    normalization: str,
    *,
    eps: float = 1e-5,
    zero_centered: bool = False,
) -> Float[Array, "*batch features"]:
    """Returns the normed x, statistics in fp32. Communication: none.

    `zero_centered` (Megatron's layernorm_1p) stores scale - 1.

    Raises:
      ValueError: unknown normalization.
    """
    _check(normalization)
    scale = parameters["scale"] + 1 if zero_centered else parameters["scale"]
    if normalization == "RMSNorm":
        return rms_norm(x, scale, eps)
    return layer_norm(x, scale, parameters.get("bias"), eps)


def _check(normalization: str) -> None:
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization: got {normalization!r}, expected one of {', '.join(NORMALIZATIONS)}")
