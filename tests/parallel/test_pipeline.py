"""P1 for pipelines: every cut into stages and chunks, in every schedule, equals one device.

The product of all factors has tens of thousands of cases. Here any two values of two factors that can occur together
do so in at least one case, and hard corners stand beside them.
"""

import dataclasses
import functools
import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from support import (
    StepResult,
    as_batch,
    assert_equal_steps,
    at_places,
    even_places,
    gradient_function,
    leaves_in_order,
    random_batch,
    run_gradients,
    start_parameters,
    tiny_gpt,
    worst_leaf,
)
from tolerances import BF16_RELATIVE, LOSS_RELATIVE, TRAINED_WEIGHTS_ABSOLUTE
from training_runs import train

from jmegatron import partition
from jmegatron.data.borders import Borders
from jmegatron.mesh import build_mesh
from jmegatron.models.gpt import ONE_STAGE, GPTSettings, PipelineParallel
from jmegatron.models.transformer import LayerParallel
from jmegatron.optimizer.optimizers import OptimizerSettings, build_optimizer
from jmegatron.optimizer.schedules import LearningRateSchedule
from jmegatron.pipeline.layout import pipeline_layout
from jmegatron.pipeline.stage import StageRunner
from jmegatron.training import step as training_step
from jmegatron.training.stages import PipelineSettings
from jmegatron.training.state import init_state, train_state_shardings
from jmegatron.training.step import StepSettings, make_eval_step, make_train_step

VOCAB, SEQ, MAX_ROWS = 29, 8, 32
SMALL = dict(hidden=16, heads=4, kv_heads=4, ffn=32)
FAMILIES = {
    "gpt2": dict(),
    "llama": dict(normalization="RMSNorm", activation="swiglu", bias=False, position="rope", kv_heads=2),
}
BORDERS = Borders(0, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=False)


def model(family: str = "gpt2", **changes: Any) -> GPTSettings:
    return tiny_gpt(**{**SMALL, **FAMILIES[family], "num_layers": 8, **changes})


# ---- layouts ------------------------------------------------------------------------------------------------------
UNEVEN = {
    (2, 1): dict(num_layers=8, first_stage_layers=3),
    (2, 2): dict(num_layers=8, num_chunks=2, first_stage_layers=2),
    (2, 4): dict(num_layers=12, num_chunks=4, last_stage_layers=4),
    (4, 1): dict(num_layers=8, first_stage_layers=1, last_stage_layers=3),
    (4, 2): dict(num_layers=10, num_chunks=2, first_stage_layers=2, last_stage_layers=4),
    (4, 4): dict(num_layers=20, num_chunks=4, first_stage_layers=8),
    (8, 1): dict(num_layers=10, first_stage_layers=3),
    (8, 2): dict(num_layers=18, num_chunks=2, last_stage_layers=4),
    (8, 4): dict(num_layers=36, num_chunks=4, first_stage_layers=8),
}
"""(stages, chunks) -> options of `pipeline_layout`."""
STRINGS = {
    (2, 1): "Et*5|tttL",
    (2, 2): "Ett|ttt|t|ttL",
    (2, 4): "Et|tt|t||t|t|t|tL",
    (4, 1): "Et|tt|tttt|tL",
    (4, 2): "E|t|tt|t|t|t|t|tL",
    (4, 4): "E|t|t|t|t|t|t|t|t|||||||L",
    (8, 1): "E|t|t|t|tt|t|t|tL",
    (8, 2): "E|t|t|t|t|t|t|t|t|||||||L",
    (8, 4): "E|" + "t|" * 8 + "|" * 22 + "L",
}
"""(stages, chunks) -> layout string of 8 layers; some chunks are empty."""


