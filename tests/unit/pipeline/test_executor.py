"""The executor with toy models: gradients and sums equal plain autodiff of the whole model, whatever a layer keeps."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tolerances import LAYER_RELATIVE

from jmegatron.mesh import build_mesh
from jmegatron.pipeline.executor import run_forward, run_pipeline
from jmegatron.pipeline.layout import even_layout, pipeline_layout
from jmegatron.pipeline.schedule import build_schedule
from jmegatron.pipeline.stage import LayerRun, PipelineModel, StageRunner

BATCH, SEQ, FEATURES, HIDDEN, LAYERS = 2, 4, 3, 6, 8


# ---- layers: what each needs in its backward differs ----------------------------------------------------------------
def linear(p, x, context, number):
    return 0.5 * x + x @ p["kernel"]


def masked(p, x, context, number):
    """Keeps a bool mask that depends on the context alone."""
    return x + jnp.where(context["mask"][..., None], jnp.tanh(x @ p["kernel"]), 0.0)


def gathered(p, x, context, number):
    """Keeps integers of the context."""
    return x + jnp.tanh(jnp.take_along_axis(x @ p["kernel"], context["order"][..., None], axis=1)) * jnp.sin(x)


def dropped(p, x, context, number):
    """Keeps a mask that is drawn from the context's key and the layer's number."""
    keep = jax.random.bernoulli(jax.random.fold_in(context["key"], number), 0.6, x.shape)
    return x + jnp.where(keep, jnp.tanh(x @ p["kernel"]), 0.0)


def shifted(p, x, context, number):
    """Needs no x in its backward: the gradients are those of a sum."""
    return x + p["bias"] * context["weight"][..., None]


def numbered(p, x, context, number):
    """Depends on the layer's number."""
    return x + (number + 1.0) * 0.1 * jnp.sin(x * p["bias"])


def everything(p, x, context, number):
    """All but the random numbers, which take long to compile."""
    for layer in (linear, masked, gathered, shifted, numbered):
        x = layer(p, x, context, number)
    return x


def recomputed(p, x, context, number):
    return jax.checkpoint(everything, prevent_cse=False)(p, x, context, number)


LAYER_KINDS = (linear, masked, gathered, dropped, shifted, numbered, everything, recomputed)


# ---- the toy model --------------------------------------------------------------------------------------------------
def embed(parameters, one):
    return one["features"] @ parameters["embedding"]["kernel"]


def loss(parameters, y, one):
    """Quadratic; takes the embedding's kernel a second time."""
    prediction = y @ parameters["embedding"]["kernel"].T * parameters["head"]["scale"]
    squares = jnp.square(prediction - one["target"]).sum(-1)
    objective = 0.5 * jnp.where(one["mask"], squares, 0.0).sum()
    return objective, {"objective": objective, "count": one["mask"].sum()}


def context(one):
    return {name: one[name] for name in ("mask", "order", "weight")} | {"key": jax.random.key(3)}


