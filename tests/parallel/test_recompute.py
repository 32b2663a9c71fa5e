"""Recompute: what a layer keeps for its backward, byte by byte, and that it never changes a number."""

import dataclasses
import functools

import jax
import pytest
from support import assert_equal_steps, even_places, random_batch, run_gradients, tiny_gpt, worst_leaf

from jmegatron.config import load_config
from jmegatron.pipeline.stage import KeptRun, StageRunner
from jmegatron.training.program import build_program, resolve_for_run

# ---- bytes --------------------------------------------------------------------------------------------------------
BATCH, SEQ, HIDDEN, HEADS, TP = 2, 64, 32, 4, 2
UNIT = SEQ * BATCH * HIDDEN // TP
"""s b h / t, in which Megatron-LM's formula counts: 34 of them a layer, in bytes (arXiv:2205.05198 section 5)."""
LSE = 4 * HEADS / HIDDEN
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --qk-layernorm"


@functools.cache
def kept_runs(options: str, num_layers: int = 2) -> list[KeptRun]:
    """What a rank keeps of its runs of layers, bf16, sequence parallel over two ranks."""
    found: list[list[KeptRun]] = []
    original = StageRunner._find_types

    def find_types(self: StageRunner) -> None:
        original(self)
        found.append(self.runs)

    words = (
        f"--num-layers {num_layers} --hidden-size {HIDDEN} --ffn-hidden-size {4 * HIDDEN} "
        f"--num-attention-heads {HEADS} --seq-length {SEQ} --max-position-embeddings {SEQ} --vocab-size 100 "
        f"--micro-batch-size {BATCH} --global-batch-size {2 * BATCH} --mock-data --lr 1e-4 "
        f"--train-iters 10 --bf16 --attention-dropout 0 --tensor-model-parallel-size {TP} --sequence-parallel {options}"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageRunner, "_find_types", find_types)
        config, _ = resolve_for_run(load_config(words.split()), TP)
        program = build_program(config, jax.devices()[:TP])
        program.train_step().trace(program.abstract_state(), program.abstract_batch(), program.dropout_key())
    (runs,) = found
    return runs


def kept(options: str) -> list[jax.ShapeDtypeStruct]:
    """What a rank keeps of one layer and micro-batch where all layers are alike."""
    (run,) = kept_runs(options)
    assert (run.num_places, run.places_per_unit) == (2, 1)
    return run.types


def bytes_of(types: list[jax.ShapeDtypeStruct]) -> int:
    return sum(t.size * t.dtype.itemsize for t in types)


@pytest.mark.parametrize(
    ("options", "units"),
    [
        # Input and residual 2 + 2; queries, keys, values, core's output 8 and its log-sum-exp; pre-activation 8.
        ("--hidden-dropout 0 --recompute-granularity selective", 20 + LSE),
        ("--hidden-dropout 0.1 --recompute-activations", 20 + LSE + 2),  # two masks
        ("--hidden-dropout 0 --recompute-activations --recompute-modules core_attn layernorm mlp", 12 + LSE),
        # The gate doubles the pre-activation; 2 kv heads for 4 heads.
        (f"--hidden-dropout 0 --recompute-activations {LLAMA} --group-query-attention --num-query-groups 2", 26 + LSE),
        ("--hidden-dropout 0 --recompute-granularity full", 2),
        ("--hidden-dropout 0.1 --recompute-granularity full", 2),
    ],
)
def test_recompute_keeps_so_many_bytes_of_a_layer(options, units):
    assert bytes_of(kept(options)) == units * UNIT


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # (layers, layers of a unit, s b h / t of a unit) of each run
        ("--recompute-num-layers 2", [(4, 2, 2), (1, 1, 2)]),
        ("--recompute-method uniform --recompute-num-layers 8", [(5, 5, 2)]),
        ("--recompute-method block --recompute-num-layers 2", [(2, 1, 2), (3, 1, None)]),
        ("--recompute-method block --recompute-num-layers 8", [(5, 1, 2)]),
    ],
)
def test_full_recompute_keeps_an_input_for_each_unit_and_all_of_the_layers_behind_a_block(options, expected):
    runs = kept_runs(f"--hidden-dropout 0 --recompute-granularity full {options}", num_layers=5)
    plain = bytes_of(kept("--hidden-dropout 0"))
    assert [(run.num_places, run.places_per_unit, bytes_of(run.types)) for run in runs] == [
        (places, unit, plain if units is None else units * UNIT) for places, unit, units in expected
    ]


