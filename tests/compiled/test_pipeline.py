"""The pipelined training step as XLA compiled it, for CPU devices and for H100s that are absent.

Ticks, conditionals, overlap, memory, matmul FLOPs and communication (DESIGN.md 4.2, 4.18 and 5) of the program that a
run with these options trains with. Only abstract arrays: nothing runs. Names of sizes: B = bytes of a micro-batch's
hidden states on one rank, p stages, v chunks, m micro-batches, t tensor-parallel ranks.
"""

import collections
import dataclasses
import functools
import time

import jax
import numpy as np
import pytest
from compiled_support import program_of
from jax.experimental.compilation_cache import compilation_cache
from tolerances import MATMUL_FLOPS_RATIO

from jmegatron import partition
from jmegatron.config import load_config
from jmegatron.planner import formulas, hlo
from jmegatron.planner.cards import card
from jmegatron.planner.hlo_text import leaves
from jmegatron.planner.topology import compile_for
from jmegatron.training.build import formula_shape
from jmegatron.training.program import build_program, resolve_for_run

LAYERS_PER_CHUNK = 3
REPORT = ("loss_sum", "num_tokens")  # two scalars that are reduced with the gradients


@dataclasses.dataclass(frozen=True)
class Case:
    pp: int = 2
    chunks: int = 1
    num_microbatches: int = 4
    tp: int = 1
    dp: int = 1
    tied: bool = True
    recompute: str = "none"
    schedule: str | None = None
    layers_per_chunk: int = LAYERS_PER_CHUNK
    large: bool = False
    """Real sizes in bf16 with fused attention: at small ones XLA orders and merges collectives differently."""
    target: str = "cpu"

    @property
    def num_layers(self):
        return self.layers_per_chunk * self.chunks * self.pp

    @property
    def num_devices(self):
        return self.pp * self.dp * self.tp

    @property
    def num_slots(self):
        """Forward slots of a step, idle ones included, and as many backward slots."""
        return self.num_microbatches * self.chunks + self.pp - 1

    @property
    def bubble(self):
        return (self.pp - 1) / (self.chunks * self.num_microbatches)

    @property
    def words(self):
        hidden, seq, vocab, micro_batch = (4096, 4096, 32768, 1) if self.large else (64, 64, 100, 2)
        words = (
            f"--num-layers {self.num_layers} --hidden-size {hidden} --num-attention-heads {hidden // 128 or 8} "
            f"--ffn-hidden-size {4 * hidden} --seq-length {seq} --max-position-embeddings {seq} --vocab-size {vocab} "
            f"--micro-batch-size {micro_batch} --global-batch-size {self.num_microbatches * self.dp * micro_batch} "
            f"--hidden-dropout 0 --attention-dropout 0 --mock-data --lr 1e-4 --train-iters 10 --sequence-parallel "
            f"--pipeline-model-parallel-size {self.pp} --tensor-model-parallel-size {self.tp}"
        ).split()
        words += ["--bf16", "--attention-backend", "fused"] if self.large else []
        words += ["--untie-embeddings-and-output-weights"] if not self.tied else []
        words += ["--num-virtual-stages-per-pipeline-rank", str(self.chunks)] if self.chunks > 1 else []
        words += ["--pipeline-schedule", self.schedule] if self.schedule else []
        words += ["--recompute-granularity", self.recompute] if self.recompute != "none" else []
        return words

    def __str__(self):
        changed = (
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name != "target" and getattr(self, field.name) != field.default
        )
        return "-".join([self.target, *changed])


def on_both(cases):
    """Each case for CPU devices, and for H100s where the GPU compiler is."""
    return [pytest.param(case, id=str(case)) for case in cases] + on_h100(cases)


def on_h100(cases):
    gpus = [dataclasses.replace(case, target="h100") for case in cases]
    return [pytest.param(case, id=str(case), marks=pytest.mark.gpu_compiler) for case in gpus]