def toy(layer: Any, places: tuple[tuple[int, ...], ...], num_stages: int, units: Any = ()) -> PipelineModel:
    """`units`: (places, places of a unit) of each run; none: one run that keeps what every layer needs."""

    def at_place(p, x, context, number):
        y = layer(p, x, context, number)
        return jnp.where(number >= 0, y, x) if min(map(min, places)) < 0 else y

    return PipelineModel(
        embed=embed,
        runs=tuple(LayerRun(at_place, *run) for run in units or ((len(places[0]) // num_stages, 1),)),
        loss=loss,
        context=context,
        embed_parameters=lambda p: {"embedding": p["embedding"]},
        loss_parameters=lambda p: {"embedding": p["embedding"], "head": p["head"]},
        layers="layers",
        places=places,
    )


def parameters() -> Any:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(0, 0.4, shape).astype(np.float32)  # noqa: E731
    return {
        "embedding": {"kernel": draw(FEATURES, HIDDEN)},
        "layers": {"kernel": draw(LAYERS, HIDDEN, HIDDEN), "bias": draw(LAYERS, HIDDEN)},
        "head": {"scale": draw(FEATURES)},
    }


def microbatches(m: int) -> Any:
    rng = np.random.default_rng(1)
    lead = (m, BATCH, SEQ)
    return {
        "features": rng.normal(size=(*lead, FEATURES)).astype(np.float32),
        "target": rng.normal(size=(*lead, FEATURES)).astype(np.float32),
        "mask": rng.random(lead) < 0.7,
        "order": rng.permuted(np.broadcast_to(np.arange(SEQ), lead), axis=-1).astype(np.int32),
        "weight": rng.normal(size=lead).astype(np.float32),
    }


@functools.cache
def plain(layer: Any, m: int) -> tuple[Any, Any]:
    """(report, gradients) without any pipeline."""

    def total(p):
        reports = []
        for i in range(m):
            one = jax.tree.map(lambda a, i=i: a[i], microbatches(m))
            x = embed(p, one)
            for number in range(LAYERS):
                x = layer(jax.tree.map(lambda a, n=number: a[n], p["layers"]), x, context(one), number)
            reports.append(loss(p, x, one)[1])
        report = jax.tree.map(lambda *parts: sum(parts), *reports)
        return report["objective"], report

    gradients, report = jax.jit(jax.grad(total, has_aux=True))(parameters())
    report, gradients = jax.device_get((report, gradients))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    return report, gradients


def pipelined(
    layer: Any, schedule: Any, places: tuple[tuple[int, ...], ...], *, units: Any = (), **options: Any
) -> tuple[Any, Any, Any]:
    """(report, gradients with layers in order, report of `run_forward`)."""
    p, m = schedule.num_stages, schedule.num_microbatches
    flat_places = list(itertools.chain(*places))
    lead = (len(flat_places),) if len(places) == 1 else (len(places), len(places[0]))
    stacked = lambda a: np.stack([a[n] * (n >= 0) for n in flat_places]).reshape(*lead, *a.shape[1:])  # noqa: E731
    whole = parameters()
    whole["layers"] = jax.tree.map(stacked, whole["layers"])
    axis = "pp" if p > 1 else None
    model = toy(layer, places, p, units)

    def run(parameters, batch):
        report, gradients = run_pipeline(model, schedule, parameters, batch, axis=axis, **options)
        return report, gradients, run_forward(model, schedule, parameters, batch, axis=axis)

    if p > 1:
        layers = P("pp") if len(places) == 1 else P(None, "pp")
        specs = {"embedding": P(), "layers": layers, "head": P()}
        mesh = build_mesh(jax.devices()[:p], pp=p)
        run = jax.shard_map(run, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs, P()))
    report, gradients, forward = jax.device_get(jax.jit(run)(whole, microbatches(m)))
    order = [flat_places.index(n) for n in range(LAYERS)]
    absent = np.array(flat_places) < 0
    for name, leaf in gradients["layers"].items():
        flat = leaf.reshape(-1, *leaf.shape[len(lead) :])
        assert not flat[absent].any()
        gradients["layers"][name] = flat[order]
    return report, gradients, forward


def assert_close(got: Any, expected: Any) -> None:
    def leaf(path, a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=LAYER_RELATIVE * max(np.abs(b).max(), 1e-30), err_msg=str(path))

    jax.tree_util.tree_map_with_path(leaf, got, expected)


def even_places(p: int, v: int) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, even_layout(LAYERS, p, v).places().tolist()))


def check(
    layer: Any, name: str, p: int, m: int, v: int = 1, places: Any = None, units: Any = (), **options: Any
) -> None:
    schedule = build_schedule(name, p, m, v, **options)
    places = places or even_places(p, v)
    report, gradients, forward = pipelined(layer, schedule, places, units=units)
    expected_report, expected_gradients = plain(layer, m)
    assert_close(gradients, expected_gradients)
    assert_close((report, forward), (expected_report, expected_report))
    assert report["count"] == expected_report["count"]


# ---- gradients ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "p", "v"), [("1f1b", 1, 1), ("interleaved", 2, 2), ("1f1b-low-memory", 2, 1)])
@pytest.mark.parametrize("layer", LAYER_KINDS)
def test_gradients_are_those_of_plain_autodiff_whatever_a_layer_keeps(layer, name, p, v):
    check(layer, name, p, 3, v)


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "options"),
    [
        ("1f1b", 4, 1, 1, {}),
        ("1f1b", 4, 2, 1, dict(loss_delay=1)),
        ("1f1b", 8, 5, 1, {}),
        ("interleaved", 4, 5, 2, {}),
        ("interleaved", 2, 6, 2, dict(group_size=3)),
        ("interleaved", 2, 3, 4, dict(loss_delay=1)),
        ("gpipe", 4, 5, 1, {}),
        ("gpipe", 2, 5, 4, {}),
        ("gpipe", 4, 2, 2, dict(loss_delay=1)),
        ("1f1b-low-memory", 2, 1, 1, {}),
        ("1f1b-low-memory", 8, 5, 1, {}),
    ],
)
def test_every_schedule_gives_the_gradients_of_plain_autodiff(name, p, m, v, options):
    check(everything, name, p, m, v, **options)


@pytest.mark.parametrize(
    ("name", "layout"), [("interleaved", "E|t*3|t||tt|t*2L"), ("1f1b-low-memory", "Et|t*5||ttL"), ("gpipe", "Et*7|tL")]
)
def test_places_without_a_layer_change_nothing(name, layout):
    stages = 4 if name == "1f1b-low-memory" else 2
    found = pipeline_layout(LAYERS, stages, layout=layout)
    check(everything, name, stages, 3, found.num_chunks, tuple(map(tuple, found.places().tolist())))


@functools.cache
def clean(name: str, p: int, v: int) -> tuple[Any, Any, Any]:
    return pipelined(everything, build_schedule(name, p, 3, v), even_places(p, v))