@functools.cache
def places_of(layout: str, pp: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Places of an even or uneven layout, or of one given as a string."""
    if layout == "even":
        num_layers = max(8, pp * chunks)
        return even_places(model(num_layers=num_layers), pp, chunks)
    options = UNEVEN[pp, chunks] if layout == "uneven" else dict(num_layers=8, layout=STRINGS[pp, chunks])
    found = pipeline_layout(num_stages=pp, **options)
    assert found.num_chunks == chunks
    assert not found.is_even
    return tuple(tuple(row) for row in found.places().tolist())


def num_layers_of(places: tuple[tuple[int, ...], ...]) -> int:
    return max(max(row) for row in places) + 1


# ---- cases --------------------------------------------------------------------------------------------------------
FACTORS: dict[str, tuple[Any, ...]] = {
    "pp": (1, 2, 4, 8),
    "chunks": (1, 2, 4),
    "schedule": ("1f1b", "interleaved", "gpipe", "1f1b-low-memory"),
    "loss_delay": (0, 1),
    "layout": ("even", "uneven", "string"),
    "tp": ("1", "2", "2s"),  # s: sequence parallel
    "dp": (1, 2),
    "family": ("gpt2", "llama"),
    "tied": (True, False),
    "recompute": ("none", "selective", "full"),
    "m": (1, 2, 3, 5, 8, 16),
    "dropout": (False, True),
    "data": ("plain", "masked", "packed"),
    "padded_vocab": (32, 48),
    "positions": (16, 17),  # 17 cannot be divided: every rank holds the whole table
}
BOUND = ("pp", "chunks", "schedule", "loss_delay", "layout", "tp", "dp")
"""Factors that exclude one another's values; the others go with everything."""


def exists(pp: int, chunks: int, schedule: str, loss_delay: int, layout: str, tp: str, dp: int) -> bool:
    if pp * int(tp[0]) * dp > 8:
        return False
    if pp == 1:
        return (chunks, schedule, loss_delay, layout) == (1, "1f1b", 0, "even")
    if schedule == "1f1b-low-memory" and loss_delay:
        return False
    return chunks == 1 or schedule in ("interleaved", "gpipe")


def parts_of(case: dict[str, Any]) -> set[tuple[Any, ...]]:
    """What a case covers: pairs of values, and each cut of the model in each schedule and kind of layout."""
    parts: set[tuple[Any, ...]] = set(itertools.combinations(case.items(), 2))
    for names in (("pp", "chunks", "schedule"), ("chunks", "schedule", "loss_delay"), ("pp", "chunks", "layout")):
        parts.add(tuple((name, case[name]) for name in names))
    return parts


def covering_cases() -> list[dict[str, Any]]:
    """Chooses cases one by one, each the best of some random ones, until all parts that can occur have.

    Of two that cover as much, the one without dropout, whose one-device step another case has: both compile sooner.
    """
    rng = random.Random(4)
    meshes = [
        dict(zip(BOUND, values, strict=True))
        for values in itertools.product(*(FACTORS[name] for name in BOUND))
        if exists(*values)
    ]
    free = {name: values for name, values in FACTORS.items() if name not in BOUND}
    left = set().union(*(parts_of(mesh) for mesh in meshes))
    for a, b in itertools.combinations(FACTORS, 2):
        if a in free or b in free:
            left |= {((a, x), (b, y)) for x in FACTORS[a] for y in FACTORS[b]}
    cases: list[dict[str, Any]] = []
    while left:
        fitting = [mesh for mesh in meshes if parts_of(mesh) & left] or meshes
        known = {model_of(case) for case in cases}
        best: dict[str, Any] = {}
        most = -10
        for _ in range(100):
            case = {**rng.choice(fitting), **{name: rng.choice(values) for name, values in free.items()}}
            covered = len(parts_of(case) & left)
            worth = covered + 2 * (model_of(case) in known) - 2 * case["dropout"]
            if covered and worth > most:
                best, most = case, worth
        if best:
            cases.append(best)
            left -= parts_of(best)
    return cases


def model_of(case: dict[str, Any]) -> tuple[Any, ...]:
    """What the one-device step depends on."""
    places = places_of(case["layout"], case["pp"], case["chunks"])
    return num_layers_of(places), case["family"], case["tied"], case["dropout"]


COVERING = covering_cases()


def name_of(case: dict[str, Any]) -> str:
    flags = "-".join(name for name in ("tied", "dropout") if case[name])
    return (
        f"pp{case['pp']}-v{case['chunks']}-{case['schedule']}-delay{case['loss_delay']}-{case['layout']}-tp{case['tp']}-"
        f"dp{case['dp']}-m{case['m']}-{case['family']}-{case['recompute']}-{case['data']}-{flags}-"
        f"vocab{case['padded_vocab']}-positions{case['positions']}"
    )


# ---- one device ---------------------------------------------------------------------------------------------------
def all_rows(data: str) -> dict[str, np.ndarray]:
    """The batch of MAX_ROWS sequences of which a case takes the first."""
    arrays = random_batch(MAX_ROWS, SEQ, VOCAB, masked_rows=(1,) if data == "masked" else ())
    if data == "packed":
        arrays["tokens"][np.random.default_rng(1).random(arrays["tokens"].shape) < 0.25] = 0
    found = BORDERS.arrays(arrays["tokens"])
    if data != "packed":
        found = {
            "position_ids": np.broadcast_to(np.arange(SEQ, dtype=np.int32), arrays["tokens"].shape),
            "segment_ids": np.zeros_like(arrays["tokens"]),
        }
    return arrays | {name: found[name] for name in ("position_ids", "segment_ids")}


def first_rows(data: str, rows: int) -> dict[str, np.ndarray]:
    names = slice(None) if data == "packed" else slice(4)
    return {name: array[:rows] for name, array in list(all_rows(data).items())[names]}


@functools.cache
def one_device(settings: GPTSettings, data: str, rows: int, dropout: bool) -> StepResult:
    """One step of the first rows: the others are masked, so that all numbers of rows share a program."""
    arrays = all_rows(data)
    arrays["loss_mask"][rows:] = 0.0
    return run_gradients(settings, arrays, dropout=dropout)


def with_recompute(settings: GPTSettings, recompute: str) -> GPTSettings:
    chosen = None if recompute == "none" else recompute
    return dataclasses.replace(settings, layer=dataclasses.replace(settings.layer, recompute=chosen))


def rows_of(case: dict[str, Any]) -> int:
    """Two rows a micro-batch and rank, or one where the batch would be too large."""
    rows = case["m"] * case["dp"]
    return 2 * rows if 2 * rows <= MAX_ROWS // 2 else rows


def assert_padding_has_no_gradient(got: StepResult) -> None:
    for name, gradient in got.gradients.items():
        if name == "embedding/word/embedding":
            assert not gradient[VOCAB:].any()
        elif name == "output/kernel":
            assert not gradient[:, VOCAB:].any()


def run_case(case: dict[str, Any], **changes: Any) -> StepResult:
    """The step of a case; `changes` are options of the model."""
    places = places_of(case["layout"], case["pp"], case["chunks"])
    options = dict(num_layers=num_layers_of(places), tied=case["tied"], dropout=0.2 * case["dropout"], **changes)
    padding = dict(padded_vocab=case["padded_vocab"], max_positions=case["positions"])
    rows = rows_of(case)
    got = run_gradients(
        with_recompute(model(case["family"], **options, **padding), case["recompute"]),
        first_rows(case["data"], rows),
        dp=case["dp"],
        tp=int(case["tp"][0]),
        sequence_parallel="s" in case["tp"],
        num_microbatches=case["m"],
        dropout=case["dropout"],
        pp=case["pp"],
        places=places,
        schedule=case["schedule"],
        loss_delay=case["loss_delay"],
        **case.get("more", {}),
    )
    assert_padding_has_no_gradient(got)
    expected = one_device(model(case["family"], **options, padded_vocab=VOCAB), case["data"], rows, case["dropout"])
    assert_equal_steps(got, expected)
    return got


# ---- P1 -----------------------------------------------------------------------------------------------------------
# The first cases cover most; the others bring a few pairs each.
MATRIX = [
    pytest.param(case, id=name_of(case), marks=[pytest.mark.slow] if number >= 12 else [])
    for number, case in enumerate(COVERING)
]


@pytest.mark.parametrize("case", MATRIX)
def test_pipeline_gives_the_one_device_loss_norm_and_gradients(case):
    run_case(case)


def test_the_cases_differ_in_what_they_are_meant_to_differ_in():
    plain = one_device(model(padded_vocab=VOCAB), "plain", MAX_ROWS, False).loss
    assert one_device(model(padded_vocab=VOCAB), "packed", MAX_ROWS, False).loss != plain
    assert one_device(model(padded_vocab=VOCAB, dropout=0.2), "plain", MAX_ROWS, True).loss != plain


PLAIN = dict(
    pp=2,
    chunks=1,
    schedule="1f1b",
    loss_delay=0,
    layout="even",
    tp="1",
    dp=1,
    family="gpt2",
    tied=True,
    recompute="none",
    m=4,
    dropout=False,
    data="masked",
    padded_vocab=32,
    positions=16,
)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        # Leaves whose gradients are parts over tp, in a layout with absent layers.
        (dict(layout="uneven", tp="2s", positions=17), dict(kv_heads=1, qk_norm=True, normalization="RMSNorm")),
        (dict(chunks=2, schedule="interleaved", m=8, more=dict(group_size=4)), dict()),
        (dict(pp=4, chunks=2, schedule="interleaved", m=5, more=dict(group_size=5), layout="string"), dict()),
        (dict(pp=4, tied=False, tp="2s", family="llama"), dict(label_smoothing=0.1)),
        # Both kinds of recompute, dropout and absent layers at once.
        (dict(pp=4, chunks=2, schedule="interleaved", layout="uneven", recompute="full", dropout=True), dict()),
    ],
    ids=["parts_over_tp", "groups_of_4", "one_group_of_5", "label_smoothing", "recompute_dropout_absent"],
)
def test_hard_corners_equal_one_device(case, changes):
    run_case({**PLAIN, **case}, **changes)


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-low-memory"])
def test_default_averaging_weighs_micro_batches_and_ranks_alike(schedule):
    """One micro-batch of a rank is wholly masked. One device gets every rank's part as a micro-batch of its own."""
    arrays = random_batch(8, SEQ, VOCAB, masked_rows=(2, 3))
    settings = model(num_layers=4)
    got = run_gradients(settings, arrays, pp=2, tp=2, dp=2, num_microbatches=2, per_token=False, schedule=schedule)
    assert_equal_steps(got, run_gradients(settings, arrays, num_microbatches=4, per_token=False))


