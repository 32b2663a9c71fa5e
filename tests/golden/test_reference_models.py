"""P2: with imported weights we equal recorded Megatron-Core runs: forward, loss, gradients, accumulation, 20 steps."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from golden.megatron_weights import (
    flat,
    from_megatron,
    recorded,
    reference_parameters,
    reference_settings,
    to_megatron,
)
from jax.sharding import PartitionSpec as P
from layer_support import QUICK_COMPILE
from support import as_batch, even_places, worst_leaf
from tolerances import (
    GRADIENT_RELATIVE,
    LEARNING_RATE_RELATIVE,
    LOGITS_ABSOLUTE,
    LOSS_RELATIVE,
    TRAINED_WEIGHTS_ABSOLUTE,
)

from jmegatron import partition
from jmegatron.mesh import BATCH_AXES, build_mesh
from jmegatron.models.gpt import ONE_STAGE, GPTSettings, PipelineParallel, Tokens, gpt_logits, gpt_loss, gpt_specs
from jmegatron.models.transformer import LayerParallel
from jmegatron.ops.rotary import RotaryScaling
from jmegatron.optimizer.optimizers import OptimizerSettings, build_optimizer
from jmegatron.optimizer.schedules import LearningRateSchedule
from jmegatron.training.program import state_shardings
from jmegatron.training.stages import PipelineSettings
from jmegatron.training.state import TrainState
from jmegatron.training.step import StepSettings, make_gradient_function, make_train_step

MODELS = ("gpt_gelu", "llama_like")
# (dp, tp, sequence parallel)
LAYOUTS = [(1, 1, False), (1, 2, False), (1, 2, True), (1, 4, False), (2, 2, True)]


def recorded_batch(model: str) -> dict[str, np.ndarray]:
    arrays = recorded(model, "forward")
    batch = {name: arrays[f"batch/{name}"] for name in ("tokens", "labels", "loss_mask")}
    return batch | {"sample_ids": np.arange(2, dtype=np.uint32)}


@dataclasses.dataclass
class Step:
    logits: np.ndarray
    losses: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]
    """By Megatron's name."""


def one_step(
    model: str,
    settings: GPTSettings,
    arrays: dict[str, np.ndarray],
    *,
    dp: int = 1,
    tp: int = 1,
    sequence_parallel: bool = False,
    num_microbatches: int = 1,
    per_token: bool = True,
    extra: dict[str, np.ndarray] | None = None,
) -> Step:
    """Logits and token losses, reported loss and all gradients from one program, with the recorded weights."""
    mesh = build_mesh(jax.devices()[: dp * tp], dp=dp, tp=tp)
    parallel = LayerParallel("tp", tp, sequence_parallel)
    specs = gpt_specs(settings, parallel)
    gradient_function = make_gradient_function(
        StepSettings(settings, parallel, OptimizerSettings(), per_token=per_token), mesh
    )

    def forward(parameters, batch):
        losses = gpt_loss(parameters, batch, settings, parallel)[1]
        return gpt_logits(parameters, batch.tokens, settings, parallel), losses

    mapped = jax.shard_map(
        forward,
        mesh=mesh,
        in_specs=(partition.partition_specs(specs), P(BATCH_AXES)),
        out_specs=(P(BATCH_AXES, None, "tp"), P(BATCH_AXES)),
    )

    def program(parameters, tokens, batch):
        report, gradients = gradient_function(parameters, batch, None)
        return mapped(parameters, tokens), report["loss_sum"] / report["num_tokens"], gradients

    parameters = jax.device_put(
        reference_parameters(model, settings, **(extra or {})), partition.shardings(specs, mesh)
    )
    tokens = Tokens(arrays["tokens"], arrays["labels"], arrays["loss_mask"], arrays["sample_ids"])
    run = jax.jit(program, compiler_options=QUICK_COMPILE)
    (logits, losses), loss, gradients = run(parameters, tokens, as_batch(arrays, num_microbatches, mesh))
    return Step(np.asarray(logits), np.asarray(losses), float(loss), to_megatron(flat(gradients), settings))


@functools.cache
def plain_step(model: str, dp: int, tp: int, sequence_parallel: bool) -> Step:
    return one_step(
        model, reference_settings(model), recorded_batch(model), dp=dp, tp=tp, sequence_parallel=sequence_parallel
    )


def assert_close(got, expected, tolerance: float) -> None:
    """Max-abs difference over max-abs."""
    assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


