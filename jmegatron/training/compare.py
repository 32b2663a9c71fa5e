"""One step's loss and gradients under two layouts, compared leaf by leaf on the host.

Talks as a step's gradients do, then to the host. Both programs get the same weights and the same batch; each is
compiled by itself. What is compared has the form of a checkpoint: layers in order, whatever the pipeline.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmegatron import partition
from jmegatron.config import Config
from jmegatron.config.options import options, problem
from jmegatron.optimizer.optimizers import global_norm
from jmegatron.training.program import Program
from jmegatron.training.step import make_gradient_function

_NOT_THE_MODEL = ("make_vocab_size_divisible_by", "num_workers", "data_cache_path")
_OF_OTHER_SECTIONS = ("calculate_per_token_loss", "global_batch_size", "seed", "label_smoothing")


# ---- what has to be the same ----------------------------------------------------------------------------------------
def check_same_step(config: Config, other: Config) -> None:
    """Compares every option that decides what a step computes, and not where or how precisely.

    Args:
      config: resolved for its devices.
      other: as well.

    Raises:
      ConfigError: one differs.
    """
    differ = {}
    for name, option in options().items():
        one, two = (getattr(getattr(c, option.section), name) for c in (config, other))
        if one != two and _decides(name, option.section, config):
            differ[name] = f"{name} {one} and {two}"
    if differ:
        raise problem(
            "The two configs do not describe the same step.",
            where=differ,
            got="; ".join(differ.values()),
            expected="the same values in both: model, data and batch; layout and precision may differ",
            fix="give them behind the two files, where options apply to both",
        )


def _decides(name: str, section: str, config: Config) -> bool:
    if name == "padded_vocab_size":
        return not config.model.mask_padded_vocab
    return name in _OF_OTHER_SECTIONS or (section in ("model", "data") and name not in _NOT_THE_MODEL)


def averaging_note(config: Config, other: Config, arrays: dict[str, np.ndarray]) -> str | None:
    """Returns why the objectives themselves differ, or None.

    Means over unequal parts of unequally masked tokens; experts that other groups of tokens fill or balance.
    """
    return _note_of_experts(config, other) or _note_of_means(config, other, arrays)


def _note_of_experts(config: Config, other: Config) -> str | None:
    model = config.model
    if model.num_experts is None:
        return None
    sizes = [(c.training.micro_batch_size, c.parallel) for c in (config, other)]
    of_ranks = [(b, p.context_parallel_size, p.tensor_model_parallel_size) for b, p in sizes]
    if model.moe_expert_capacity_factor is not None and of_ranks[0] != of_ranks[1]:
        return (
            "note: the capacity of an expert is a share of one rank's tokens, and micro_batch_size,"
            " context_parallel_size or tensor_model_parallel_size differ: other tokens are dropped, and the losses are"
            " not expected to be equal without --moe-expert-capacity-factor"
        )
    balancing = model.moe_router_load_balancing_type
    if model.moe_aux_loss_coeff and balancing in ("aux_loss", "global_aux_loss") and sizes[0][0] != sizes[1][0]:
        return (
            f"note: {balancing} balances the experts over each micro-batch, and micro_batch_size differs: the gradients"
            " are not expected to be equal without --moe-router-load-balancing-type seq_aux_loss"
        )
    return None


def _note_of_means(config: Config, other: Config, arrays: dict[str, np.ndarray]) -> str | None:
    parts = [(c.training.micro_batch_size, c.parallel.context_parallel_size) for c in (config, other)]
    mask = arrays.get("loss_mask")
    if config.optimizer.calculate_per_token_loss or parts[0] == parts[1] or mask is None:
        return None
    counts = np.asarray(mask).sum(axis=1)
    if (counts == counts[0]).all() and parts[0][1] == parts[1][1]:
        return None
    return (
        "note: the loss averages the means of micro-batches, micro_batch_size or context_parallel_size differ, and so"
        " do the numbers of counted tokens: the gradients are not expected to be equal without"
        " --calculate-per-token-loss"
    )


# ---- the step -------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class StepResult:
    """Numbers of one step, on the host."""

    loss: float
    grad_norm: float
    gradients: dict[str, np.ndarray]
    """Path -> gradient, its layers in order."""


def start_weights(program: Program, state: Any = None) -> Any:
    """Returns fp32 weights on the host as a checkpoint holds them, those of `state` or those a run would start from."""
    arrays = program.saved_arrays(program.init() if state is None else state)
    structure = jax.tree.structure(program.specs, is_leaf=partition.is_spec)
    names = [f"parameters/{path}" for path, _ in partition.named_specs(program.specs)]
    return jax.device_get(jax.tree.unflatten(structure, [arrays[name] for name in names]))


def place_weights(program: Program, weights: Any) -> Any:
    """Returns the parameters that a program computes with, in its compute dtype and where it has them.

    Communication: layers move to the pipeline's places.

    Args:
      program: of a run.
      weights: see `run_step`.
    """
    specs, canonical = program.specs, program.canonical_specs
    shardings = partition.shardings(canonical, program.mesh)
    fitted = partition.map_specs(lambda s, value: _fitted(value, s.shape), canonical, weights)

    def place(values: Any) -> Any:
        placed = partition.map_specs(partition.from_canonical, specs, values, shardings)
        return partition.cast(specs, placed, program.settings.compute_dtype)

    return jax.jit(place, out_shardings=partition.shardings(specs, program.mesh))(jax.device_put(fitted, shardings))


def gradient_step(program: Program) -> Callable[[Any, dict[str, np.ndarray]], StepResult]:
    """Returns (parameters of `place_weights`, rows of a global batch) -> loss and gradients; the first call compiles.

    Communication: as of `make_gradient_function`; layers move from the pipeline's places; all leaves come to the host.
    """
    specs, shardings = program.specs, partition.shardings(program.canonical_specs, program.mesh)
    gradient_function = make_gradient_function(program.settings, program.mesh)

    def step(parameters: Any, batch: Any, key: Any) -> Any:
        report, gradients = gradient_function(parameters, batch, key)
        loss = report["loss_sum"] / jnp.maximum(report["num_tokens"], 1.0)
        return loss, global_norm(gradients), partition.map_specs(partition.to_canonical, specs, gradients, shardings)

    step = jax.jit(step, out_shardings=(None, None, shardings), compiler_options=program.xla_options.values)

    def run(parameters: Any, arrays: dict[str, np.ndarray]) -> StepResult:
        loss, norm, gradients = jax.device_get(step(parameters, program.put(arrays), program.dropout_key()))
        leaves = jax.tree_util.tree_flatten_with_path(gradients)[0]
        return StepResult(float(loss), float(norm), {partition.path_of(path): leaf for path, leaf in leaves})

    return run


def run_step(program: Program, weights: Any, arrays: dict[str, np.ndarray]) -> StepResult:
    """Returns loss and gradients of a program; compiles it.

    Communication: as of `place_weights` and `gradient_step`.

    Args:
      program: of a run.
      weights: as of `start_weights`, perhaps of a model whose padding is trained and of another size.
      arrays: the rows of a global batch.
    """
    return gradient_step(program)(place_weights(program, weights), arrays)


def _fitted(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the value with rows of padding cut off or zeros added."""
    value = value[tuple(slice(size) for size in shape)]
    return np.pad(value, [(0, size - have) for size, have in zip(shape, value.shape, strict=True)])


