"""P1 over cp: a step whose sequences are divided over ranks equals one device, whatever else is divided as well."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import (
    StepResult,
    assert_equal_steps,
    even_places,
    random_batch,
    run_gradients,
    start_parameters,
    tiny_gpt,
    worst_leaf,
)
from tolerances import GRADIENT_RELATIVE, LOSS_RELATIVE

from jmegatron.data.borders import Borders
from jmegatron.models.gpt import GPTSettings, Tokens, gpt_loss
from jmegatron.models.transformer import LayerParallel
from jmegatron.pipeline.layout import pipeline_layout

VOCAB, SEQ, ROWS = 29, 16, 4
"""16 tokens are the fewest that 8 ranks can hold: chunks of one."""
BORDERS = Borders(0, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": dict(),
    "llama": dict(normalization="RMSNorm", activation="swiglu", bias=False, position="rope", kv_heads=4, tied=False),
    "one_kv_head": dict(position="rope", kv_heads=1, qk_norm=True),
}


def model(family: str = "gpt2", *, window: int | None = None, recompute: Any = None, **changes: Any) -> GPTSettings:
    settings = tiny_gpt(**{"hidden": 16, "ffn": 32, **FAMILIES[family], **changes})
    attention = dataclasses.replace(settings.layer.attention, window=window)
    layer = dataclasses.replace(settings.layer, attention=attention, recompute=recompute)
    return dataclasses.replace(settings, layer=layer)


def rows_of(data: str) -> dict[str, np.ndarray]:
    """Plain: about a fifth of the tokens masked, and one whole row. Packed: documents end at tokens 0."""
    arrays = random_batch(ROWS, SEQ, VOCAB, masked_rows=(1,))
    if data == "packed":
        arrays["tokens"][np.random.default_rng(1).random(arrays["tokens"].shape) < 0.25] = 0
        arrays |= BORDERS.arrays(arrays["tokens"])
    return arrays


@functools.cache
def one_device(settings: GPTSettings, data: str, dropout: bool) -> StepResult:
    return run_gradients(settings, rows_of(data), dropout=dropout, num_microbatches=2)


def check(cp: int, comm_type: str, family: str = "gpt2", data: str = "plain", dropout: bool = False, **more: Any):
    options = {name: more.pop(name) for name in ("window", "num_layers") if name in more}
    if dropout:
        options["dropout"] = 0.2
    recompute = more.pop("recompute", None)
    got = run_gradients(
        model(family, recompute=recompute, **options),
        rows_of(data),
        cp=cp,
        comm_type=comm_type,
        dropout=dropout,
        **{"num_microbatches": 2, **more},
    )
    assert_equal_steps(got, one_device(model(family, **options), data, dropout))


CASES = [
    (2, "p2p", dict()),
    (4, "p2p", dict(family="llama", tp=2, sequence_parallel=True, data="packed")),
    (8, "p2p", dict(family="llama")),
    (2, "p2p", dict(dropout=True, dp=2, tp=2, recompute="selective")),
    (2, "p2p", dict(family="one_kv_head", tp=4, sequence_parallel=True, data="packed")),
    (4, "p2p", dict(family="one_kv_head", pp=2, recompute="full", window=5)),
    (2, "p2p", dict(pp=2, tp=2, num_layers=4, data="packed", dropout=True)),
    (4, "all_gather", dict(family="llama", tp=2, dropout=True)),
    (8, "all_gather", dict(data="packed")),
    (2, "all_gather", dict(pp=2, dp=2, num_layers=4, recompute="selective")),
    (2, "a2a", dict(family="llama", tp=2, sequence_parallel=True, data="packed", dropout=True)),
    (4, "a2a", dict(family="llama", dp=2, window=3)),
    (8, "a2a", dict()),
]


def name_of(case) -> str:
    cp, comm_type, more = case
    return "-".join([f"cp{cp}", comm_type, *(f"{name}_{value}" for name, value in more.items())])


# With the newest JAX one of each kind of communication runs.
QUICK = (1, 8, 10)


@pytest.mark.parametrize(
    ("cp", "comm_type", "more"),
    [
        pytest.param(*case, id=name_of(case), marks=[] if number in QUICK else [pytest.mark.slow])
        for number, case in enumerate(CASES)
    ],
)
def test_context_parallel_gives_the_one_device_loss_norm_and_gradients(cp, comm_type, more):
    check(cp, comm_type, **more)


def test_two_chunks_a_stage_with_a_ring_equal_one_device():
    settings = model(num_layers=4)
    check(2, "p2p", num_layers=4, pp=2, places=even_places(settings, 2, 2), schedule="interleaved")


@pytest.mark.slow
def test_a_ring_in_stages_of_different_length_equals_one_device():
    places = pipeline_layout(num_stages=2, num_layers=3, first_stage_layers=1).places()
    check(2, "p2p", num_layers=3, pp=2, tp=2, sequence_parallel=True, places=places.tolist())


@pytest.mark.parametrize("comm_type", ["all_gather", "a2a"])
def test_the_low_memory_schedule_without_rings_equals_one_device(comm_type):
    """Its stages run different loops at the same time; a cp group lies within a stage, and runs the same one."""
    check(2, comm_type, num_layers=4, pp=2, schedule="1f1b-low-memory", num_microbatches=4)


@pytest.mark.parametrize("switches", [("distributed_optimizer",), ("overlap_grad_reduce",)], ids=str)
def test_state_and_gradients_divided_over_dp_and_cp_equal_one_device(switches):
    on = tuple({"distributed_optimizer", *switches, "overlap_param_gather"})
    check(2, "p2p", dp=2, num_layers=4, distributed=on)


# ---- what counts --------------------------------------------------------------------------------------------------
def zigzag_rank(seq: int, cp: int) -> np.ndarray:
    """The rank of each token, by hand: chunk i lies on rank i from the front and on rank i from the back."""
    chunk = np.arange(seq) // (seq // (2 * cp))
    return np.minimum(chunk, 2 * cp - 1 - chunk)


def objective_of_rank_means(settings: GPTSettings, arrays: dict[str, np.ndarray], cp: int) -> Any:
    """Gradients on one device of the mean over micro-batches and cp ranks of each one's own token mean."""
    rank, mask = zigzag_rank(SEQ, cp), arrays["loss_mask"]
    weights = np.zeros_like(mask)
    for rows in (slice(0, ROWS // 2), slice(ROWS // 2, ROWS)):
        for r in range(cp):
            part = mask[rows] * (rank == r)
            weights[rows] += part / max(part.sum(), 1) / (2 * cp)
    loss = lambda p, batch: gpt_loss(p, batch, settings, LayerParallel())[0]  # noqa: E731
    batch = Tokens(arrays["tokens"], arrays["labels"], weights, arrays["sample_ids"])
    return jax.jit(jax.grad(loss))(*jax.tree.map(jnp.asarray, (start_parameters(settings, 7), batch)))


@pytest.mark.parametrize("targets", ["some", "none_on_a_rank", "none"])
def test_ranks_with_few_or_no_targets_give_the_reference_s_mean_of_means(targets):
    settings, arrays = model(), random_batch(ROWS, SEQ, VOCAB)
    if targets == "none_on_a_rank":
        arrays["loss_mask"][:, zigzag_rank(SEQ, 2) == 1] = 0
    if targets == "none":
        arrays["loss_mask"][:] = 0
    both = [run_gradients(settings, arrays, cp=2, num_microbatches=2, per_token=flag) for flag in (False, True)]
    for got in both:
        assert all(np.isfinite(leaf).all() for leaf in got.gradients.values())
        assert np.isfinite(got.grad_norm)
    if targets == "none":
        assert all(not leaf.any() for got in both for leaf in got.gradients.values())
        return
    expected = objective_of_rank_means(settings, arrays, 2)
    named = {"/".join(k.key for k in path): np.asarray(leaf) for path, leaf in jax.tree.flatten_with_path(expected)[0]}
    error, leaf = worst_leaf(both[0].gradients, named)
    assert error <= GRADIENT_RELATIVE, leaf
    assert_equal_steps(both[1], run_gradients(settings, arrays, num_microbatches=2))
    assert both[0].loss == pytest.approx(both[1].loss, rel=LOSS_RELATIVE)