@pytest.mark.parametrize(("pp", "chunks", "schedule"), [(2, 2, "interleaved"), (4, 1, "1f1b-low-memory")])
def test_bfloat16_is_near_fp32_on_one_device(pp, chunks, schedule):
    settings, arrays = model("llama"), random_batch(8, SEQ, VOCAB, masked_rows=(1,))
    rounded = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), start_parameters(settings, 7))
    rounded = jax.device_get(rounded)
    got = run_gradients(
        settings,
        arrays,
        parameters=rounded,
        pp=pp,
        tp=2,
        places=even_places(settings, pp, chunks),
        num_microbatches=4,
        schedule=schedule,
    )
    same = jax.tree.map(lambda a: np.asarray(a, np.float32), rounded)
    expected = run_gradients(settings, arrays, parameters=same)
    assert all(np.isfinite(leaf).all() and leaf.dtype == np.float32 for leaf in got.gradients.values())
    assert got.loss == pytest.approx(expected.loss, rel=BF16_RELATIVE)
    assert got.grad_norm == pytest.approx(expected.grad_norm, rel=BF16_RELATIVE)
    # Rounded in each of 8 layers and back: once the tolerance of one layer for each.
    error, leaf = worst_leaf(got.gradients, expected.gradients)
    assert error <= settings.num_layers * BF16_RELATIVE, leaf


