"""The step with the distributed optimizer as XLA compiled it, for CPU devices and for H100s that are absent.

Bytes over dp, memory, overlap (DESIGN.md 4.8 and 5) of the program that a run with these options trains with. Only
abstract arrays: nothing runs. d: data-parallel ranks.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from compiled_support import program_of

from jmegatron import partition
from jmegatron.mesh import DATA_AXES
from jmegatron.planner import hlo
from jmegatron.planner.hlo_text import leaves
from jmegatron.planner.topology import compile_for

SWITCHES = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
LAYERS_PER_CHUNK = 3  # unlike any number of micro-batches or ranks
BYTES_RATIO = 0.02
"""Of what the closed forms say: biases and norms that cannot be divided, scalars."""


@dataclasses.dataclass(frozen=True)
class Case:
    dp: int = 2
    switches: tuple[str, ...] = SWITCHES
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    num_microbatches: int = 4
    large: bool = False
    """Real sizes in bf16 with fused attention: at small ones XLA orders and merges collectives differently."""
    short: bool = False
    """Of those, sequences of 128 tokens through more layers: nearly all memory is that of parameters."""
    checked: bool = True
    """With --check-for-nan-in-loss-and-grad."""
    target: str = "cpu"

    @property
    def num_devices(self):
        return self.dp * self.tp * self.pp

    @property
    def layers_per_chunk(self):
        return 8 if self.short else LAYERS_PER_CHUNK

    @property
    def itemsize(self):
        return 2 if self.large else 4

    @property
    def words(self):
        hidden, seq, vocab = (4096, 4096, 32768) if self.large else (64, 64, 250)
        seq, vocab = (128, 1024) if self.short else (seq, vocab)
        layers = self.layers_per_chunk * self.chunks * self.pp
        words = (
            f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads "
            f"{hidden // 128 or 8} --ffn-hidden-size {4 * hidden} --seq-length {seq} --max-position-embeddings {seq} "
            f"--vocab-size {vocab} --micro-batch-size 1 --global-batch-size {self.num_microbatches * self.dp} "
            f"--hidden-dropout 0 --attention-dropout 0 --mock-data --lr 1e-4 --train-iters 10 --sequence-parallel "
            f"--pipeline-model-parallel-size {self.pp} --tensor-model-parallel-size {self.tp}"
        ).split()
        words += ["--bf16", "--attention-backend", "fused", "--untie-embeddings-and-output-weights"] * self.large
        words += ["--num-virtual-stages-per-pipeline-rank", str(self.chunks)] if self.chunks > 1 else []
        words += [] if self.checked else ["--no-check-for-nan-in-loss-and-grad"]
        return [*words, *self.switches]

    def __str__(self):
        names = [name.removeprefix("--") for name in self.switches]
        changed = (
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name not in ("target", "switches") and getattr(self, field.name) != field.default
        )
        return "-".join([self.target, names[-1] if names else "replicated", *changed])


def on_h100(cases):
    gpus = [dataclasses.replace(case, target="h100") for case in cases]
    return [pytest.param(case, id=str(case), marks=pytest.mark.gpu_compiler) for case in gpus]


def on_cpu(cases):
    return [pytest.param(case, id=str(case)) for case in cases]


SMALL = [
    Case(dp=2, switches=SWITCHES[:1]),
    Case(dp=8, switches=SWITCHES[:2], num_microbatches=2),
    Case(dp=4, tp=2),
    Case(dp=2, tp=2, pp=2),
    Case(dp=2, pp=2, chunks=2),
]
REPLICATED = [Case(dp=4, tp=2, switches=()), Case(dp=4, pp=2, switches=SWITCHES[1:2])]
LARGE = [Case(dp=8, large=True), Case(dp=4, pp=2, large=True)]
LARGE_PLAIN = [Case(dp=8, large=True, switches=SWITCHES[:1])]


# ---- compiling ------------------------------------------------------------------------------------------------------
@functools.cache
def program(case):
    return program_of(case.words, case.target, case.num_devices)


@functools.cache
def compiled(case):
    one = program(case)
    return compile_for(one.train_step(), one.abstract_state(), one.abstract_batch(), one.dropout_key())


@functools.cache
def module(case):
    return hlo.load(compiled(case))


@functools.cache
def over_dp(case):
    """Collectives over data-parallel ranks, but for all-reduces of scalars: report and norms."""
    records = hlo.collectives(module(case), dict(program(case).mesh.shape))
    own = [record for record in records if "dp" in (record.axes or ())]
    return [each for each in own if each.kind != "all-reduce" or each.operand_bytes > 8 * each.operand_count]


def elements(case):
    """(path, elements on a device before they are divided over dp, whether they are) of each parameter."""
    sizes = dict(program(case).mesh.shape)
    for path, spec in partition.named_specs(program(case).specs):
        local = partition.local_bytes({"a": spec}, sizes, 1)
        yield path, local, partition.data_sharded(spec, DATA_AXES, sizes)[1] is not None


def total_bytes(records, kind):
    """Bytes of whole arrays a step, loops included."""
    return sum(
        max(record.operand_bytes, record.result_bytes) * record.executions for record in records if record.kind == kind
    )


# ---- bytes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", on_cpu(SMALL) + on_h100(LARGE + LARGE_PLAIN))
def test_each_gradient_is_reduced_and_each_parameter_gathered_once_a_step(case):
    divided = sum(size for _, size, is_divided in elements(case) if is_divided)
    whole = sum(size for _, size, is_divided in elements(case) if not is_divided)
    assert whole <= BYTES_RATIO * divided
    assert {record.kind for record in over_dp(case)} <= {"reduce-scatter", "all-gather", "all-reduce"}
    for kind, itemsize in (("reduce-scatter", 4), ("all-gather", case.itemsize)):
        assert total_bytes(over_dp(case), kind) == pytest.approx(itemsize * divided, rel=BYTES_RATIO)
        wire = sum(record.wire_bytes * record.executions for record in over_dp(case) if record.kind == kind)
        expected = (case.dp - 1) / case.dp * itemsize * (divided + whole)
        assert wire == pytest.approx(expected, rel=BYTES_RATIO)
    assert {r.dtype for r in over_dp(case) if r.kind == "reduce-scatter"} == {"f32"}
    assert total_bytes(over_dp(case), "all-reduce") <= BYTES_RATIO * 4 * divided


@pytest.mark.parametrize("case", on_cpu(REPLICATED))
def test_without_the_distributed_optimizer_each_gradient_is_all_reduced_once_a_step(case):
    count = sum(size for _, size, _ in elements(case))
    assert {record.kind for record in over_dp(case)} == {"all-reduce"}
    assert total_bytes(over_dp(case), "all-reduce") == pytest.approx(4 * count, rel=BYTES_RATIO)


def executions_in_loops(case, kind):
    """How often each collective that stands in a loop runs in a step."""
    return {record.executions for record in over_dp(case) if record.kind == kind and record.site.loops}


@pytest.mark.parametrize("case", on_cpu(SMALL + REPLICATED) + on_h100(LARGE + LARGE_PLAIN))
def test_only_overlapped_collectives_stand_in_loops_over_layers(case):
    """The first layer that is gathered and the last one that is reduced stand outside: nothing is left beside them."""
    inside = {LAYERS_PER_CHUNK - 1}
    reduced = "reduce-scatter" if SWITCHES[0] in case.switches else "all-reduce"
    if case.chunks == 1:
        assert executions_in_loops(case, reduced) == (inside if SWITCHES[1] in case.switches else set())
        assert executions_in_loops(case, "all-gather") == (inside if SWITCHES[2] in case.switches else set())


# ---- overlap --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", on_h100(LARGE))
def test_reductions_and_gathers_in_loops_over_layers_run_beside_other_work(case):
    """Beside matmuls as far as there are any; the scheduler's own figures stand in docs/performance.md."""
    pairs = {pair.operation: pair for pair in hlo.async_pairs(module(case), dict(program(case).mesh.shape))}
    for kind in ("reduce-scatter", "all-gather"):
        own = [record for record in over_dp(case) if record.kind == kind and record.site.loops]
        assert {record.name for record in own} <= pairs.keys()
        assert all(pairs[record.name].between for record in own)
        beside_matmuls = sum(record.wire_bytes for record in own if pairs[record.name].is_hidden)
        assert beside_matmuls >= 0.4 * sum(record.wire_bytes for record in own)