SMALL = [
    Case(pp=2, num_microbatches=4),
    Case(pp=2, num_microbatches=4, tp=2, dp=2, tied=False, recompute="selective"),
    Case(pp=2, chunks=2, num_microbatches=5, tp=2, recompute="full"),
    Case(pp=4, num_microbatches=8, tp=2, tied=False),
    Case(pp=4, num_microbatches=2, tp=2, recompute="full", tied=False),
    Case(pp=4, chunks=2, num_microbatches=8, recompute="selective"),
    Case(pp=2, chunks=2, num_microbatches=4, tp=2, dp=2, tied=False),
    Case(pp=4, num_microbatches=5, schedule="gpipe"),
]
# 16 layers on 8 GPUs.
LARGE = [
    Case(
        large=True, pp=pp, tp=2, dp=4 // pp, chunks=v, layers_per_chunk=16 // (pp * v), num_microbatches=16, tied=False
    )
    for pp in (2, 4)
    for v in (1, 2)
]
SPLIT = [case for case in SMALL if case.tp > 1 and case.recompute == "none"]

# ---- compiling ------------------------------------------------------------------------------------------------------


@functools.cache
def program(case):
    return program_of(case.words, case.target, case.num_devices)


def compile_step(case):
    """The step with the compiler options that the program sets."""
    one = program(case)
    return compile_for(one.train_step(), one.abstract_state(), one.abstract_batch(), one.dropout_key())


compiled = functools.cache(compile_step)


@functools.cache
def module(case):
    return hlo.load(compiled(case))


def mesh_shape(case):
    return dict(program(case).mesh.shape)


@functools.cache
def collectives(case):
    return [record for record in hlo.collectives(module(case), mesh_shape(case)) if record.axes != ()]


# ---- what the closed forms say --------------------------------------------------------------------------------------


def shape_of(case):
    return formula_shape(program(case).config)


def tokens_of_a_microbatch(case):
    config = program(case).config
    return config.training.micro_batch_size * config.model.seq_length


def hidden_bytes(case, whole=False):
    """B; with `whole`, of all tensor-parallel ranks together."""
    itemsize = 2 if case.large else 4
    return tokens_of_a_microbatch(case) * shape_of(case).hidden_size * itemsize // (1 if whole else case.tp)


def output_flops_per_token(case):
    return 2 * shape_of(case).vocab_rows * shape_of(case).hidden_size


def chunk_flops(case):
    """Matmul FLOPs of a chunk's forward on one device."""
    shape = shape_of(case)
    layers = formulas.forward_flops_per_token(shape) - output_flops_per_token(case)
    return layers * case.layers_per_chunk / case.num_layers * tokens_of_a_microbatch(case) / case.tp


# ---- the program's ticks --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Body:
    """The ticks of one loop."""

    loop: hlo.Loop
    forward: tuple
    """Loops over layers that multiply as much as a chunk's forward."""
    backward: tuple
    """Loops over layers that multiply more."""

    @property
    def is_steady(self):
        return bool(self.forward and self.backward)

    def holds(self, record):
        """Whether it stands in a tick, outside its loops over layers."""
        inner = {loop.name for loop in (*self.forward, *self.backward)}
        return self.loop.name in record.site.loops and not inner & set(record.site.loops)


def layer_loops(case):
    """Innermost loops that multiply as much as a chunk forward, and those that multiply as much as one backward."""
    loops, forward_flops = hlo.loops(module(case)), chunk_flops(case)
    around = {name for loop in loops for name in loop.site.loops}
    innermost = [loop for loop in loops if loop.name not in around and loop.trip_count == case.layers_per_chunk]
    forward = [loop for loop in innermost if forward_flops <= loop.flops <= 1.02 * forward_flops]
    backward = [loop for loop in innermost if 1.98 * forward_flops <= loop.flops <= 3.02 * forward_flops]
    return forward, backward


def bodies(case):
    """The loops over ticks, in order."""
    forward, backward = layer_loops(case)
    parents = {loop.site.loops[-1] for loop in (*forward, *backward) if loop.site.loops}
    inside = lambda loops, parent: tuple(loop for loop in loops if loop.site.loops[-1:] == (parent.name,))  # noqa: E731
    return [
        Body(loop, inside(forward, loop), inside(backward, loop))
        for loop in hlo.loops(module(case))
        if loop.name in parents
    ]


@pytest.mark.parametrize("case", on_both(SMALL) + on_h100(LARGE))
def test_ticks_are_as_many_as_the_schedule_has_slots(case):
    forward, backward = layer_loops(case)
    assert sum(loop.site.executions for loop in forward) == case.num_slots
    assert sum(loop.site.executions for loop in backward) == case.num_slots
    assert all(len(body.forward) <= 1 and len(body.backward) <= 1 for body in bodies(case))


