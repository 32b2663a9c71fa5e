"""P1 for the distributed optimizer: wherever gradients, parameters and state lie, numbers are those of one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from support import (
    as_batch,
    assert_equal_steps,
    at_places,
    even_places,
    leaves_in_order,
    random_batch,
    run_gradients,
    start_parameters,
    tiny_gpt,
)
from tolerances import BF16_RELATIVE, LOSS_RELATIVE, TRAINED_WEIGHTS_ABSOLUTE

from jmegatron import partition
from jmegatron.config import load_config
from jmegatron.mesh import DATA_AXES, build_mesh
from jmegatron.models.gpt import ONE_STAGE, PipelineParallel, gpt_specs
from jmegatron.models.transformer import LayerParallel
from jmegatron.optimizer.optimizers import OptimizerSettings, build_optimizer
from jmegatron.optimizer.schedules import LearningRateSchedule
from jmegatron.training.program import build_program, resolve_for_run, state_shardings
from jmegatron.training.stages import PipelineSettings
from jmegatron.training.state import init_state
from jmegatron.training.step import StepSettings, make_train_step

SHARDED = ("distributed_optimizer",)
REDUCING = ("overlap_grad_reduce",)
BOTH = (*SHARDED, *REDUCING)
ALL = (*BOTH, "overlap_param_gather")
NAMES = {(): "replicated", SHARDED: "sharded", REDUCING: "overlap", BOTH: "sharded_overlap", ALL: "all"}
BATCH, SEQ = 8, 16
MODELS = {
    "gpt2": dict(),
    "llama": dict(normalization="RMSNorm", activation="swiglu", bias=False, position="rope", tied=False, kv_heads=2),
    # No dim of the layers can be divided by 4, of all else only the rows of the embedding.
    "odd": dict(hidden=30, heads=2, kv_heads=2, head_dim=5, ffn=18, activation="swiglu"),
    "one_kv_head": dict(kv_heads=1, position="rope", qk_norm=True, normalization="RMSNorm"),
    "dropout": dict(dropout=0.2, tied=False),
}


def model(name, **changes):
    return tiny_gpt(**{"num_layers": 4, **MODELS[name], **changes})


def batch(seed=0):
    return random_batch(BATCH, SEQ, 29, masked_rows=(3,), seed=seed)


# ---- gradients ------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    distributed: tuple[str, ...]
    dp: int
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    chunks: int = 1
    num_microbatches: int = 1

    def __str__(self):
        fields = dataclasses.fields(self)[2:]
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields if getattr(self, f.name) != f.default]
        return "-".join([self.model, NAMES[self.distributed], *changed])


CASES = [
    Case("gpt2", SHARDED, dp=2, num_microbatches=2),
    Case("gpt2", REDUCING, dp=4, num_microbatches=2),
    Case("gpt2", BOTH, dp=8),
    Case("gpt2", ALL, dp=4, tp=2, sequence_parallel=True, num_microbatches=2),
    Case("gpt2", ALL, dp=2, tp=2, sequence_parallel=True, pp=2, num_microbatches=4),
    Case("llama", SHARDED, dp=4, tp=2),
    Case("llama", REDUCING, dp=2, tp=2, pp=2, num_microbatches=2),
    Case("llama", BOTH, dp=4, pp=2, chunks=2, num_microbatches=2),
    Case("llama", ALL, dp=2, tp=4, sequence_parallel=True, num_microbatches=4),
    Case("llama", ALL, dp=8),
    Case("odd", SHARDED, dp=4, num_microbatches=2),
    Case("odd", ALL, dp=4, tp=2, num_microbatches=1),
    Case("odd", ALL, dp=4, pp=2, num_microbatches=2),
    Case("one_kv_head", BOTH, dp=2, tp=4, num_microbatches=2),
    Case("one_kv_head", ALL, dp=2, tp=2, sequence_parallel=True, pp=2, chunks=2, num_microbatches=4),
    Case("dropout", ALL, dp=2, tp=2, pp=2, chunks=2, num_microbatches=2),
]


# Each way, model and axis once or twice, for a second version of JAX.
QUICK = [CASES[number] for number in (0, 1, 3, 4, 7, 11, 13, 15)]
MATRIX = [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow], id=str(case)) for case in CASES]


@functools.cache
def one_device(name):
    return run_gradients(model(name), batch(), dropout=name == "dropout")


@pytest.mark.parametrize("case", MATRIX)
def test_divided_and_overlapped_reductions_give_the_one_device_loss_norm_and_gradients(case):
    pipeline = {}
    if case.pp > 1:
        pipeline = dict(
            places=even_places(model(case.model), case.pp, case.chunks),
            schedule="interleaved" if case.chunks > 1 else "1f1b",
        )
    got = run_gradients(
        model(case.model),
        batch(),
        distributed=case.distributed,
        dp=case.dp,
        tp=case.tp,
        sequence_parallel=case.sequence_parallel,
        pp=case.pp,
        num_microbatches=case.num_microbatches,
        dropout=case.model == "dropout",
        **pipeline,
    )
    assert_equal_steps(got, one_device(case.model))


@pytest.mark.parametrize("distributed", [SHARDED, ALL], ids=NAMES.get)
def test_the_default_averaging_is_the_same_wherever_gradients_are_reduced(distributed):
    """Mean over (micro-batch, rank) of token means: two ranks with two micro-batches see one device's four."""
    arrays = random_batch(BATCH, SEQ, 29)
    got = run_gradients(
        model("llama"), arrays, dp=2, tp=2, num_microbatches=2, per_token=False, distributed=distributed
    )
    assert_equal_steps(got, run_gradients(model("llama"), arrays, num_microbatches=4, per_token=False))