# ---- garbage ------------------------------------------------------------------------------------------------------
GARBAGE_CASES = {
    "1f1b": dict(pp=4),
    "interleaved": dict(pp=4, chunks=2, schedule="interleaved", layout="uneven", m=3),
    "gpipe": dict(pp=4, schedule="gpipe", loss_delay=1, layout="string", m=3),
    "low_memory": dict(pp=4, schedule="1f1b-low-memory", layout="uneven", m=5),
    "recompute": dict(pp=2, recompute="selective", data="packed", m=3),
}


def with_garbage(case: dict[str, Any], stale: float) -> StepResult:
    used = []

    def run_pipeline(*args: Any, **kwargs: Any) -> Any:
        used.append(stale)
        return original(*args, **kwargs, stale=stale)

    original = training_step.run_pipeline
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_step, "run_pipeline", run_pipeline)
        places = places_of(case["layout"], case["pp"], case["chunks"])
        settings = model(num_layers=num_layers_of(places), dropout=0.2 * case["dropout"])
        gradient_function.cache_clear()
        result = run_gradients(
            with_recompute(settings, case["recompute"]),
            first_rows(case["data"], rows_of(case)),
            num_microbatches=case["m"],
            dropout=case["dropout"],
            pp=case["pp"],
            places=places,
            schedule=case["schedule"],
            loss_delay=case["loss_delay"],
        )
    gradient_function.cache_clear()
    assert used
    return result