@pytest.mark.parametrize("case", on_both(SMALL) + on_h100(LARGE))
def test_no_stage_decides_anything(case):
    opcodes = {each.opcode for computation in module(case).computations.values() for each in computation.instructions}
    assert "conditional" not in opcodes
    assert "while" in opcodes  # the search does find opcodes


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", on_both(SMALL) + on_h100(LARGE))
def test_a_step_multiplies_as_much_as_its_slots_and_its_output_layer_ask_for(case):
    executed = hlo.matmul_flops(module(case))
    assert executed.uncounted == ()
    tokens = tokens_of_a_microbatch(case) * case.num_microbatches * case.dp
    total = executed.total * case.num_devices
    most = formulas.executed_flops_per_step(
        shape_of(case), tokens, recompute=case.recompute, scores_again=not case.large
    )
    assert total <= MATMUL_FLOPS_RATIO * (1 + case.bubble) * most
    # Stages share the output layer, which runs once a micro-batch: only layers run in idle slots. A recomputed part
    # leaves its last product out, which its backward does not need.
    output = 3 * output_flops_per_token(case) * tokens
    with_idle_slots = lambda flops: (flops - output) * (1 + case.bubble) + output  # noqa: E731
    least = formulas.model_flops_per_step(shape_of(case), tokens)
    assert with_idle_slots(least) <= total <= MATMUL_FLOPS_RATIO * with_idle_slots(most)


# ---- communication --------------------------------------------------------------------------------------------------