def test_the_low_memory_schedule_takes_no_reduction_into_its_loops():
    places = even_places(model("gpt2"), 2)
    for distributed in (REDUCING, (*SHARDED, "overlap_param_gather")):
        with pytest.raises(ValueError, match="1f1b-low-memory: its loops do not run on all stages"):
            run_gradients(
                model("gpt2"),
                batch(),
                dp=2,
                pp=2,
                num_microbatches=2,
                places=places,
                schedule="1f1b-low-memory",
                distributed=distributed,
            )
    got = run_gradients(
        model("gpt2"),
        batch(),
        dp=2,
        pp=2,
        num_microbatches=2,
        places=places,
        schedule="1f1b-low-memory",
        distributed=SHARDED,
    )
    assert_equal_steps(got, one_device("gpt2"))


# ---- training -------------------------------------------------------------------------------------------------------
@functools.cache
def trained(distributed=(), dtype="float32", dp=1, tp=1, sequence_parallel=False, pp=1, num_microbatches=4):
    """(fp32 parameters after three AdamW steps, losses and norms)."""
    settings = model("llama")
    cut = PipelineParallel("pp", pp, even_places(settings, pp)) if pp > 1 else ONE_STAGE
    numbers = OptimizerSettings(weight_decay=0.1)
    step = StepSettings(
        settings,
        LayerParallel("tp", tp, sequence_parallel),
        numbers,
        compute_dtype=jnp.dtype(dtype),
        per_token=True,
        pipeline=PipelineSettings(cut),
        **dict.fromkeys(distributed, True),
    )
    mesh, specs = build_mesh(jax.devices()[: pp * dp * tp], pp=pp, dp=dp, tp=tp), step.specs
    schedule = LearningRateSchedule("cosine", peak=2e-3, minimum=2e-4, warmup=1.0, decay=4.0)
    optimizer = build_optimizer(numbers, schedule, specs)
    shardings = state_shardings(step, specs, optimizer, mesh)
    weights = jax.device_get(partition.map_specs(at_places, specs, start_parameters(settings, 7)))

    def create(weights):
        state = init_state(specs, jax.random.key(0), optimizer, step.compute_dtype)
        parameters = jax.tree.map(lambda w: w.astype(step.compute_dtype), weights)
        return dataclasses.replace(state, parameters=parameters, master=None if state.master is None else weights)

    state = jax.jit(create, out_shardings=shardings)(weights)
    run = jax.jit(make_train_step(step, mesh, optimizer, schedule), donate_argnums=0, out_shardings=(shardings, None))
    seen = []
    for seed in range(3):
        state, metrics = run(state, as_batch(batch(seed), num_microbatches, mesh), None)
        seen += [float(metrics["loss"]), float(metrics["grad_norm"])]
    for got, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert got.sharding.is_equivalent_to(wanted, got.ndim)
    return leaves_in_order(specs, state.parameters if state.master is None else state.master), seen


LAYOUTS = [
    dict(distributed=SHARDED, dp=4, tp=2, sequence_parallel=True, num_microbatches=2),
    dict(distributed=ALL, dp=8, num_microbatches=1),
    dict(distributed=ALL, dp=2, tp=2, sequence_parallel=True, pp=2, num_microbatches=2),
]


