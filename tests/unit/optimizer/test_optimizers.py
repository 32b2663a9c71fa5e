"""adam, sgd, lion and muon written out; rates, decay and their masks; norm and clip; where the state lies."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from layer_support import mesh_of, normal
from support import start_parameters, tiny_gpt

from jmegatron import partition
from jmegatron.models.gpt import PipelineParallel, gpt_specs
from jmegatron.models.transformer import LayerParallel
from jmegatron.optimizer.optimizers import (
    OPTIMIZERS,
    OptimizerSettings,
    build_optimizer,
    clip_by_norm,
    global_norm,
    map_parameters,
    num_updates,
    state_shardings,
)
from jmegatron.optimizer.schedules import LearningRateSchedule, WeightDecaySchedule
from jmegatron.partition import ParameterSpec

SCHEDULE = LearningRateSchedule("linear", peak=0.1, minimum=0.01, warmup=2.0, decay=6.0)
DECAY = WeightDecaySchedule("linear", start=0.1, end=0.5, steps=6.0)
NUMBERS = dict(beta1=0.8, beta2=0.9, eps=1e-3, sgd_momentum=0.7, lion_beta1=0.6, lion_beta2=0.9)
CONSTANT = LearningRateSchedule("constant", peak=0.5, minimum=0.0, warmup=0.0, decay=1.0)
MODELS = {
    "gelu, tied": {},
    "gated, untied": dict(
        activation="swiglu", normalization="RMSNorm", bias=False, position="rope", tied=False, kv_heads=4, qk_norm=True
    ),
}


def spec(*shape, **kind):
    return ParameterSpec(shape, P(), partition.zeros, **kind)


def updated(optimizer, parameters, gradients):
    """Parameters after a step with each of the gradients, and the state."""
    state = optimizer.init(parameters)
    for g in gradients:
        updates, state = optimizer.update(g, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    return parameters, state


# ---- written out ----------------------------------------------------------------------------------------------------
def adam_written_out(p, gradients, rates, decays):
    """arXiv:1711.05101: bias correction, eps outside the root, decay times the rate."""
    b1, b2, m, v = NUMBERS["beta1"], NUMBERS["beta2"], 0.0, 0.0
    for t, (g, rate, decay) in enumerate(zip(gradients, rates, decays, strict=True), start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        p = p - rate * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + NUMBERS["eps"]) + decay * p)
    return p


def sgd_written_out(p, gradients, rates, decays):
    """torch.optim.SGD: decay is a part of the gradient, and momentum keeps it."""
    buffer = 0.0
    for g, rate, decay in zip(gradients, rates, decays, strict=True):
        buffer = NUMBERS["sgd_momentum"] * buffer + g + decay * p
        p = p - rate * buffer
    return p


def lion_written_out(p, gradients, rates, decays):
    """arXiv:2302.06675, algorithm 2."""
    b1, b2, m = NUMBERS["lion_beta1"], NUMBERS["lion_beta2"], 0.0
    for g, rate, decay in zip(gradients, rates, decays, strict=True):
        p = p - rate * (np.sign(b1 * m + (1 - b1) * g) + decay * p)
        m = b2 * m + (1 - b2) * g
    return p


@pytest.mark.parametrize("weight_decay", [0.1, DECAY], ids=["constant", "growing"])
@pytest.mark.parametrize(("name", "written_out"), [(n, globals()[f"{n}_written_out"]) for n in ("adam", "sgd", "lion")])
def test_five_updates_equal_the_optimizer_written_out(name, written_out, weight_decay):
    specs = {"kernel": spec(3, 4), "bias": spec(4, weight_decay=False)}
    parameters = {"kernel": normal(3, 4), "bias": normal(4, seed=2)}
    gradients = [{"kernel": normal(3, 4, seed=10 + i), "bias": normal(4, seed=20 + i)} for i in range(5)]
    optimizer = build_optimizer(OptimizerSettings(name=name, weight_decay=weight_decay, **NUMBERS), SCHEDULE, specs)
    got, state = updated(optimizer, parameters, gradients)
    rates = SCHEDULE.in_float64(np.arange(5))
    decays = DECAY.in_float64(np.arange(5)) if weight_decay is DECAY else np.full(5, 0.1)
    for leaf in parameters:
        expected = written_out(
            np.asarray(parameters[leaf], np.float64),
            [np.asarray(g[leaf], np.float64) for g in gradients],
            rates,
            decays if leaf == "kernel" else np.zeros(5),
        )
        np.testing.assert_allclose(got[leaf], expected, rtol=1e-5, atol=1e-6)
    assert int(num_updates(state)) == 5


# ---- muon: each layer's matrix by itself ---------------------------------------------------------------------------
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def as_matrices(name, array):
    """The two-dimensional matrices [inputs, outputs] that a stacked kernel of our model stands for, by its name."""
    for layer in np.asarray(array):
        if name.endswith("key_value/kernel"):
            yield from (layer[:, :, part].reshape(len(layer), -1) for part in (0, 1))
        elif name.endswith("attention/output/kernel"):
            yield layer.reshape(-1, layer.shape[-1])
        else:
            yield layer.reshape(len(layer), -1)


def muon_written_out(gradients, momentum, factor):
    """The direction after the last of some gradients [inputs, outputs], in float64."""
    m = 0.0
    for g in gradients:
        m = momentum * m + (1 - momentum) * g.astype(np.float64)
    x = m / np.linalg.norm(m)
    for a, b, c in QUINTIC:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return factor * max(x.shape) ** 0.5 * x


@pytest.mark.parametrize("model", MODELS)
def test_muon_orthogonalises_each_layers_matrices_and_adam_updates_the_rest(model):
    settings = tiny_gpt(**MODELS[model])
    specs = gpt_specs(settings, LayerParallel())
    parameters = start_parameters(settings, 0)
    rng = np.random.default_rng(3)
    gradients = [jax.tree.map(lambda p: rng.standard_normal(p.shape).astype(np.float32), parameters) for _ in range(3)]
    numbers = OptimizerSettings(name="muon", muon_momentum=0.7, muon_scale=0.3, weight_decay=0.1, **NUMBERS)

    def last_update(settings):
        optimizer = build_optimizer(settings, CONSTANT, specs)
        before, state = updated(optimizer, parameters, gradients[:2])
        return before, jax.jit(optimizer.update)(gradients[2], state, before)[0]

    before, got = last_update(numbers)
    adam_before, adam = last_update(OptimizerSettings(name="adam", weight_decay=0.1, **NUMBERS))
    seen = set()
    named = lambda tree: {partition.path_of(k): v for k, v in jax.tree_util.tree_flatten_with_path(tree)[0]}  # noqa: E731
    before, got, adam_before, adam, *gradients = map(named, (before, got, adam_before, adam, *gradients))
    for name, leaf in partition.named_specs(specs):
        if name.startswith("layers") and name.endswith("kernel"):
            seen.add(name)
            ours = as_matrices(name, got[name] / -0.5 - 0.1 * before[name])
            theirs = zip(*(as_matrices(name, g[name]) for g in gradients), strict=True)
            for direction, history in zip(ours, theirs, strict=True):
                expected = muon_written_out(history, 0.7, 0.3)
                np.testing.assert_allclose(direction, expected, atol=2e-5 * np.abs(expected).max(), err_msg=name)
        else:
            assert leaf.matrix is None, name
            # Two programs: XLA may round a product and a sum at once in one of them.
            np.testing.assert_allclose(before[name], adam_before[name], rtol=1e-6, atol=1e-7, err_msg=name)
            np.testing.assert_allclose(got[name], adam[name], rtol=1e-6, atol=1e-7, err_msg=name)
    assert len(seen) == 5


def test_a_layers_muon_update_is_stock_optax_muon_of_that_layer_alone():
    settings = tiny_gpt()
    specs = gpt_specs(settings, LayerParallel())
    gradients = start_parameters(settings, 4)
    optimizer = build_optimizer(OptimizerSettings(name="muon", weight_decay=0.0), CONSTANT, specs)
    got = optimizer.update(gradients, optimizer.init(gradients), gradients)[0]["layers"]["mlp"]["up"]["kernel"]
    stock = optax.contrib.muon(0.5, QUINTIC, beta=0.9, nesterov=False, consistent_rms=1.0)
    for layer, kernel in enumerate(gradients["layers"]["mlp"]["up"]["kernel"]):
        expected = stock.update(kernel, stock.init(kernel), kernel)[0]
        np.testing.assert_allclose(got[layer], expected, atol=1e-5 * np.abs(expected).max())


def test_muon_is_the_same_with_the_layers_in_chunks_of_stages():
    """Places without a layer hold zeros and get no update."""
    settings = tiny_gpt(num_layers=3)
    in_order = gpt_specs(settings, LayerParallel())
    places = gpt_specs(settings, LayerParallel(), PipelineParallel("pp", 2, ((0, 1), (2, -1))))
    gradients = jax.tree.map(jnp.asarray, start_parameters(settings, 4))

    def update(specs, gradients):
        optimizer = build_optimizer(OptimizerSettings(name="muon"), CONSTANT, specs)
        return optimizer.update(gradients, optimizer.init(gradients), gradients)[0]

    expected = partition.map_specs(partition.to_canonical, in_order, update(in_order, gradients))
    gradients = partition.map_specs(partition.to_canonical, in_order, gradients)  # no padding
    got = update(places, partition.map_specs(partition.from_canonical, places, gradients))
    absent = jax.tree.leaves(jax.tree.map(lambda leaf: leaf[1, 1], got["layers"]))
    assert all(float(jnp.abs(leaf).max()) == 0.0 for leaf in absent)
    got = partition.map_specs(partition.to_canonical, places, got)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), got, expected)


# ---- what decays, and whose learning rate -------------------------------------------------------------------------
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_with_zero_gradients_matrices_shrink_by_lr_times_decay_and_norms_and_biases_stay(model, name):
    """Of a stacked model, in which a norm's scale has two dims as a matrix has."""
    settings = tiny_gpt(**MODELS[model])
    parameters = start_parameters(settings, 0)
    numbers = OptimizerSettings(name=name, weight_decay=0.1)
    optimizer = build_optimizer(numbers, CONSTANT, gpt_specs(settings, LayerParallel()))
    after = jax.jit(lambda p: updated(optimizer, p, [jax.tree.map(jnp.zeros_like, p)])[0])(parameters)
    decayed = set()

    def check(path, before, after):
        path = partition.path_of(path)
        if path.split("/")[-1] in ("kernel", "embedding"):
            decayed.add(path)
            np.testing.assert_allclose(after, before * (1 - 0.5 * 0.1), rtol=1e-6, err_msg=path)
        else:
            assert np.abs(before).max() > 0, path
            np.testing.assert_array_equal(after, before, err_msg=path)

    jax.tree_util.tree_map_with_path(check, parameters, after)
    tables = {"embedding/position/embedding"} if settings.tied else {"output/kernel"}
    assert {"layers/mlp/up/kernel", "embedding/word/embedding", *tables} <= decayed


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_the_decoupled_rate_is_that_of_word_embedding_and_output_layer_alone(model, name):
    settings = tiny_gpt(**MODELS[model])
    specs = gpt_specs(settings, LayerParallel())
    parameters = start_parameters(settings, 0)
    gradients = [start_parameters(settings, seed) for seed in (1, 2)]
    decoupled = LearningRateSchedule("linear", peak=0.4, minimum=0.3, warmup=2.0, decay=6.0)
    all_alike = {}
    for schedule in (SCHEDULE, decoupled):
        optimizer = build_optimizer(OptimizerSettings(name=name), schedule, specs)
        all_alike[schedule], expected_state = updated(optimizer, parameters, gradients)
    got, state = updated(
        build_optimizer(OptimizerSettings(name=name), SCHEDULE, specs, decoupled), parameters, gradients
    )
    vocabulary = set()

    def check(path, got, common, other):
        path = partition.path_of(path)
        assert np.abs(common - other).max() > 0, path
        if path in ("embedding/word/embedding", "output/kernel"):
            vocabulary.add(path)
            np.testing.assert_array_equal(got, other, err_msg=path)
        else:
            np.testing.assert_array_equal(got, common, err_msg=path)

    jax.tree_util.tree_map_with_path(check, got, all_alike[SCHEDULE], all_alike[decoupled])
    assert len(vocabulary) == (1 if settings.tied else 2)
    assert jax.tree.structure(state) == jax.tree.structure(expected_state)


