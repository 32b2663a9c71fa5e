"""Tiny models and batches, and one step's loss and gradients at any mesh, for tests."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np

from jmegatron import partition
from jmegatron.context_parallel.layout import WHOLE_SEQUENCE, ContextParallel
from jmegatron.layers import AttentionSettings, MLPSettings
from jmegatron.mesh import BATCH_AXES, build_mesh
from jmegatron.models.gpt import ONE_STAGE, GPTSettings, PipelineParallel, gpt_specs
from jmegatron.models.transformer import LayerParallel, LayerSettings
from jmegatron.moe.layer import ExpertParallel
from jmegatron.optimizer.optimizers import OptimizerSettings, global_norm
from jmegatron.training.batches import Batch, batch_shardings
from jmegatron.training.stages import PipelineSettings
from jmegatron.training.state import data_shardings
from jmegatron.training.step import StepSettings, make_gradient_function


def tiny_gpt(
    *,
    num_layers: int = 2,
    hidden: int = 32,
    heads: int = 8,
    kv_heads: int = 8,
    head_dim: int = 4,
    ffn: int = 64,
    vocab: int = 29,
    padded_vocab: int = 32,
    max_positions: int = 16,
    activation: str = "gelu_tanh",
    normalization: str = "LayerNorm",
    bias: bool = True,
    position: str = "learned_absolute",
    tied: bool = True,
    qk_norm: bool = False,
    dropout: float = 0.0,
    **changes: Any,
) -> GPTSettings:
    """A model small enough to compile in a second and odd enough to catch wrong layouts."""
    attention = AttentionSettings(
        hidden,
        heads,
        kv_heads,
        head_dim,
        use_bias=bias,
        use_qkv_bias=bias,
        qk_norm=normalization if qk_norm else None,
        dropout=dropout,
    )
    layer = LayerSettings(attention, MLPSettings(hidden, ffn, activation, bias), normalization, hidden_dropout=dropout)
    settings = GPTSettings(
        num_layers, layer, vocab, padded_vocab, max_positions, position, rotary_dim=head_dim, tied=tied, init_std=0.1
    )
    return dataclasses.replace(settings, **changes)


def random_batch(
    global_batch: int, seq: int, vocab: int, *, seed: int = 0, masked_rows: tuple[int, ...] = ()
) -> dict[str, np.ndarray]:
    """Tokens, labels and a mask with about a fifth of zeros, in sample order [global_batch, seq]."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, vocab, (global_batch, seq + 1), dtype=np.int32)
    mask = (rng.random((global_batch, seq)) > 0.2).astype(np.float32)
    mask[list(masked_rows)] = 0.0
    return {
        "tokens": text[:, :-1],
        "labels": text[:, 1:],
        "loss_mask": mask,
        "sample_ids": np.arange(global_batch, dtype=np.uint32),
    }


def as_batch(arrays: dict[str, np.ndarray], num_microbatches: int, mesh: Any = None) -> Batch:
    """Cuts a global batch micro-batch major: consecutive samples make a micro-batch of all dp ranks."""
    cut = {name: a.reshape(num_microbatches, -1, *a.shape[1:]) for name, a in arrays.items()}
    batch = Batch(**cut)
    return batch if mesh is None else jax.device_put(batch, batch_shardings(batch, mesh))


@dataclasses.dataclass
class StepResult:
    loss: float
    grad_norm: float
    gradients: dict[str, np.ndarray]
    report: Any = None


def run_gradients(
    settings: GPTSettings,
    arrays: dict[str, np.ndarray],
    *,
    dp: int = 1,
    tp: int = 1,
    sequence_parallel: bool = False,
    num_microbatches: int = 1,
    per_token: bool = True,
    dropout: bool = False,
    parameters: Any = None,
    seed: int = 7,
    pp: int = 1,
    places: Any = (),
    distributed: Any = (),
    cp: int = 1,
    comm_type: str = "p2p",
    ep: int = 1,
    divided_experts: bool = True,
    **pipeline: Any,
) -> StepResult:
    """Loss, norm and every gradient leaf of one step at a mesh; layers of gradients in order.

    `distributed` names switches of StepSettings that are on: the distributed optimizer and its overlaps.
    """
    mesh = build_mesh(jax.devices()[: pp * dp * ep * cp * tp], pp=pp, dp=dp, ep=ep, cp=cp, tp=tp)
    context = ContextParallel("cp", cp, comm_type) if cp > 1 else WHOLE_SEQUENCE
    experts = ExpertParallel("ep", ep, BATCH_AXES, divided_over_tp=divided_experts)
    parallel = LayerParallel("tp", tp, sequence_parallel, context, experts)
    cut = PipelineParallel("pp", pp, tuple(map(tuple, places)) or even_places(settings, pp)) if pp > 1 else ONE_STAGE
    step_settings = StepSettings(
        settings,
        parallel,
        OptimizerSettings(),
        per_token=per_token,
        pipeline=PipelineSettings(cut, **pipeline),
        **dict.fromkeys(distributed, True),
    )
    specs = step_settings.specs
    divided = step_settings.overlap_param_gather
    shardings = data_shardings(specs, mesh) if divided else partition.shardings(specs, mesh)
    parameters = start_parameters(settings, seed) if parameters is None else parameters
    parameters = jax.device_put(partition.map_specs(at_places, specs, parameters), shardings)
    key = jax.random.key(11) if dropout else None
    function = gradient_function(step_settings, mesh)
    report, gradients = function(parameters, as_batch(arrays, num_microbatches, mesh), key)
    grad_norm = float(jax.jit(global_norm)(gradients))
    return StepResult(
        loss=float(report["loss_sum"] / report["num_tokens"]),
        grad_norm=grad_norm,
        gradients=leaves_in_order(specs, gradients),
        report=report,
    )