# ---- memory ---------------------------------------------------------------------------------------------------------
STATES = [
    Case(dp=8, large=True, switches=SWITCHES[:1]),
    Case(dp=8, large=True),
    Case(dp=8, large=True, switches=()),
]


@pytest.mark.parametrize("case", on_h100(STATES))
def test_arguments_are_two_bytes_a_parameter_and_twelve_over_d(case):
    """bf16 parameters, fp32 master and two moments; parameters divided as well where their gather is overlapped."""
    memory, count = hlo.memory(compiled(case)), sum(size for _, size, _ in elements(case))
    expected = 2 + 12 / (case.dp if SWITCHES[0] in case.switches else 1)
    if SWITCHES[2] in case.switches:
        expected = 14 / case.dp
    assert memory.argument_bytes / count == pytest.approx(expected, rel=0.02)


SHORT = [
    Case(dp=8, large=True, short=True, num_microbatches=2, switches=switches)
    for switches in ((), SWITCHES[:1], SWITCHES[:2], SWITCHES)
]


def one_layer(case):
    """Parameters of a layer."""
    return sum(size for path, size, _ in elements(case) if path.startswith("layers/")) / case.layers_per_chunk


@pytest.mark.parametrize("case", on_h100(SHORT))
def test_a_step_needs_the_bytes_a_parameter_of_theory_and_those_of_one_layers_gradients(case):
    """18 bytes; with the distributed optimizer 6 + 12/d. Where gradients are reduced in the loop their part is on top
    (4/d), where parameters lie divided whole ones do (2, beside 2/d). Beyond: of the layer at work its gradients in
    bf16 and sums of a leaf; in the loop also what is reduced. All activations together are 0.06 bytes a parameter.
    """
    memory, count, layer = hlo.memory(compiled(case)), sum(size for _, size, _ in elements(case)), one_layer(case)
    theory = (18, 6 + 12 / case.dp, 6 + 16 / case.dp, 6 + 18 / case.dp)[len(case.switches)]
    beyond = memory.argument_bytes + memory.temp_bytes - theory * count
    assert beyond < (8 if SWITCHES[1] in case.switches else 4) * layer