def test_the_states_structure_depends_on_the_optimizers_name_alone():
    """So that rates and decays may change between a checkpoint and the run that goes on from it."""
    specs = {"kernel": spec(3, 4, matrix=((-2,), (-1,))), "bias": spec(4, weight_decay=False)}
    parameters = {"kernel": normal(3, 4), "bias": normal(4)}
    structures = {
        name: {
            jax.tree.structure(
                build_optimizer(
                    OptimizerSettings(name=name, weight_decay=decay, sgd_momentum=momentum), schedule, specs, decoupled
                ).init(parameters)
            )
            for decay, schedule, decoupled, momentum in itertools.product(
                (0.0, 0.1, DECAY), (SCHEDULE, CONSTANT), (None, CONSTANT), (0.0, 0.9)
            )
        }
        for name in OPTIMIZERS
    }
    assert all(len(kinds) == 1 for kinds in structures.values())
    assert len(set.union(*structures.values())) == len(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_that_is_kept_moves_no_schedule(name):
    """What a skipped step does: rate and decay of the next one are those of the updates done."""
    specs = {"kernel": spec(3, 4, matrix=((-2,), (-1,))), "bias": spec(4, weight_decay=False)}
    parameters = {"kernel": normal(3, 4), "bias": normal(4)}
    gradients = [jax.tree.map(lambda p, s=s: p * s, parameters) for s in (1.0, -2.0)]
    optimizer = build_optimizer(OptimizerSettings(name=name, weight_decay=DECAY), SCHEDULE, specs)
    expected, expected_state = updated(optimizer, parameters, gradients)

    @jax.jit
    def step(parameters, state, gradients, skip):
        updates, new_state = optimizer.update(gradients, state, parameters)
        new = optax.apply_updates(parameters, updates), new_state
        return jax.tree.map(lambda new, old: jnp.where(skip, old, new), new, (parameters, state))

    state = optimizer.init(parameters)
    for g, skip in ((gradients[0], False), (gradients[0], True), (gradients[0], True), (gradients[1], False)):
        parameters, state = step(parameters, state, g, skip)
    assert int(num_updates(state)) == int(num_updates(expected_state)) == 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), parameters, expected)