def leaves_in_order(specs: Any, tree: Any) -> dict[str, np.ndarray]:
    """Path -> leaf of a tree like the parameters, layers in order whatever the pipeline."""
    tree = partition.map_specs(in_order, specs, jax.device_get(tree))
    return {partition.path_of(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def at_places(spec: partition.ParameterSpec, value: np.ndarray) -> np.ndarray:
    """The layers [layers, ...] at their places in the stacked parameter, by numpy; zeros where there is none."""
    if not spec.stacked:
        return value
    placed = np.zeros(spec.shape, value.dtype)
    flat = placed.reshape(-1, *value.shape[1:])
    layers = sorted({layer for row in spec.stacked for layer in row if layer >= 0})
    for place, layer in enumerate(itertools.chain(*spec.stacked)):
        if layer >= 0:
            flat[place] = value[layers.index(layer)]
    return placed


def in_order(spec: partition.ParameterSpec, value: np.ndarray) -> np.ndarray:
    """The other way round. Places without a layer must hold zeros."""
    if not spec.stacked:
        return np.asarray(value)
    flat = np.asarray(value).reshape(-1, *spec.shape[spec.num_stacked_dims :])
    places = np.array(spec.stacked).reshape(-1)
    assert not flat[places < 0].any()
    layers = np.unique(places[places >= 0])
    return flat[[int(np.flatnonzero(places == layer)[0]) for layer in layers]]


@functools.lru_cache(maxsize=16)
def gradient_function(step_settings: StepSettings, mesh: Any) -> Any:
    """The jitted gradients, kept: a second batch of the same shape is not compiled again."""
    return jax.jit(make_gradient_function(step_settings, mesh))


def even_places(settings: GPTSettings, pp: int, chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Places of layers that divide evenly: row c holds the layers of every stage's chunk c."""
    rows = np.arange(settings.num_layers).reshape(chunks, -1)
    return tuple(tuple(int(n) for n in row) for row in rows)


@functools.cache
def start_parameters(settings: GPTSettings, seed: int) -> Any:
    """Parameters drawn by numpy (compiling the model's own start takes seconds; that has its own tests).

    Noise on biases and scales too, so that a bias added twice or a scale left out shows. A leaf depends on its path and
    its row numbers only, so more padding does not change the real rows.
    """
    specs = gpt_specs(settings, LayerParallel())

    def leaf(key_path: tuple[Any, ...], spec: partition.ParameterSpec) -> np.ndarray:
        path = partition.path_of(key_path)
        padded_columns = path == "output/kernel"
        shape = spec.shape[::-1] if padded_columns else spec.shape
        values = np.random.default_rng([seed, *path.encode()]).normal(0, 0.1, shape).astype(np.float32)
        if settings.loss_vocab_size and (padded_columns or path.startswith("embedding/word")):
            values[settings.vocab_size :] = 0
        if path.endswith("scale"):
            values += 1
        return values.T if padded_columns else values

    return jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=partition.is_spec)


def worst_leaf(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[float, str]:
    """Largest max-abs difference over max-abs, and the leaf it stands in. Leaves that differ in padding are cut."""
    assert got.keys() == expected.keys()
    worst = (0.0, "")
    for name, reference in expected.items():
        value = got[name]
        if value.shape != reference.shape:
            smaller = tuple(slice(0, min(a, b)) for a, b in zip(value.shape, reference.shape, strict=True))
            value, reference = value[smaller], reference[smaller]
        scale = np.abs(reference).max()
        error = np.abs(value - reference).max() / scale if scale > 0 else np.abs(value).max()
        # The key bias has no true gradient (softmax ignores it): only rounding stands there.
        worst = max(worst, (float(error), name))
    return worst


def assert_equal_steps(got: StepResult, expected: StepResult) -> None:
    """P1: loss, grad norm and every gradient leaf within the promised tolerances."""
    from tolerances import GRADIENT_RELATIVE, LOSS_RELATIVE

    assert np.isfinite(expected.loss)
    assert abs(got.loss - expected.loss) <= LOSS_RELATIVE * abs(expected.loss)
    assert abs(got.grad_norm - expected.grad_norm) <= GRADIENT_RELATIVE * expected.grad_norm
    error, leaf = worst_leaf(got.gradients, expected.gradients)
    assert error <= GRADIENT_RELATIVE, f"gradient of {leaf} differs by {error:.2e}"


def damaged(leaf: jax.Array, device: int, place: int = 0, bits: int = 1) -> jax.Array:
    """The array with the lowest bits of one element flipped on one device."""
    shards = []
    for shard in leaf.addressable_shards:
        values = np.array(shard.data)
        if shard.device.id == device:
            flat = values.reshape(-1).view(f"uint{values.itemsize * 8}")
            flat[place] ^= bits
        shards.append(jax.device_put(values, shard.device))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
