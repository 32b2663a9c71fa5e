"""P2 under every layout: recorded Megatron-Core runs equal the whole step as training builds it from its options.

`test_reference_models.py` compares the parts; here are the other layouts, each through `build_program`: activations,
logits, loss and gradients, accumulation of unequal micro-batches, 20 optimizer steps.
"""

import functools

import jax
import numpy as np
import pytest
from golden.megatron_weights import from_megatron, recorded, reference_settings, to_megatron
from tolerances import (
    GRADIENT_RELATIVE,
    LAYER_RELATIVE,
    LEARNING_RATE_RELATIVE,
    LOGITS_ABSOLUTE,
    LOSS_RELATIVE,
    TRAINED_WEIGHTS_ABSOLUTE,
)

from jmegatron.config import load_config
from jmegatron.training import compare, compare_reference
from jmegatron.training.program import Program, build_program, resolve_for_run

MODELS = {
    "gpt_gelu": "--ffn-hidden-size 256",
    "llama_like": "--group-query-attention --num-query-groups 2 --ffn-hidden-size 160 --normalization RMSNorm --swiglu"
    " --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights",
}
COMMON = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --vocab-size 128 --hidden-dropout 0 --attention-dropout 0 --mock-data --micro-batch-size 2 --global-batch-size 8"
    " --train-iters 20 --lr 2e-3 --min-lr 2e-4 --lr-warmup-iters 4 --lr-decay-iters 20 --lr-decay-style cosine"
    " --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95"
)
ONE, TP, PP, CHUNKS, CP = "one device", "tp 2", "pp 2", "pp 2, v 2", "cp 2"
DP_TP = "dp 2 x tp 2"
LAYOUTS = {
    ONE: (1, ""),
    TP: (2, "--tensor-model-parallel-size 2"),
    PP: (2, "--pipeline-model-parallel-size 2"),
    CHUNKS: (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    DP_TP: (4, "--tensor-model-parallel-size 2 --sequence-parallel"),
    CP: (2, "--context-parallel-size 2"),
}
NUM_MICROBATCHES = 4
PER_TOKEN = ("--calculate-per-token-loss",)


@functools.cache
def program_of(model: str, layout: str, *more: str) -> Program:
    num_devices, degrees = LAYOUTS[layout]
    config = load_config([*COMMON.split(), *MODELS[model].split(), *degrees.split(), *more])
    devices = jax.devices()[:num_devices]
    return build_program(resolve_for_run(config, num_devices)[0], devices)


@functools.cache
def weights_of(model: str) -> dict[str, np.ndarray]:
    return from_megatron(recorded(model, "weights"), reference_settings(model))


def batch_of(tokens: np.ndarray, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Eight sequences [8, 33] as arrays of a step."""
    tokens = tokens.astype(np.int32)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": np.ones((8, 32), np.float32) if mask is None else mask,
        "sample_ids": np.arange(8, dtype=np.uint32),
    }


def recorded_batch(model: str) -> dict[str, np.ndarray]:
    """The two recorded sequences, and six of which no token counts: one program serves all batches of a layout.

    The mean over micro-batches is then that of the first over their number.
    """
    arrays = recorded(model, "forward")
    rows = {name: arrays[f"batch/{name}"] for name in ("tokens", "labels", "loss_mask")}
    rows = {name: np.concatenate([rows[name], np.zeros((6, 32), rows[name].dtype)]) for name in rows}
    return rows | {"sample_ids": np.arange(8, dtype=np.uint32)}


class Training:
    """The training step of one layout, compiled once: what it reports and what it leaves, by our paths."""

    def __init__(self, model: str, layout: str):
        # Over cp the mean of each rank's own tokens is another objective than of the whole sequences', in the reference
        # as well; that of all tokens is not.
        self.scale = 1 if layout == CP else NUM_MICROBATCHES
        self.program = program_of(model, layout, *(PER_TOKEN if layout == CP else ()))
        self.settings, self._step = reference_settings(model), self.program.train_step()
        self._paths = list(weights_of(model))
        self._start = {f"parameters/{path}": value for path, value in weights_of(model).items()}

    def run(self, batches: list[dict[str, np.ndarray]]) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
        layout = self.program.saved_layout()
        start = {**self._start, "step": np.int32(0)}
        state = self.program.state_of({n: jax.device_put(v, layout[n].sharding) for n, v in start.items()})
        history = []
        for batch in batches:
            state, metrics = self._step(state, self.program.put(batch), None)
            history.append({name: float(metrics[name]) for name in ("loss", "grad_norm", "lr")})
        return history, {name: np.asarray(value) for name, value in self.program.saved_arrays(state).items()}

    def gradients(self, batch: dict[str, np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
        """The loss, and gradients by Megatron's name: adam's first moment becomes a tenth of them, clipped."""
        (metrics,), saved = self.run([batch])
        factor = max(1.0, metrics["grad_norm"] + 1e-6) / (1 - 0.9)
        moments = {path: saved[f"optimizer/0/mu/{path}"] * np.float32(factor) for path in self._paths}
        return metrics["loss"], to_megatron(moments, self.settings)


training = functools.cache(Training)


def gradients_alone(layout: str, batch: dict[str, np.ndarray], *more: str) -> tuple[float, dict[str, np.ndarray]]:
    """As `Training.gradients`, of the GPT and without an optimizer."""
    program = program_of("gpt_gelu", layout, *more)
    weights = compare_reference.parameter_tree(program, weights_of("gpt_gelu"))
    result = compare.run_step(program, weights, batch)
    return result.loss, to_megatron(result.gradients, reference_settings("gpt_gelu"))


def assert_close(got: np.ndarray, expected: np.ndarray, tolerance: float, what: str = "") -> None:
    """Max-abs difference over max-abs."""
    error = np.abs(got - expected).max() / np.abs(expected).max()
    assert error <= tolerance, f"{what}: {error:.2e}"


# ---- one step -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", [PP, CHUNKS, CP])
@pytest.mark.parametrize("model", MODELS)
def test_logits_and_token_losses_equal_the_recorded_ones(model, layout):
    expected = recorded(model, "forward")
    batch = {name: expected[f"batch/{name}"] for name in ("tokens", "labels", "loss_mask")}
    logits, losses = compare_reference.forward(program_of(model, layout), weights_of(model), batch)
    assert_close(logits[..., :128], expected["logits"], LOGITS_ABSOLUTE)
    assert_close(losses, expected["token_loss"], LOSS_RELATIVE)


@pytest.mark.parametrize(("model", "layout"), [("gpt_gelu", ONE), ("llama_like", DP_TP), ("gpt_gelu", CP)])
def test_activations_of_every_layer_equal_the_recorded_ones(model, layout):
    record, weights = recorded(model, "forward"), recorded(model, "weights")
    batch = {name: record[f"batch/{name}"] for name in ("tokens", "labels", "loss_mask")}
    got = compare_reference.activations(program_of(model, layout), weights_of(model), batch)
    expected = {"embedding": "embedding_out", "final norm": "final_norm_out"}
    for layer in range(4):
        for name, part in (("attention", "attn_out"), ("mlp", "mlp_out"), ("output", "out")):
            expected[f"layer {layer} {name}"] = f"layer_{layer}_{part}"
    assert got.keys() == expected.keys()
    for name, key in expected.items():
        value = record[f"act/{key}"]
        if model == "gpt_gelu" and key.endswith(("attn_out", "mlp_out")):  # recorded without the output's bias
            module = "self_attention.linear_proj" if key.endswith("attn_out") else "mlp.linear_fc2"
            value = value + weights[f"decoder.layers.{name.split()[1]}.{module}.bias"]
        assert_close(got[name], np.swapaxes(value, 0, 1), LAYER_RELATIVE, name)


@pytest.mark.parametrize("layout", [TP, PP, CHUNKS, CP])
@pytest.mark.parametrize("model", MODELS)
def test_loss_and_every_gradient_equal_the_recorded_ones(model, layout):
    run = training(model, layout)
    loss, got = run.gradients(recorded_batch(model))
    assert loss == pytest.approx(float(recorded(model, "forward")["loss"]), rel=LOSS_RELATIVE)
    expected = recorded(model, "grads")
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(got[name] * run.scale, gradient, GRADIENT_RELATIVE, name)


ACCUMULATED = [(layout, mode) for layout in LAYOUTS if layout != ONE for mode in ("per_microbatch", "per_token")]
ACCUMULATED.remove((CP, "per_microbatch"))


@pytest.mark.parametrize(("layout", "mode"), ACCUMULATED)
def test_accumulated_gradients_of_unequal_microbatches_equal_the_recorded_ones(layout, mode):
    """7, 29, 64 and 0 counted tokens."""
    record = recorded("gpt_gelu", "grad_accum")
    batch = batch_of(record["tokens"], record["loss_mask"])
    if layout == CP or (mode == "per_microbatch" and layout != DP_TP):  # there is a training step with this objective
        loss, got = training("gpt_gelu", layout).gradients(batch)
    else:
        loss, got = gradients_alone(layout, batch, *(PER_TOKEN if mode == "per_token" else ()))
    assert loss == pytest.approx(float(record[f"{mode}/reported_loss"]), rel=LOSS_RELATIVE)
    names = [str(name) for name in record[f"{mode}/grad_names"]]
    assert set(names) == got.keys()
    for name, norm in zip(names, record[f"{mode}/grad_l2"], strict=True):
        assert np.linalg.norm(got[name].astype(np.float64)) == pytest.approx(norm, rel=GRADIENT_RELATIVE), name
    for key in (key for key in record if key.startswith(f"{mode}/grad/")):
        assert_close(got[key.removeprefix(f"{mode}/grad/")], record[key], GRADIENT_RELATIVE, key)


# ---- training -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", [TP, PP, CHUNKS, CP])
@pytest.mark.parametrize("model", MODELS)
def test_twenty_training_steps_equal_the_recorded_ones(model, layout):
    record = recorded(model, "trajectory")
    history, saved = training(model, layout).run([batch_of(tokens) for tokens in record["tokens"]])
    got = {name: np.array([row[name] for row in history]) for name in history[0]}
    np.testing.assert_allclose(got["loss"], record["loss"], rtol=LOSS_RELATIVE)
    np.testing.assert_allclose(got["grad_norm"], record["grad_norm"], rtol=GRADIENT_RELATIVE)
    np.testing.assert_allclose(got["lr"], record["lr_used"], rtol=LEARNING_RATE_RELATIVE, atol=1e-12)
    expected = from_megatron(recorded(model, "trained_weights"), reference_settings(model))
    assert set(expected) == {name.removeprefix("parameters/") for name in saved if name.startswith("parameters/")}
    for path, weights in expected.items():
        difference = np.abs(saved[f"parameters/{path}"] - weights)
        if path.endswith("attention/key_value/bias"):  # that of keys has no gradient: adam makes steps of its rounding
            difference = difference[:, :, 1]
        assert difference.max() <= TRAINED_WEIGHTS_ABSOLUTE, f"{path}: {difference.max():.1e}"