def test_an_unknown_optimizer_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="'soap', expected one of adam, sgd, lion, muon"):
        OptimizerSettings(name="soap")


# ---- norm and clip ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("limit", "scale"), [(1.0, 1.0), (3.0, 1.0), (1e6, 1.0), (1.0, 1e-8)])
def test_gradients_are_scaled_by_limit_over_norm_plus_1e_6_where_that_is_below_1(limit, scale):
    gradients = {"a": normal(3, 4) * scale, "b": normal(5, seed=2) * scale}
    flat = np.concatenate([np.asarray(g, np.float64).ravel() for g in gradients.values()])
    norm = np.linalg.norm(flat)
    got_norm = global_norm(gradients)
    np.testing.assert_allclose(got_norm, norm, rtol=1e-6)
    clipped = clip_by_norm(gradients, got_norm, limit)
    coefficient = min(1.0, limit / (norm + 1e-6))
    for name in gradients:
        np.testing.assert_allclose(clipped[name], gradients[name] * coefficient, rtol=1e-6)


def test_the_small_constant_is_in_the_divisor():
    """At norm 1e-6 and limit 1e-6 the coefficient is 1/2: optax's clip_by_global_norm would give 1."""
    clipped = clip_by_norm({"a": jnp.array([1e-6])}, jnp.float32(1e-6), 1e-6)
    np.testing.assert_allclose(clipped["a"], [0.5e-6], rtol=1e-5)