# ---- the comparison -------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class LeafError:
    """How far two gradients of one leaf are apart."""

    path: str
    error: float
    """Largest difference over the largest value of the two; inf where a value is not finite."""
    largest: float
    """Largest absolute value of the two."""
    place: tuple[int, ...]
    """Index of the largest difference; the first is the number of the layer where leaves are stacked."""


def layer_numbers(specs: Any) -> dict[str, list[int]]:
    """Returns path -> numbers of the layers that have a stacked parameter, in order; `specs` are a program's own."""
    stacked = {path: np.asarray(spec.stacked).reshape(-1) for path, spec in partition.named_specs(specs)}
    return {path: np.sort(layers[layers >= 0]).astype(int).tolist() for path, layers in stacked.items() if layers.size}


def compare_gradients(
    one: dict[str, np.ndarray], two: dict[str, np.ndarray], layers: Mapping[str, Sequence[int]] | None = None
) -> list[LeafError]:
    """Returns every leaf's error, the worst first; padding of the vocabulary that only one has is left out.

    Args:
      one: gradient of each path.
      two: as well.
      layers: of `layer_numbers`; None: the first index of a leaf stays what it is.

    Raises:
      ValueError: the trees differ.
    """
    if one.keys() != two.keys():
        raise ValueError(f"leaves of one step alone: {', '.join(sorted(one.keys() ^ two.keys()))}")
    rows = [_leaf_error(path, one[path], two[path]) for path in one]
    if layers is not None:
        number = lambda r: (layers[r.path][r.place[0]], *r.place[1:]) if r.path in layers else r.place  # noqa: E731
        rows = [dataclasses.replace(row, place=number(row)) for row in rows]
    return sorted(rows, key=lambda row: -row.error)


def _leaf_error(path: str, one: np.ndarray, two: np.ndarray) -> LeafError:
    common = tuple(slice(min(sizes)) for sizes in zip(one.shape, two.shape, strict=True))
    one, two = (np.asarray(value[common], np.float32) for value in (one, two))
    bad = ~(np.isfinite(one) & np.isfinite(two))
    largest = max(float(np.abs(one).max()), float(np.abs(two).max()))
    difference = np.abs(np.where(bad, 0, one) - np.where(bad, 0, two))
    place = tuple(int(i) for i in np.unravel_index(int(np.where(bad, np.inf, difference).argmax()), one.shape))
    if bad.any():
        return LeafError(path, math.inf, largest, place)
    # Both zero everywhere: equal. A leaf that is zero in one alone: error 1.
    return LeafError(path, float(difference.max()) / largest if largest > 0 else 0.0, largest, place)


def relative(one: float, two: float) -> float:
    """Returns |one - two| over the larger of the two; inf where one is not finite."""
    if not (math.isfinite(one) and math.isfinite(two)):
        return math.inf
    largest = max(abs(one), abs(two))
    return abs(one - two) / largest if largest else 0.0
