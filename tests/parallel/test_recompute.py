"""Recompute: what a layer keeps for its backward, byte by byte, and that it never changes a number."""

import dataclasses
import functools

import jax
import pytest
from support import random_batch, run_gradients, tiny_gpt, worst_leaf

from jmegatron.config import load_config
from jmegatron.pipeline.stage import StageRunner
from jmegatron.training.program import build_program, resolve_for_run

# ---- bytes --------------------------------------------------------------------------------------------------------
BATCH, SEQ, HIDDEN, HEADS, TP = 2, 64, 32, 4, 2
UNIT = SEQ * BATCH * HIDDEN // TP
"""s b h / t, in which Megatron-LM's formula counts: 34 of them a layer, in bytes (arXiv:2205.05198 section 5)."""
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --qk-layernorm"


def kept(options: str) -> list[jax.ShapeDtypeStruct]:
    """What a rank keeps of one layer and micro-batch, bf16, sequence parallel over two ranks."""
    found: list[list[jax.ShapeDtypeStruct]] = []
    original = StageRunner._find_types

    def find_types(self: StageRunner) -> None:
        original(self)
        found.append(self.residual_types)

    words = (
        f"--num-layers 2 --hidden-size {HIDDEN} --ffn-hidden-size {4 * HIDDEN} --num-attention-heads {HEADS} "
        f"--seq-length {SEQ} --max-position-embeddings {SEQ} --vocab-size 100 --micro-batch-size {BATCH} "
        f"--global-batch-size {2 * BATCH} --mock-data --lr 1e-4 --train-iters 10 --bf16 --attention-dropout 0 "
        f"--tensor-model-parallel-size {TP} --sequence-parallel {options}"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageRunner, "_find_types", find_types)
        config, _ = resolve_for_run(load_config(words.split()), TP)
        program = build_program(config, jax.devices()[:TP])
        program.train_step().trace(program.abstract_state(), program.abstract_batch(), program.dropout_key())
    (types,) = found
    return types


def bytes_of(types: list[jax.ShapeDtypeStruct]) -> int:
    return sum(t.size * t.dtype.itemsize for t in types)


@pytest.mark.parametrize(
    ("options", "units"),
    [
        # Input and residual 2 + 2, queries, keys and values 6, pre-activation 8.
        ("--hidden-dropout 0 --recompute-granularity selective", 18),
        ("--hidden-dropout 0.1 --recompute-activations", 18 + 2),  # two masks
        ("--hidden-dropout 0 --recompute-activations --recompute-modules core_attn layernorm mlp", 10),
        # The gate doubles the pre-activation; 2 kv heads for 4 heads.
        (f"--hidden-dropout 0 --recompute-activations {LLAMA} --group-query-attention --num-query-groups 2", 24),
        ("--hidden-dropout 0 --recompute-granularity full", 2),
        ("--hidden-dropout 0.1 --recompute-granularity full", 2),
    ],
)
def test_recompute_keeps_so_many_bytes_of_a_layer(options, units):
    assert bytes_of(kept(options)) == units * UNIT


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