def test_limit_0_does_not_clip_and_zero_gradients_stay_zero():
    gradients = {"a": 1e3 * normal(3)}
    assert clip_by_norm(gradients, global_norm(gradients), 0.0) is gradients
    zeros = {"a": jnp.zeros(3)}
    np.testing.assert_array_equal(clip_by_norm(zeros, global_norm(zeros), 1.0)["a"], 0.0)


def test_the_norm_counts_each_global_element_once_however_the_leaves_lie():
    gradients = {"divided": normal(8, 4), "replicated": normal(6, seed=2), "half": normal(4, 3, seed=3)}
    specs = {"divided": P(("dp", "tp")), "replicated": P(), "half": P("tp")}
    mesh = mesh_of(2, 4)
    placed = {name: jax.device_put(g, jax.NamedSharding(mesh, specs[name])) for name, g in gradients.items()}
    np.testing.assert_allclose(jax.jit(global_norm)(placed), global_norm(gradients), rtol=1e-6)


def test_the_norm_of_half_precision_gradients_is_fp32():
    gradients = {"a": jnp.full(10_000, 0.01, jnp.bfloat16)}
    norm = global_norm(gradients)
    assert norm.dtype == jnp.float32
    assert float(norm) == pytest.approx(100 * float(jnp.bfloat16(0.01)), rel=1e-5)