@pytest.mark.parametrize(
    ("name", "garbage"),
    [
        ("1f1b", (1e38, np.nan)),
        ("low_memory", (1e38, np.nan)),
        ("interleaved", (np.nan,)),
        ("gpipe", (1e38,)),
        ("recompute", (np.nan,)),
    ],
)
def test_garbage_in_buffers_nobody_has_written_changes_no_bit(name, garbage):
    case = {**PLAIN, **GARBAGE_CASES[name]}
    clean = with_garbage(case, 0.0)
    assert np.isfinite(clean.grad_norm)
    for stale in garbage:
        dirty = with_garbage(case, stale)
        assert (dirty.loss, dirty.grad_norm) == (clean.loss, clean.grad_norm)
        for leaf, value in clean.gradients.items():
            np.testing.assert_array_equal(dirty.gradients[leaf], value, err_msg=leaf)


# ---- programs at a mesh -------------------------------------------------------------------------------------------
def settings_at(settings: GPTSettings, layout: str, pp: int, chunks: int, tp: int = 1, **pipeline: Any) -> StepSettings:
    cut = PipelineParallel("pp", pp, places_of(layout, pp, chunks)) if pp > 1 else ONE_STAGE
    return StepSettings(
        settings,
        LayerParallel("tp", tp),
        OptimizerSettings(),
        per_token=True,
        pipeline=PipelineSettings(cut, **pipeline),
    )


def mesh_of(step: StepSettings, dp: int = 1) -> Any:
    pp, tp = step.pipeline.parallel.num_stages, step.parallel.num_ranks
    return build_mesh(jax.devices()[: pp * dp * tp], pp=pp, dp=dp, tp=tp)


def placed(step: StepSettings, mesh: Any, parameters: Any) -> Any:
    """Canonical parameters, where the step wants them."""
    return jax.device_put(partition.map_specs(at_places, step.specs, parameters), partition.shardings(step.specs, mesh))


@functools.cache
def one_device_evaluation(num_layers: int) -> dict[str, float]:
    step = settings_at(model("llama", num_layers=num_layers, dropout=0.5), "even", 1, 1)
    return evaluation(step, 5)


def evaluation(step: StepSettings, m: int, dp: int = 1) -> dict[str, float]:
    mesh = mesh_of(step, dp)
    arrays = random_batch(10, SEQ, VOCAB, masked_rows=(2,))
    parameters = placed(step, mesh, start_parameters(step.model, 7))
    sums = jax.jit(make_eval_step(step, mesh))(parameters, as_batch(arrays, m, mesh))
    return {name: float(value) for name, value in sums.items()}


@pytest.mark.parametrize("garbage", [False, True])
@pytest.mark.parametrize(
    ("layout", "pp", "chunks", "tp", "dp", "schedule", "m"),
    [
        ("even", 2, 1, 2, 2, "1f1b", 5),
        ("even", 4, 1, 1, 1, "1f1b", 1),
        ("uneven", 2, 2, 2, 1, "interleaved", 5),
        ("uneven", 4, 2, 1, 1, "gpipe", 2),
        ("uneven", 4, 1, 2, 1, "1f1b-low-memory", 5),
    ],
)
def test_evaluation_gives_the_one_device_sums(layout, pp, chunks, tp, dp, schedule, m, garbage, monkeypatch):
    if garbage:
        original = StageRunner.buffer

        def buffer(self: Any, *args: Any) -> Any:
            self.stale = float("nan")
            return original(self, *args)

        monkeypatch.setattr(StageRunner, "buffer", buffer)
    num_layers = num_layers_of(places_of(layout, pp, chunks))
    step = settings_at(model("llama", num_layers=num_layers, dropout=0.5), layout, pp, chunks, tp, schedule=schedule)
    got, expected = evaluation(step, m, dp), one_device_evaluation(num_layers)
    assert got["num_tokens"] == expected["num_tokens"]
    assert got["loss_sum"] == pytest.approx(expected["loss_sum"], rel=LOSS_RELATIVE)


# ---- start values and layouts -------------------------------------------------------------------------------------
def started(step: StepSettings) -> Any:
    create = functools.partial(partition.init_parameters, step.specs)
    return jax.jit(create, out_shardings=partition.shardings(step.specs, mesh_of(step)))(jax.random.key(0))