@pytest.mark.parametrize("case", on_h100([SHORT[1], SHORT[3]]))
def test_a_look_at_each_ranks_gradients_before_they_are_reduced_copies_none_of_them(case):
    """In the loop XLA orders a layer's work another way, which moves the peak by a small leaf."""
    without = hlo.memory(compiled(dataclasses.replace(case, checked=False)))
    assert hlo.memory(compiled(case)).temp_bytes - without.temp_bytes < 0.2 * one_layer(case)


def state_bytes(case):
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(program(case).abstract_state())
    )


@pytest.mark.parametrize("case", on_cpu(SMALL) + on_h100(STATES))
def test_the_whole_state_is_written_where_the_old_one_lay(case):
    memory = hlo.memory(compiled(case))
    assert memory.alias_bytes == pytest.approx(state_bytes(case), rel=0.001, abs=1024)
    assert memory.argument_bytes - memory.alias_bytes < 0.02 * memory.argument_bytes + 4096  # the batch


@pytest.mark.parametrize("case", on_h100(STATES))
def test_gradients_of_layers_lie_in_one_fp32_buffer_and_a_reduced_part_of_it(case):
    carried = []
    for loop in hlo.loops(module(case)):
        shape = module(case).computation(loop.site.computation).by_name[loop.name].shape
        lead = (LAYERS_PER_CHUNK,)
        carried.append(sum(x.bytes for x in leaves(shape) if x.dtype == "f32" and x.dims[:1] == lead))
    layers = sum(size for path, size, _ in elements(case) if path.startswith("layers/"))
    reduced = 4 / case.dp if SWITCHES[1] in case.switches else 0
    assert max(carried) / layers == pytest.approx(4 + reduced, rel=0.02)
