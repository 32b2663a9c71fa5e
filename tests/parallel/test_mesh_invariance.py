"""P1: every mesh equals one device in loss, grad norm and every gradient leaf."""

import functools

import pytest
from support import assert_equal_steps, random_batch, run_gradients, tiny_gpt

MODELS = {
    "gpt2": dict(),
    "gpt2_dropout": dict(dropout=0.3),
    "llama": dict(normalization="RMSNorm", activation="swiglu", bias=False, position="rope", tied=False, kv_heads=2),
    "one_kv_head": dict(kv_heads=1, position="rope", qk_norm=True, normalization="RMSNorm", activation="geglu"),
    "two_kv_heads_dropout": dict(kv_heads=2, position="none", tied=False, dropout=0.2, activation="squared_relu"),
}
BATCH, SEQ = 8, 16


def batch():
    return random_batch(BATCH, SEQ, 29, masked_rows=(3,))


@functools.cache
def one_device(model: str, padded_vocab: int = 32):
    settings = tiny_gpt(padded_vocab=padded_vocab, **MODELS[model])
    return run_gradients(settings, batch(), dropout="dropout" in model)


# (dp, tp, sequence parallel, micro-batches)
LAYOUTS = [
    (1, 1, False, 2),
    (1, 1, False, 4),
    (1, 2, False, 1),
    (1, 2, True, 2),
    (1, 4, False, 4),
    (1, 4, True, 1),
    (1, 8, False, 2),
    (1, 8, True, 4),
    (2, 1, False, 4),
    (2, 2, True, 1),
    (2, 4, False, 2),
    (2, 4, True, 2),
    (4, 1, False, 1),
    (4, 2, False, 2),
    (4, 2, True, 2),
]


# The plain and the Llama-like model meet every layout, the others those that are hard for them.
ALL = [(model, *layout) for model in ("gpt2", "llama") for layout in LAYOUTS] + [
    (model, *layout)
    for model in ("gpt2_dropout", "one_kv_head", "two_kv_heads_dropout")
    for layout in (
        (1, 1, False, 2),
        (1, 4, False, 1),
        (1, 4, True, 2),
        (1, 8, True, 1),
        (2, 2, False, 2),
        (4, 2, True, 2),
    )
]


# Each model, dp, tp and both kinds of tensor parallelism, for a second version of JAX.
QUICK = [
    ("gpt2", 1, 1, False, 4),
    ("gpt2", 1, 2, False, 1),
    ("gpt2", 2, 2, True, 1),
    ("gpt2", 4, 2, False, 2),
    ("llama", 1, 8, True, 4),
    ("llama", 2, 4, False, 2),
    ("llama", 4, 2, True, 2),
    ("gpt2_dropout", 4, 2, True, 2),
    ("gpt2_dropout", 1, 4, False, 1),
    ("one_kv_head", 1, 8, True, 1),
    ("one_kv_head", 2, 2, False, 2),
    ("two_kv_heads_dropout", 1, 4, True, 2),
]
assert set(QUICK) <= set(ALL)
CASES = [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in ALL]


@pytest.mark.parametrize(("model", "dp", "tp", "sequence_parallel", "num_microbatches"), CASES)
def test_mesh_gives_the_one_device_loss_and_gradients(model, dp, tp, sequence_parallel, num_microbatches):
    got = run_gradients(
        tiny_gpt(**MODELS[model]),
        batch(),
        dp=dp,
        tp=tp,
        sequence_parallel=sequence_parallel,
        num_microbatches=num_microbatches,
        dropout="dropout" in model,
    )
    assert_equal_steps(got, one_device(model))


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_masked_padding_leaves_the_numbers_of_the_true_vocabulary(model):
    got = run_gradients(tiny_gpt(padded_vocab=64, **MODELS[model]), batch(), tp=4, sequence_parallel=True)
    assert_equal_steps(got, one_device(model, padded_vocab=29))


def test_dropout_changes_the_loss():
    assert one_device("gpt2").loss != one_device("gpt2_dropout").loss


def test_default_averaging_is_the_mean_of_each_ranks_token_means():
    """Megatron's default objective, taken apart: every (micro-batch, rank) part alone on one device."""
    settings, arrays = tiny_gpt(), random_batch(BATCH, SEQ, 29)
    got = run_gradients(settings, arrays, dp=2, tp=2, num_microbatches=2, per_token=False)
    parts = [
        run_gradients(settings, {k: v[i : i + 2] for k, v in arrays.items()}, per_token=True) for i in range(0, 8, 2)
    ]
    expected = {name: sum(p.gradients[name] for p in parts) / 4 for name in parts[0].gradients}
    from support import worst_leaf
    from tolerances import GRADIENT_RELATIVE

    error, leaf = worst_leaf(got.gradients, expected)
    assert error <= GRADIENT_RELATIVE, leaf
    # The reported loss is token-weighted all the same.
    assert got.loss == pytest.approx(run_gradients(settings, arrays).loss, rel=1e-5)