def assert_fingerprints(gradients, record: dict[str, np.ndarray], prefix: str) -> None:
    """The 2-norm of every recorded gradient, by Megatron's name."""
    names = [str(name) for name in record[f"{prefix}/grad_names"]]
    assert set(names) == set(gradients)
    for name, norm in zip(names, record[f"{prefix}/grad_l2"], strict=True):
        got = np.linalg.norm(gradients[name].astype(np.float64))
        assert abs(got - norm) <= GRADIENT_RELATIVE * norm, f"{name}: {got} for {norm}"


@pytest.mark.parametrize("model", MODELS)
def test_the_map_of_names_loses_nothing_and_is_its_own_inverse(model):
    weights, settings = recorded(model, "weights"), reference_settings(model)
    back = to_megatron(from_megatron(weights, settings), settings)
    assert back.keys() == weights.keys()
    for name in weights:
        np.testing.assert_array_equal(back[name], weights[name], err_msg=name)


# ---- one step -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("dp", "tp", "sequence_parallel"), LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_logits_and_token_losses_equal_the_recorded_ones(model, dp, tp, sequence_parallel):
    got, expected = plain_step(model, dp, tp, sequence_parallel), recorded(model, "forward")
    assert_close(got.logits, expected["logits"], LOGITS_ABSOLUTE)
    assert_close(got.losses, expected["token_loss"], LOSS_RELATIVE)