# ---- where the state lies -----------------------------------------------------------------------------------------
MOMENTS = {"adam": 2, "sgd": 1, "lion": 1}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_lie_as_their_parameters_and_counters_on_every_device(name):
    specs = gpt_specs(tiny_gpt(), LayerParallel("tp", 4))
    mesh = mesh_of(2, 4)
    optimizer = build_optimizer(OptimizerSettings(name=name), SCHEDULE, specs)
    parameters = partition.shardings(specs, mesh)
    got = state_shardings(optimizer, partition.abstract(specs, jnp.float32, mesh), parameters, mesh)
    abstract = jax.eval_shape(optimizer.init, partition.abstract(specs, jnp.float32, mesh))
    assert jax.tree.structure(got) == jax.tree.structure(abstract)
    by_path = {partition.path_of(path): s for path, s in jax.tree_util.tree_flatten_with_path(parameters)[0]}
    moments = dict.fromkeys(by_path, 0)
    for (path, sharding), leaf in zip(
        jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(abstract), strict=True
    ):
        owner = "/".join(str(entry.key) for entry in path if isinstance(getattr(entry, "key", None), str))
        owner = owner.removeprefix("matrix/").removeprefix("other/")
        if owner in by_path:
            moments[owner] += 1
            assert sharding == by_path[owner], path
        else:
            assert sharding == jax.NamedSharding(mesh, P()), path
            assert leaf.size <= 15, path
    expected = {
        path: MOMENTS.get(name, 2 if leaf.matrix is None else 1)  # muon: as adam, or one
        for path, leaf in partition.named_specs(specs)
    }
    assert moments == expected


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_of_divided_state_equals_that_on_one_device(name):
    """The moments are divided over dp as well, as a distributed optimizer has them."""
    settings = tiny_gpt()
    specs = gpt_specs(settings, LayerParallel("tp", 4))
    mesh = mesh_of(2, 4)
    optimizer = build_optimizer(OptimizerSettings(name=name, weight_decay=DECAY, **NUMBERS), SCHEDULE, specs)
    parameters, gradients = start_parameters(settings, 0), [start_parameters(settings, seed) for seed in (1, 2)]
    expected, _ = updated(optimizer, parameters, gradients)

    def with_data_axis(s):
        entries = [*s.spec, *[None] * (len(s.shape) - len(s.spec))]
        free = [dim for dim, entry in enumerate(entries) if entry is None and s.shape[dim] % 2 == 0]
        if free:
            entries[free[-1]] = "dp"
        return jax.NamedSharding(mesh, P(*entries))

    finer = partition.map_specs(with_data_axis, specs)
    shardings = state_shardings(optimizer, partition.abstract(specs, jnp.float32, mesh), finer, mesh)
    placed = jax.device_put(parameters, partition.shardings(specs, mesh))
    state = jax.jit(optimizer.init, out_shardings=shardings)(placed)
    update = jax.jit(optimizer.update, out_shardings=(partition.shardings(specs, mesh), shardings))
    for g in gradients:
        updates, state = update(jax.device_put(g, partition.shardings(specs, mesh)), state, placed)
        placed = jax.tree.map(jnp.add, placed, updates)
    tolerance = 2e-5 if name == "muon" else 1e-6
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance), jax.device_get(placed), expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_mapped_with_their_parameters_declarations(name):
    specs = gpt_specs(tiny_gpt(), LayerParallel())
    optimizer = build_optimizer(OptimizerSettings(name=name), SCHEDULE, specs)
    state = optimizer.init(start_parameters(tiny_gpt(), 0))
    shapes = []

    def check(spec, value):
        shapes.append(spec.shape)
        assert value.shape == spec.shape
        return value + 1

    mapped = map_parameters(optimizer, check, state, specs)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    assert len(shapes) >= len(partition.named_specs(specs))
    assert int(num_updates(mapped)) == 0