def test_without_recompute_norms_keep_their_input_and_two_numbers_a_token():
    types = kept("--hidden-dropout 0")
    hidden = [t for t in types if t.shape[-1] == HIDDEN]
    # Input and residual as shards; the inputs of both column-parallel products gathered.
    assert sorted((t.shape, t.dtype.name) for t in hidden) == [
        *[((BATCH, SEQ // TP, HIDDEN), "bfloat16")] * 2,
        *[((BATCH, SEQ, HIDDEN), "bfloat16")] * 2,
    ]
    statistics = [t for t in types if t.shape == (BATCH, SEQ // TP, 1)]
    assert [t.dtype.name for t in statistics] == ["float32"] * 4
    # The pre-activation alone: the activation is computed again.
    assert [t.dtype.name for t in types if t.shape == (BATCH, SEQ, 4 * HIDDEN // TP)] == ["bfloat16"]


# ---- numbers ------------------------------------------------------------------------------------------------------
MODELS = {
    "gpt2": tiny_gpt(num_layers=4, dropout=0.2),
    "llama": tiny_gpt(
        num_layers=4,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        position="rope",
        kv_heads=4,
        qk_norm=True,
        dropout=0.2,
    ),
}


@functools.cache
def step(family: str, recompute: str | None, recompute_mlp: bool, pp: int, tp: int):
    settings = MODELS[family]
    layer = dataclasses.replace(settings.layer, recompute=recompute, recompute_mlp=recompute_mlp)
    return run_gradients(
        dataclasses.replace(settings, layer=layer),
        random_batch(8, 16, 29, masked_rows=(1,)),
        pp=pp,
        tp=tp,
        sequence_parallel=tp > 1,
        num_microbatches=4,
        dropout=True,
    )


@pytest.mark.parametrize(
    ("family", "pp", "tp", "recompute", "recompute_mlp"),
    [
        ("gpt2", 2, 2, "selective", False),
        ("gpt2", 2, 2, "full", False),
        ("llama", 1, 2, "selective", False),
        ("llama", 1, 2, "selective", True),
    ],
)
def test_recompute_changes_no_number_with_dropout(family, pp, tp, recompute, recompute_mlp):
    got, plain = step(family, recompute, recompute_mlp, pp, tp), step(family, None, False, pp, tp)
    # The same operations on the same numbers; only XLA's choice of what to fuse may differ.
    assert got.loss == pytest.approx(plain.loss, rel=1e-6)
    error, leaf = worst_leaf(got.gradients, plain.gradients)
    assert error <= 1e-6, leaf


def test_the_masks_of_dropout_do_count():
    without = run_gradients(MODELS["gpt2"], random_batch(8, 16, 29, masked_rows=(1,)), num_microbatches=4)
    assert abs(without.loss - step("gpt2", None, False, 2, 2).loss) > 1e-3


# ---- blocks and units of several layers ---------------------------------------------------------------------------
ALL = ("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")


def full_recompute(settings, method: str, num_layers: int, num_places: int):
    """The model with `--recompute-granularity full`, where a chunk has `num_places`."""
    if method == "uniform":
        layer = dataclasses.replace(settings.layer, recompute="full", recompute_unit=num_layers)
        return dataclasses.replace(settings, layer=layer)
    full = dataclasses.replace(settings.layer, recompute="full")
    places = [full if place < num_layers else settings.layer for place in range(num_places)]
    return dataclasses.replace(settings, place_settings=tuple(places))


@functools.cache
def one_device(num_layers: int, dropout: float):
    return run_gradients(tiny_gpt(num_layers=num_layers, dropout=dropout), BATCH_OF_FOUR, dropout=dropout > 0)


BATCH_OF_FOUR = random_batch(4, 16, 29, masked_rows=(1,))


@pytest.mark.parametrize(
    ("method", "num_layers", "places", "mesh"),
    [
        ("uniform", 3, 8, dict(dropout=0.2)),
        ("block", 2, 8, dict(dropout=0.2)),
        ("uniform", 3, 4, dict(dropout=0.2, pp=2, tp=2, sequence_parallel=True)),
        ("block", 1, 2, dict(dropout=0.2, pp=2, chunks=2, schedule="interleaved")),
        ("uniform", 2, 3, dict(pp=2, schedule="1f1b-low-memory")),
        # Gathered and reduced layer by layer: the last layer of the chunk in a unit, alone, and behind another run.
        ("uniform", 2, 6, dict(dp=2, distributed=ALL)),
        ("uniform", 2, 3, dict(pp=2, dp=2, distributed=ALL)),
        ("block", 2, 6, dict(dp=2, distributed=ALL)),
    ],
)
def test_recompute_of_blocks_and_units_equals_one_device_without_any(method, num_layers, places, mesh):
    mesh = dict(mesh)
    dropout, chunks = mesh.pop("dropout", 0.0), mesh.pop("chunks", 1)
    settings = tiny_gpt(num_layers=places * mesh.get("pp", 1) * chunks, dropout=dropout)
    if "pp" in mesh:
        mesh["places"] = even_places(settings, mesh["pp"], chunks)
    recomputing = full_recompute(settings, method, num_layers, places)
    got = run_gradients(recomputing, BATCH_OF_FOUR, num_microbatches=2, dropout=dropout > 0, **mesh)
    assert_equal_steps(got, one_device(settings.num_layers, dropout))