@pytest.mark.parametrize(
    ("layout", "pp", "chunks", "tp"), [("even", 2, 2, 2), ("uneven", 4, 2, 1), ("string", 2, 4, 1)]
)
def test_each_layer_starts_as_on_one_device_and_padding_is_zero(layout, pp, chunks, tp):
    settings = model(num_layers=num_layers_of(places_of(layout, pp, chunks)), tied=False)
    step, one = settings_at(settings, layout, pp, chunks, tp), settings_at(settings, "even", 1, 1)
    parameters = started(step)
    got, expected = leaves_in_order(step.specs, parameters), leaves_in_order(one.specs, started(one))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    # The product's own way back agrees with the one of the tests, and leaves padding out.
    canonical = partition.map_specs(lambda s: partition.canonical(s, mesh_of(step).shape), step.specs)
    back = partition.map_specs(partition.to_canonical, step.specs, parameters)
    for (name, spec), value in zip(partition.named_specs(canonical), jax.tree.leaves(back), strict=True):
        real = expected[name][tuple(slice(size) for size in spec.shape)]
        np.testing.assert_array_equal(value, real, err_msg=name)
    assert partition.num_parameters(step.specs) == partition.num_parameters(one.specs)
    assert partition.num_parameters(step.specs) == sum(value.size for value in expected.values())


@st.composite
def any_places(draw: Any) -> np.ndarray:
    """Layers in any order at the places of one to three chunks, with any number of places without one."""
    chunks, width = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    num_layers = draw(st.integers(1, chunks * width))
    layers = [*range(num_layers), *[-1] * (chunks * width - num_layers)]
    return np.array(draw(st.permutations(layers)), np.int32).reshape(chunks, width)


@hypothesis_settings(deadline=None, max_examples=60)
@given(any_places())
def test_layers_come_back_from_any_places(places):
    num_layers = int((places >= 0).sum())
    one = partition.ParameterSpec((2, 3), P(None, None), partition.zeros)
    spec = partition.stack({"a": one}, places, "pp")["a"]
    values = np.arange(1, num_layers * 6 + 1, dtype=np.float32).reshape(num_layers, 2, 3)
    stacked = partition.from_canonical(spec, jnp.asarray(values))
    assert stacked.shape == spec.shape
    np.testing.assert_array_equal(stacked, at_places(spec, values))
    np.testing.assert_array_equal(partition.to_canonical(spec, stacked), values)
    assert partition.canonical(spec, {"pp": 1}).shape == values.shape
    assert partition.num_parameters({"a": spec}) == values.size


# ---- whole steps --------------------------------------------------------------------------------------------------
@functools.cache
def trained(layout: str, pp: int, chunks: int, tp: int, num_layers: int) -> tuple[dict[str, np.ndarray], list[float]]:
    """(parameters after three steps with layers in order, losses and norms); padding of every moment is checked."""
    settings = model("llama", num_layers=num_layers, position="learned_absolute")
    schedule_name = "interleaved" if chunks > 1 else "1f1b"
    step = settings_at(settings, layout, pp, chunks, tp, schedule=schedule_name)
    mesh, specs = mesh_of(step), step.specs
    schedule = LearningRateSchedule("cosine", peak=2e-3, minimum=2e-4, warmup=1.0, decay=4.0)
    optimizer = build_optimizer(OptimizerSettings(weight_decay=0.1), schedule, specs)
    shardings = train_state_shardings(specs, optimizer, jnp.float32, mesh)
    create = lambda key: init_state(specs, key, optimizer, jnp.float32)  # noqa: E731
    state = jax.jit(create, out_shardings=shardings)(jax.random.key(0))
    state = dataclasses.replace(state, parameters=placed(step, mesh, start_parameters(settings, 7)))
    run = jax.jit(make_train_step(step, mesh, optimizer, schedule), donate_argnums=0, out_shardings=(shardings, None))
    numbers = []
    for seed in range(3):
        state, metrics = run(state, as_batch(random_batch(6, SEQ, VOCAB, seed=seed), 6, mesh), None)
        numbers += [float(metrics["loss"]), float(metrics["grad_norm"])]
    for moment in ("mu", "nu"):
        leaves_in_order(specs, optax.tree.get(state.optimizer, moment))
    return leaves_in_order(specs, state.parameters), numbers