def counted(records):
    """Arrays by (kind, bytes of the whole array)."""
    counts = collections.Counter()
    for record in records:
        whole = max(record.operand_bytes, record.result_bytes)
        counts[record.kind, whole // record.operand_count] += record.operand_count
    return counts


def directions(case, record):
    """Stages by which a permute moves."""
    ranks = case.dp * case.tp
    assert all(source % ranks == target % ranks for source, target in record.pairs)
    return {target // ranks - source // ranks for source, target in record.pairs}


@pytest.mark.parametrize("case", on_both(SMALL) + on_h100(LARGE))
def test_a_tick_permutes_once_for_each_of_its_slots(case):
    permutes = [record for record in collectives(case) if record.kind == "collective-permute"]
    assert {(record.axes, record.operand_bytes) for record in permutes} == {(("pp",), hidden_bytes(case))}
    around = {case.pp - 1} if case.chunks > 1 else set()  # with chunks, the last stage sends to the first
    for body in bodies(case):
        own = [record for record in permutes if body.holds(record)]
        ways = collections.Counter(
            "forward" if directions(case, record) == {1} | {-hop for hop in around} else "backward" for record in own
        )
        expected = collections.Counter(forward=len(body.forward), backward=len(body.backward))
        if case.pp > 2 or case.chunks == 1:  # two stages in a ring send alike both ways
            assert ways == +expected
        assert len(own) == expected.total()
        assert {record.executions for record in own} == {body.loop.trip_count * body.loop.site.executions}
        assert all(directions(case, record) <= {1, -1} | around | {-hop for hop in around} for record in own)
    assert sum(record.executions for record in permutes) <= 2 * case.num_slots


@pytest.mark.parametrize("case", on_both(SMALL) + on_h100(LARGE))
def test_stages_sum_embeddings_and_last_activations_once_each_way_a_microbatch(case):
    sums = [record for record in collectives(case) if record.kind == "all-reduce" and record.axes == ("pp",)]
    output_layers = [record for record in collectives(case) if record.op_name.endswith("pmax")]
    own = lambda body, records: counted(record for record in records if body.holds(record))  # noqa: E731
    hidden = ("all-reduce", hidden_bytes(case))
    losses = 0
    for body in bodies(case):
        has_loss = any(body.holds(record) for record in output_layers)
        losses += has_loss * body.loop.trip_count * body.loop.site.executions
        # At most one look-up and one gradient of embeddings a tick, both by a reduction of B; with a loss two more.
        assert own(body, sums)[hidden] <= len(body.forward) + len(body.backward) + 2 * has_loss
        if has_loss and case.chunks == 1 and case.schedule is None and case.num_microbatches >= case.pp:
            assert own(body, sums)[hidden] == 4
    assert losses <= case.num_microbatches
    pieces = 2 if case.large and case.pp == 2 else 1  # of a sequence whose logits are too large at once
    assert sum(record.executions for record in output_layers) == pieces * case.num_microbatches


@pytest.mark.parametrize("case", on_both(SPLIT) + on_h100(LARGE))
def test_a_layer_talks_on_tp_as_without_a_pipeline(case):
    whole = hidden_bytes(case, whole=True)
    for loop in (loop for loops in layer_loops(case) for loop in loops):
        inside = [record for record in collectives(case) if loop.name in record.site.loops]
        assert {record.axes for record in inside} == {("tp",)}
        assert counted(inside) == {("all-gather", whole): 2, ("reduce-scatter", whole): 2}
        assert {record.executions for record in inside} == {loop.trip_count * loop.site.executions}


@pytest.mark.parametrize("case", on_both(case for case in SMALL if case.dp > 1) + on_h100(LARGE))
def test_nothing_talks_on_dp_but_one_reduction_of_the_gradients_a_step(case):
    records = [record for record in collectives(case) if "dp" in record.axes]
    specs = program(case).specs
    if case.dp == 1:
        assert records == []
        return
    assert [record for record in records if record.site.loops] == []
    assert {(record.kind, record.executions, record.dtype) for record in records} == {("all-reduce", 1, "f32")}
    gradient_bytes = partition.local_bytes(specs, mesh_shape(case), 4)
    assert sum(record.operand_bytes for record in records) == gradient_bytes + 4 * len(REPORT)
    num_leaves = len(partition.named_specs(specs))
    assert sum(record.operand_count for record in records) == num_leaves + len(REPORT)


# ---- overlap --------------------------------------------------------------------------------------------------------


def depends_on(computation, names):
    """Names of the instructions of a computation that need what one of `names` gives."""
    found = set(names)
    for each in computation.instructions:  # in schedule order: what is needed comes before
        if found & set(each.operands):
            found.add(each.name)
    return found


def steady_bodies(case):
    found = [body for body in bodies(case) if body.is_steady]
    assert found
    return found


def pairs_of(case, body, kind):
    """Start/done pairs of transfers of B over pp, in the ticks of a body."""
    pairs = [pair for pair in hlo.async_pairs(module(case), mesh_shape(case), kinds=(kind,)) if pair.axes == ("pp",)]
    sizes = {record.name: record.operand_bytes for record in collectives(case)}
    names = (body.loop.name,)
    return [pair for pair in pairs if pair.site.loops[-1:] == names and sizes[pair.start] == hidden_bytes(case)]


@pytest.mark.parametrize("case", on_h100(LARGE))
def test_both_permutes_run_beside_the_other_slot(case):
    for body in steady_bodies(case):
        pairs = pairs_of(case, body, "collective-permute")
        spans = [{work.name for work in pair.between} for pair in pairs]
        (forward,), (backward,) = body.forward, body.backward
        assert len(pairs) == 2
        assert sorted((forward.name in span, backward.name in span) for span in spans) == [(False, True), (True, False)]


@pytest.mark.parametrize("case", on_h100(LARGE))
def test_sums_of_embeddings_run_beside_matmuls_that_take_longer(case):
    h100 = card("h100")
    for body in steady_bodies(case):
        computation = module(case).computation(body.forward[0].site.computation)
        late = depends_on(computation, [loop.name for loop in (*body.forward, *body.backward)])
        sums = [
            record
            for record in collectives(case)
            if (record.kind, record.axes) == ("all-reduce", ("pp",))
            and record.site.loops[-1:] == (body.loop.name,)
            and record.operand_bytes == hidden_bytes(case)
        ]
        # Of a tick's sums over stages, those around the output layer need its forward; those of the embeddings nothing.
        embeddings = [record for record in sums if record.name not in late]
        pairs = {pair.start: pair for pair in pairs_of(case, body, "all-reduce")}
        assert len(embeddings) <= 2
        assert len(embeddings) == 2 or case.chunks > 1
        for record in embeddings:
            assert record.is_async
            hidden_seconds = pairs[record.name].hidden_flops / h100.peak_bf16_flops
            assert hidden_seconds >= record.wire_bytes / h100.nvlink_bytes_per_s


# ---- memory ---------------------------------------------------------------------------------------------------------

FOUR_STAGES = dataclasses.replace(LARGE[2], target="h100")
TWO_CHUNKS = dataclasses.replace(LARGE[3], target="h100")
LOW_MEMORY = dataclasses.replace(FOUR_STAGES, schedule="1f1b-low-memory")
GPIPE = dataclasses.replace(FOUR_STAGES, schedule="gpipe")


def temporary_bytes(case):
    return hlo.memory(compiled(case)).temp_bytes


def chunks_in_flight(case):
    """Chunks of micro-batches whose activations a stage keeps; gpipe has one place more, for what idle stages write."""
    p, v = case.pp, case.chunks
    places = {"1f1b-low-memory": p, "gpipe": case.num_microbatches + 1}
    return places.get(case.schedule, 2 * (p - 1) + (v - 1) * p + 1)


def ring_bytes(case, places):
    """Bytes of the arrays [places, layers of a chunk, ...] that go from tick to tick."""
    lead = (places, case.layers_per_chunk)
    ticks = [loop for loop in hlo.loops(module(case)) if loop.depth == 0]
    carried = [leaves(module(case).computation(t.site.computation).by_name[t.name].shape) for t in ticks]
    return max(sum(leaf.bytes for leaf in each if leaf.dims[:2] == lead) for each in carried)


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("case", [FOUR_STAGES], ids=str)
def test_temporary_memory_does_not_grow_with_the_number_of_microbatches(case):
    sizes = {m: temporary_bytes(dataclasses.replace(case, num_microbatches=m)) for m in (8, 16, 32, 64)}
    assert max(sizes.values()) <= 1.01 * min(sizes.values())


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("case", [FOUR_STAGES, TWO_CHUNKS, LOW_MEMORY, GPIPE], ids=str)
def test_a_stage_keeps_residuals_for_as_many_chunks_as_the_schedule_has_in_flight(case):
    """At the same layers and parameters of a stage, temporaries differ by the chunks in flight and by nothing else."""
    base = FOUR_STAGES
    layer_bytes = ring_bytes(base, chunks_in_flight(base)) / chunks_in_flight(base) / base.layers_per_chunk
    in_flight = chunks_in_flight(case) * case.layers_per_chunk
    assert ring_bytes(case, chunks_in_flight(case)) == in_flight * layer_bytes
    difference = (in_flight - chunks_in_flight(base) * base.layers_per_chunk) * layer_bytes
    assert temporary_bytes(case) - temporary_bytes(base) == pytest.approx(difference, rel=0.1, abs=1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (2, 2), (4, 1), (4, 2), (8, 1)])
def test_a_rank_holds_its_share_of_embedding_and_output_layer(pp, tp, tied):
    case, rows = Case(pp=pp, tp=tp, tied=tied), 50257  # GPT-2's vocabulary, which no number of ranks divides
    words = case.words
    words[words.index("--vocab-size") + 1] = str(rows)
    config, _ = resolve_for_run(load_config(words), case.num_devices)
    state = build_program(config, jax.devices()[: case.num_devices]).abstract_state()
    tables = (rows * (1 if tied else 2) + config.model.max_position_embeddings) * config.model.hidden_size * 4
    # The parameters, and Adam's two moments.
    for tree, copies in ((state.parameters, 1), (state.optimizer, 2)):
        named = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
        ends = [leaf for name, leaf in named if "['layers']" not in name and "['final_norm']" not in name and leaf.ndim]
        assert len(ends) == copies * (2 if tied else 3)
        held = sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in ends)
        assert held <= 1.05 / (pp * tp) * tables * copies