def assert_equal_weights(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert np.abs(got[name] - value).max() <= TRAINED_WEIGHTS_ABSOLUTE, name


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: NAMES[layout["distributed"]] + f"-dp={layout['dp']}")
def test_three_adamw_steps_give_the_one_device_parameters(layout):
    parameters, seen = trained(**layout)
    expected, expected_seen = trained()
    np.testing.assert_allclose(seen, expected_seen, rtol=LOSS_RELATIVE)
    assert_equal_weights(parameters, expected)


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=["sharded", "all"])
def test_three_adamw_steps_in_bf16_give_the_parameters_of_replicated_state(layout):
    """Another program fuses, hence rounds, otherwise; Adam makes a whole step of a gradient that is all rounding."""
    parameters, seen = trained(**layout, dtype="bfloat16")
    expected, expected_seen = trained(**{**layout, "distributed": ()}, dtype="bfloat16")
    start = leaves_in_order(gpt_specs(model("llama"), LayerParallel()), start_parameters(model("llama"), 7))
    np.testing.assert_allclose(seen, expected_seen, rtol=2**-8)  # one rounding of bfloat16
    for name, value in expected.items():
        moved = np.abs(value - start[name]).mean()
        assert np.abs(parameters[name] - value).mean() <= 5 * BF16_RELATIVE * moved, name
    np.testing.assert_allclose(seen[::2], trained()[1][::2], rtol=BF16_RELATIVE)


# ---- memory ---------------------------------------------------------------------------------------------------------
SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16"
RUN = f"{SIZES} --vocab-size 250 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 1 --mock-data"


def program(*words):
    config, _ = resolve_for_run(load_config([*RUN.split(), *words]), 8)
    return build_program(config, jax.devices()[:8])


def held_bytes(tree):
    """Bytes of a tree on each device."""
    held = dict.fromkeys(jax.devices()[:8], 0)
    for shard in (shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards):
        held[shard.device] += shard.data.nbytes
    return list(held.values())


@pytest.mark.parametrize("words", ["", "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"])
@pytest.mark.parametrize(
    "precision", ["--bf16", *(pytest.param(a, marks=pytest.mark.slow) for a in ("--fp16", "--no-bf16"))]
)
def test_a_device_holds_its_part_of_the_state(words, precision):
    """Parameters (2 bytes) and 12 / d in mixed precision; in fp32 4 and 8 / d, as the parameters are the master."""
    whole, part = (4, 8) if precision == "--no-bf16" else (2, 12)
    sharded = program("--use-distributed-optimizer", precision, *words.split())
    everything = program(
        "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", precision, *words.split()
    )
    replicated = program(precision, *words.split())
    dp, ranks = sharded.mesh.shape["dp"], 8 // sharded.mesh.shape["dp"]
    count = partition.num_parameters(sharded.specs) / ranks
    for each, expected in (
        (replicated, whole + part),
        (sharded, whole + part / dp),
        (everything, (whole + part) / dp),
    ):
        state = each.init()
        for held in held_bytes(state):
            assert held / count == pytest.approx(expected, rel=0.02)


def test_without_switches_nothing_is_divided_over_data_ranks():
    state = program("--bf16").init()
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))


# ---- which dim is divided -------------------------------------------------------------------------------------------
@hypothesis_settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 24]), min_size=1, max_size=3),
    st.sampled_from([None, *range(3)]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2]),
)
def test_a_dim_is_divided_evenly_and_never_one_that_counts_layers(shape, tp_dim, num_stacked, dp, tp):
    entries = [None] * len(shape)
    if tp_dim is not None and tp_dim < len(shape) and shape[tp_dim] % tp == 0:
        entries[tp_dim] = "tp"
    one = partition.ParameterSpec(tuple(shape), P(*entries), partition.zeros)
    layers = np.arange(16).reshape(2, 8) if num_stacked == 2 else 8  # 8 layers: any dp divides them
    spec = one if num_stacked == 0 else partition.stack({"a": one}, layers)["a"]
    sizes = {"dp": dp, "ep": 1, "cp": 1, "tp": tp}
    divided, dim = partition.data_sharded(spec, DATA_AXES, sizes)
    local = [size // (tp if entry == "tp" else 1) for size, entry in zip(shape, entries, strict=True)]
    fits = [i for i, size in enumerate(local) if size % dp == 0]
    if dp == 1 or not fits:
        assert (divided, dim) == (spec.spec, None)
        return
    assert dim is not None
    assert dim >= spec.num_stacked_dims
    assert local[dim - spec.num_stacked_dims] == max(local[i] for i in fits)
    assert partition.axes_of(divided[dim])[-len(DATA_AXES) :] == DATA_AXES
    others = lambda p: [p[i] if i < len(p) else None for i in range(len(spec.shape)) if i != dim]  # noqa: E731
    assert others(divided) == others(spec.spec)