@pytest.mark.parametrize(
    ("layout", "pp", "chunks", "tp"), [("even", 2, 2, 2), ("uneven", 2, 2, 2), ("uneven", 4, 1, 1)]
)
def test_three_training_steps_give_the_one_device_parameters_and_padding_stays_zero(layout, pp, chunks, tp):
    parameters, numbers = trained(layout, pp, chunks, tp, 8)
    expected, expected_numbers = trained("even", 1, 1, 1, 8)
    np.testing.assert_allclose(numbers, expected_numbers, rtol=LOSS_RELATIVE)
    assert parameters.keys() == expected.keys()
    for name, value in expected.items():
        assert np.abs(parameters[name] - value).max() <= TRAINED_WEIGHTS_ABSOLUTE, name


# ---- where things lie ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layout", "pp", "chunks", "tp"), [("even", 4, 2, 2), ("uneven", 4, 2, 1), ("string", 2, 4, 2)]
)
def test_a_device_holds_the_layers_of_its_own_stage_only(layout, pp, chunks, tp):
    places = places_of(layout, pp, chunks)
    step = settings_at(model(num_layers=num_layers_of(places), tied=False), layout, pp, chunks, tp)
    mesh = mesh_of(step)
    # Every element of layer n is n + 1.
    numbers = lambda s: np.broadcast_to(np.arange(s.shape[0]).reshape(-1, *[1] * (len(s.shape) - 1)) + 1, s.shape)  # noqa: E731
    in_order = lambda s: partition.canonical(s, mesh.shape) if s.stacked else s  # noqa: E731
    canonical = partition.map_specs(lambda s: numbers(in_order(s)).astype(np.float32), step.specs)
    layers = placed(step, mesh, canonical)["layers"]
    stage_of = {device: stage for stage, part in enumerate(mesh.devices) for device in part.flat}
    rows = np.array(places).reshape(chunks, pp, -1)
    for path, leaf in jax.tree_util.tree_flatten_with_path(layers)[0]:
        for shard in leaf.addressable_shards:
            own = np.asarray(shard.data).reshape(chunks, rows.shape[2], -1)
            np.testing.assert_array_equal(own.min(-1), rows[:, stage_of[shard.device]] + 1, err_msg=str(path))
            np.testing.assert_array_equal(own.max(-1), rows[:, stage_of[shard.device]] + 1, err_msg=str(path))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (4, 2), (8, 1)])
def test_embedding_and_output_layer_are_divided_over_all_stages_and_tp(pp, tp, tied):
    step = settings_at(model(tied=tied), "even", pp, 1, tp)
    mesh = mesh_of(step)
    parameters = placed(step, mesh, start_parameters(step.model, 7))
    leaves = jax.tree.leaves((parameters["embedding"], parameters.get("output", {})))
    assert len(leaves) == (2 if tied else 3)
    held = dict.fromkeys(mesh.devices.flat, 0)
    for shard in (shard for leaf in leaves for shard in leaf.addressable_shards):
        held[shard.device] += shard.data.nbytes
    assert max(held.values()) <= 1.05 / (pp * tp) * sum(leaf.nbytes for leaf in leaves)


# ---- checkpoints --------------------------------------------------------------------------------------------------
RUN = ("--num-layers", "8", "--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--train-iters", "4")
PP2_CHUNKS2 = ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2")
PP4_TP2 = ("--pipeline-model-parallel-size", "4", "--tensor-model-parallel-size", "2")
UNEVEN_PP4 = ("--pipeline-model-parallel-size", "4", "--decoder-first-pipeline-num-layers", "2")


@pytest.mark.slow
def test_a_checkpoint_of_two_stages_with_chunks_goes_on_at_other_meshes(tmp_path):
    whole = train(tmp_path, *RUN, *PP2_CHUNKS2, devices=2)
    folder = str(tmp_path / "save")
    first = train(tmp_path, *RUN, *PP2_CHUNKS2, "--exit-interval", "2", "--save", folder, devices=2)
    np.testing.assert_array_equal(first.losses, whole.losses[:2])
    for mesh, devices in ((PP4_TP2, 8), ((), 1), (UNEVEN_PP4, 4)):
        resumed = train(tmp_path, *RUN, *mesh, "--load", folder, devices=devices)
        np.testing.assert_allclose(resumed.losses, whole.losses[2:], rtol=LOSS_RELATIVE)