# ---- compile time ---------------------------------------------------------------------------------------------------


@pytest.fixture
def no_compilation_cache():
    # JAX asks once whether the cache is on and remembers the answer until the reset.
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def num_instructions(compiled_step):
    return sum(len(computation.instructions) for computation in hlo.load(compiled_step).computations.values())


@pytest.mark.parametrize("case", on_both([Case(pp=2, tp=2, num_microbatches=8, layers_per_chunk=4)]))
def test_depth_and_microbatches_cost_neither_compile_time_nor_program_size(case, no_compilation_cache):
    cases = {
        "8 layers, 8 micro-batches": case,
        "32 layers": dataclasses.replace(case, layers_per_chunk=16),
        "64 micro-batches": dataclasses.replace(case, num_microbatches=64),
    }
    seconds, sizes = collections.defaultdict(list), {}
    for _ in range(2 if case.target == "cpu" else 1):
        for name, one in cases.items():
            program(one)
            start = time.process_time()  # of all threads: other programs on the machine disturb it less
            result = compile_step(one)
            seconds[name].append(time.process_time() - start)
            sizes[name] = num_instructions(result)
    few, *many = cases
    for name in many:
        assert sizes[name] <= 1.01 * sizes[few], name
        assert min(seconds[name]) <= 1.3 * min(seconds[few]), name
