"""Column- and row-parallel linear layers. They talk on the axis they are given (tp).

Source: arXiv:1909.08053 section 3; with sequence parallelism arXiv:2205.05198 section 4.2.2; Megatron-LM
tensor_parallel/layers.py. `axis=None` makes each function its own unsharded reference.

A pair Y = gelu(X A) B with A divided by columns and B by rows needs one collective at its entry and one at its exit:

    X --enter_region--> X A_r --gelu--> (.) B_r --leave_region--> Y + bias
"""

from collections.abc import Sequence

from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jmegatron.collectives import enter_region, gather_from, leave_region, scatter_to
from jmegatron.partition import Initializer, ParameterSpec, normal, zeros

Parameters = dict[str, Array]


def matmul(
    x: Float[Array, "batch seq inner"], kernel: Float[Array, "inner *outer"]
) -> Float[Array, "batch seq *outer"]:
    """Returns x times kernel over `inner`; kernel may have any number of output dims. Communication: none.

    forward y = x K; dgrad dx = dy K^T; wgrad dK = x^T dy (over all tokens).
    """
    return lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


def column_parallel_specs(
    in_features: int,
    out_features: int | Sequence[int],
    *,
    axis: str | None,
    use_bias: bool = True,
    sharded_dim: int = -1,
    kernel_init: Initializer | None = None,
) -> dict[str, ParameterSpec]:
    """Returns the declarations of kernel [in_features, *out_features] and bias [*out_features].

    `axis` divides output dim `sharded_dim` (counted within out_features); None replicates.
    """
    out = (out_features,) if isinstance(out_features, int) else tuple(out_features)
    entries: list[str | None] = [None] * len(out)
    entries[sharded_dim] = axis
    matrix = (-len(out) - 1,), tuple(range(-len(out), 0))
    kernel = ParameterSpec((in_features, *out), P(None, *entries), kernel_init or normal(0.02), matrix=matrix)
    specs = {"kernel": kernel}
    if use_bias:
        specs["bias"] = ParameterSpec(out, P(*entries), zeros, weight_decay=False)
    return specs


def row_parallel_specs(
    in_features: int | Sequence[int],
    out_features: int,
    *,
    axis: str | None,
    use_bias: bool = True,
    sequence_parallel: bool = False,
    kernel_init: Initializer | None = None,
) -> dict[str, ParameterSpec]:
    """Returns the declarations of kernel [*in_features, out_features] (first dim divided) and bias [out_features].

    The bias is replicated; under sequence parallelism each rank's gradient of it covers only the rank's tokens.
    """
    ins = (in_features,) if isinstance(in_features, int) else tuple(in_features)
    kernel_spec = P(axis, *([None] * len(ins)))
    matrix = tuple(range(-len(ins) - 1, -1)), (-1,)
    specs = {"kernel": ParameterSpec((*ins, out_features), kernel_spec, kernel_init or normal(0.02), matrix=matrix)}
    if use_bias:
        partial = (axis,) if sequence_parallel and axis else ()
        specs["bias"] = ParameterSpec((out_features,), P(None), zeros, partial_axes=partial, weight_decay=False)
    return specs


def column_parallel_linear(
    parameters: Parameters,
    x: Float[Array, "batch seq inner"],
    *,
    axis: str | None,
    sequence_parallel: bool = False,
    gather_output: bool = False,
) -> Float[Array, "batch seq_out *outer_local"]:
    """Returns this rank's columns of x K + bias.

    Communication over axis, B = bytes of the whole x: forward none (sequence_parallel: all-gather of B), backward
    all-reduce of B (sequence_parallel: reduce-scatter of B); gather_output: forward all-gather of the output.

    Args:
      parameters: kernel [inner, *outer_local], optional bias [*outer_local].
      x: replicated, or this rank's sequence shard (seq = whole / axis size) with sequence_parallel.
      axis: mesh axis, or None.
      sequence_parallel: x is divided along its sequence.
      gather_output: join the last output dim, so that every rank has the whole result.
    """
    y = matmul(enter_region(x, axis, sequence_parallel=sequence_parallel), parameters["kernel"])
    if "bias" in parameters:
        y = y + parameters["bias"]
    return gather_from(y, axis, -1) if gather_output else y


def row_parallel_linear(
    parameters: Parameters,
    x: Float[Array, "batch seq *inner_local"],
    *,
    axis: str | None,
    sequence_parallel: bool = False,
    input_is_parallel: bool = True,
) -> Float[Array, "batch seq_out outer"]:
    """Returns the sum over ranks of x_r K_r, plus the bias once.

    Communication over axis, B = bytes of the output: forward all-reduce of B (sequence_parallel: reduce-scatter),
    backward none (sequence_parallel: all-gather of B); input_is_parallel=False: backward all-gather of the input.

    Args:
      parameters: kernel [*inner_local, outer], optional bias [outer].
      x: this rank's part of the input features (or all of them, replicated, with input_is_parallel=False).
      axis: mesh axis, or None.
      sequence_parallel: return this rank's sequence shard (seq_out = seq / axis size) instead of the whole.
      input_is_parallel: x is already divided.
    """
    kernel = parameters["kernel"]
    if not input_is_parallel:
        x = scatter_to(x, axis, 2)
    inner = kernel.ndim - 1
    y = lax.dot_general(x, kernel, ((tuple(range(x.ndim - inner, x.ndim)), tuple(range(inner))), ((), ())))
    y = leave_region(y, axis, sequence_parallel=sequence_parallel)
    # After the reduction: inside it the bias would be added once per rank.
    return y + parameters["bias"] if "bias" in parameters else y