@pytest.mark.parametrize("stale", [1e38, float("nan")])
@pytest.mark.parametrize(("name", "p", "v"), [("1f1b", 4, 1), ("interleaved", 2, 2), ("1f1b-low-memory", 4, 1)])
def test_what_buffers_hold_at_first_changes_no_bit(name, p, v, stale):
    dirty = pipelined(everything, build_schedule(name, p, 3, v), even_places(p, v), stale=stale)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean(name, p, v))


def test_gradients_of_bfloat16_parameters_are_summed_in_fp32():
    """Three hundred ones: a sum in bfloat16 stays at 256."""
    m = 300
    model = PipelineModel(
        embed=lambda p, one: one,
        runs=(LayerRun(lambda p, x, context, number: x + p["bias"], 1),),
        loss=lambda p, y, one: (y.astype(jnp.float32).sum(), {}),
        context=lambda one: (),
        embed_parameters=lambda p: {},
        loss_parameters=lambda p: {},
        layers="layers",
        places=((0, 1),),
    )
    specs = {"layers": {"bias": P("pp")}}
    run = jax.shard_map(
        lambda p, batch: run_pipeline(model, build_schedule("1f1b", 2, m), p, batch, axis="pp")[1],
        mesh=build_mesh(jax.devices()[:2], pp=2),
        in_specs=(specs, P()),
        out_specs=specs,
    )
    whole = {"layers": {"bias": jnp.zeros((2, 4), jnp.bfloat16)}}
    gradient = jax.jit(run)(whole, jnp.zeros((m, 1, 4), jnp.bfloat16))["layers"]["bias"]
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, np.full((2, 4), 300.0))


@pytest.mark.parametrize(
    ("layer", "name", "p", "v", "units"),
    [
        (everything, "1f1b", 1, 1, ((6, 3), (2, 2))),
        (dropped, "1f1b", 2, 1, ((1, 1), (3, 3))),
        (everything, "interleaved", 2, 2, ((2, 2),)),
        (everything, "1f1b-low-memory", 2, 1, ((2, 2), (2, 1))),
        (shifted, "gpipe", 2, 1, ((1, 1), (1, 1), (2, 2))),
    ],
)
def test_layers_in_runs_and_units_give_the_gradients_of_plain_autodiff(layer, name, p, v, units):
    check(layer, name, p, 3, v, units=units)


def test_a_unit_may_hold_places_without_a_layer():
    found = pipeline_layout(LAYERS, 2, layout="E|t*3|t||tt|t*2L")
    places = tuple(map(tuple, found.places().tolist()))
    check(everything, "interleaved", 2, 3, found.num_chunks, places, units=((2, 2), (1, 1)))


# ---- what is kept ---------------------------------------------------------------------------------------------------
def runs(layer: Any, units: Any = ()) -> list[Any]:
    model = toy(layer, (tuple(range(LAYERS)),), 1, units)
    arrays = jax.tree.map(jnp.asarray, (parameters(), microbatches(2)))
    return StageRunner(model, 1, *arrays, None, 0.0).runs


def kept_types(layer: Any) -> list[Any]:
    return [t.dtype.kind for t in runs(layer)[0].types]


def test_masks_and_integers_of_the_context_are_computed_again_and_not_kept():
    assert set(kept_types(masked)) == {"f"}
    assert set(kept_types(gathered)) == {"f"}


def test_what_is_drawn_from_a_key_is_kept():
    assert "b" in kept_types(dropped)


def test_a_layer_that_does_not_need_its_input_keeps_nothing():
    assert kept_types(shifted) == []
    assert not runs(shifted)[0].input_needed
    assert runs(linear)[0].input_needed


def test_full_recompute_keeps_the_input_alone():
    assert [t.shape for t in runs(recomputed)[0].types] == [(BATCH, SEQ, HIDDEN)]


def test_a_unit_of_several_layers_keeps_one_input_whatever_its_layers_need():
    for layer in (everything, shifted):
        units, single = runs(layer, ((6, 3), (2, 1)))
        assert [t.shape for t in units.types] == [(BATCH, SEQ, HIDDEN)]
        assert (units.num_units, units.first, single.num_units, single.first) == (2, 0, 2, 6)
        assert len(single.types) == len(runs(layer)[0].types)


# ---- what does not exist --------------------------------------------------------------------------------------------
def test_one_stage_with_chunks_is_refused():
    places = ((0, 1, 2, 3), (4, 5, 6, 7))
    with pytest.raises(ValueError, match="expected 1f1b with one stage"):
        pipelined(linear, build_schedule("interleaved", 1, 2, 2), places)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (((6, 1), (1, 1)), r"runs of \[6, 1\] places: expected the 8 places of a chunk"),
        (((8, 3),), "a run of 8 places cannot be cut into units of 3"),
    ],
)
def test_runs_that_do_not_cover_a_chunk_in_whole_units_are_refused(units, message):
    with pytest.raises(ValueError, match=message):
        runs(linear, units)