@pytest.mark.parametrize(("dp", "tp", "sequence_parallel"), LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_loss_and_every_gradient_equal_the_recorded_ones(model, dp, tp, sequence_parallel):
    got = plain_step(model, dp, tp, sequence_parallel)
    assert got.loss == pytest.approx(float(recorded(model, "forward")["loss"]), rel=LOSS_RELATIVE)
    error, name = worst_leaf(got.gradients, recorded(model, "grads"))
    assert error <= GRADIENT_RELATIVE, f"gradient of {name} differs by {error:.2e}"


VARIANTS = {
    "erf_gelu": ("gpt_gelu", dict(activation="gelu_erf")),
    "rotary_percent_0.5": ("llama_like", dict(rotary_dim=8)),
    "rotary_interleaved": ("llama_like", dict(rotary_interleaved=True)),
    "rope_interp_2": ("llama_like", dict(rotary_interpolation=2.0)),
    "rope_scaling_llama3": ("llama_like", dict(rotary_scaling=RotaryScaling(factor=8.0))),
    "window_8_0": ("llama_like", dict(window=8)),
    "geglu_unfused": ("llama_like", dict(activation="geglu_erf")),
    "add_qkv_bias": ("llama_like", dict(use_qkv_bias=True)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_of_the_model_equals_its_recorded_run(variant):
    model, changes = VARIANTS[variant]
    settings, record = reference_settings(model, **changes), recorded(model, "variants")
    prefix = f"{variant}/extra_weight/"
    extra = {key.removeprefix(prefix): value for key, value in record.items() if key.startswith(prefix)}
    got = one_step(model, settings, recorded_batch(model), extra=extra)
    assert got.loss == pytest.approx(float(record[f"{variant}/loss"]), rel=LOSS_RELATIVE)
    assert_close(got.losses, record[f"{variant}/token_loss"], LOSS_RELATIVE)
    assert_fingerprints(got.gradients, record, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variants_record_differs_from_the_plain_models(variant):
    """So that the test above cannot pass on a switch that nothing reads."""
    model, _ = VARIANTS[variant]
    plain, other = recorded(model, "forward")["token_loss"], recorded(model, "variants")[f"{variant}/token_loss"]
    # The two GELU formulas are 5e-6 apart in loss; single tokens differ by ten times that.
    assert np.abs(plain - other).max() > 2 * LOSS_RELATIVE * plain.max()


# ---- gradient accumulation ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("dp", "num_microbatches"), [(1, 4), (2, 2)])
@pytest.mark.parametrize("mode", ["per_microbatch", "per_token"])
def test_accumulated_gradients_of_unequal_microbatches_equal_the_recorded_ones(mode, dp, num_microbatches):
    """7, 29, 64 and 0 counted tokens. Two ranks with two micro-batches see the same four parts as one with four."""
    record, settings = recorded("gpt_gelu", "grad_accum"), reference_settings("gpt_gelu")
    got = one_step(
        "gpt_gelu",
        settings,
        {
            "tokens": record["tokens"][:, :-1],
            "labels": record["tokens"][:, 1:],
            "loss_mask": record["loss_mask"],
            "sample_ids": np.arange(8, dtype=np.uint32),
        },
        dp=dp,
        num_microbatches=num_microbatches,
        per_token=mode == "per_token",
    )
    assert got.loss == pytest.approx(float(record[f"{mode}/reported_loss"]), rel=LOSS_RELATIVE)
    assert_fingerprints(got.gradients, record, mode)
    for key in (key for key in record if key.startswith(f"{mode}/grad/")):
        assert_close(got.gradients[key.removeprefix(f"{mode}/grad/")], record[key], GRADIENT_RELATIVE)


# ---- training -----------------------------------------------------------------------------------------------------
DISTRIBUTED = ("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
# (dp, tp, sequence parallel, pp, switches of StepSettings)
TRAINING_LAYOUTS = [
    (1, 1, False, 1, ()),
    (2, 2, True, 1, ()),
    (2, 2, True, 2, ()),
    (2, 2, True, 2, DISTRIBUTED),
]


def train(model: str, dp: int, tp: int, sequence_parallel: bool, pp: int, switches: tuple[str, ...]):
    """Returns (metrics [20] by name, final weights by Megatron's name) of the recorded 20 steps."""
    settings = reference_settings(model)
    mesh = build_mesh(jax.devices()[: pp * dp * tp], pp=pp, dp=dp, tp=tp)
    numbers = OptimizerSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip_grad=1.0)
    stages = PipelineParallel("pp", pp, even_places(settings, pp)) if pp > 1 else ONE_STAGE
    step_settings = StepSettings(
        settings,
        LayerParallel("tp", tp, sequence_parallel),
        numbers,
        pipeline=PipelineSettings(stages),
        **dict.fromkeys(switches, True),
    )
    specs = step_settings.specs
    schedule = LearningRateSchedule("cosine", peak=2e-3, minimum=2e-4, warmup=4.0, decay=20.0)
    optimizer = build_optimizer(numbers, schedule, specs)
    parameters = reference_parameters(model)
    shardings = state_shardings(step_settings, specs, optimizer, mesh)
    state = jax.device_put(
        TrainState(np.zeros((), np.int32), parameters, None, jax.jit(optimizer.init)(parameters)), shardings
    )
    step = jax.jit(
        make_train_step(step_settings, mesh, optimizer, schedule),
        donate_argnums=0,
        out_shardings=(shardings, None),
        compiler_options=QUICK_COMPILE,
    )
    history = []
    for text in recorded(model, "trajectory")["tokens"].astype(np.int32):
        arrays = {
            "tokens": text[:, :-1],
            "labels": text[:, 1:],
            "loss_mask": np.ones((8, 32), np.float32),
            "sample_ids": np.arange(8, dtype=np.uint32),
        }
        state, metrics = step(state, as_batch(arrays, 4, mesh), None)
        history.append({name: float(value) for name, value in metrics.items() if value.ndim == 0})
    metrics = {name: np.array([row[name] for row in history]) for name in history[0]}
    return metrics, to_megatron(flat(state.parameters), settings)


def without_key_rows(name: str, array: np.ndarray, model: str) -> np.ndarray:
    """The key part of the qkv bias has no true gradient: Adam makes steps out of its rounding noise."""
    if not name.endswith("linear_qkv.bias"):
        return array
    blocks = array.reshape(reference_settings(model).layer.attention.num_kv_heads, -1, 16)
    return np.delete(blocks, blocks.shape[1] - 2, axis=1)


@pytest.mark.parametrize(("dp", "tp", "sequence_parallel", "pp", "switches"), TRAINING_LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_twenty_training_steps_equal_the_recorded_ones(model, dp, tp, sequence_parallel, pp, switches):
    metrics, weights = train(model, dp, tp, sequence_parallel, pp, switches)
    record = recorded(model, "trajectory")
    np.testing.assert_allclose(metrics["loss"], record["loss"], rtol=LOSS_RELATIVE)
    np.testing.assert_allclose(metrics["grad_norm"], record["grad_norm"], rtol=GRADIENT_RELATIVE)
    np.testing.assert_allclose(metrics["lr"], record["lr_used"], rtol=LEARNING_RATE_RELATIVE, atol=1e-12)
    final = recorded(model, "trained_weights")
    assert weights.keys() == final.keys()
    for name, expected in final.items():
        difference = without_key_rows(name, weights[name], model) - without_key_rows(name, expected, model)
        assert np.abs(difference).max() <= TRAINED_WEIGHTS_ABSOLUTE, f"{name}: {np.abs(difference).max():.1e}"
