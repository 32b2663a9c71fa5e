"""The whole training step as XLA compiled it, for CPU devices and for H100s that are absent: what must hold for P4.

Communication per layer and micro-batch, matmul FLOPs against the closed forms (DESIGN.md 5), memory, compile time. Only
abstract arrays: nothing runs. Names of sizes: B = bytes of a micro-batch's whole hidden states, T = bytes of one fp32
number a token.
"""

import collections
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from support import tiny_gpt
from tolerances import MATMUL_FLOPS_RATIO

from jmegatron import partition
from jmegatron.layers import cross_entropy
from jmegatron.mesh import build_mesh
from jmegatron.models.gpt import gpt_specs
from jmegatron.models.transformer import LayerParallel
from jmegatron.optimizer.optimizers import OptimizerSettings, build_optimizer
from jmegatron.optimizer.schedules import LearningRateSchedule
from jmegatron.planner import formulas, hlo
from jmegatron.planner.hlo_text import leaves
from jmegatron.planner.topology import compile_for, compile_only_devices, gpu_compiler_available
from jmegatron.training.batches import CompactBatch, compact_shardings
from jmegatron.training.state import init_state, train_state_shardings
from jmegatron.training.step import StepSettings, make_eval_step, make_train_step

LAYERS = 3  # unlike any number of micro-batches: a loop of three is a loop over layers
MICRO_BATCH, SEQ = 2, 16
REPORT = ("loss_sum", "num_tokens")  # two scalars that are reduced with the gradients

GPT2 = (("activation", "gelu_tanh"),)
LLAMA = (
    ("position", "rope"),
    ("normalization", "RMSNorm"),
    ("activation", "swiglu"),
    ("bias", False),
    ("tied", False),
    ("kv_heads", 4),
)


@dataclasses.dataclass(frozen=True)
class Case:
    dp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    num_microbatches: int = 2
    model: tuple[tuple[str, Any], ...] = GPT2
    num_layers: int = LAYERS
    seq: int = SEQ
    dropout: float = 0.0
    dtype: str = "float32"
    backend: str = "unfused"
    target: str = "cpu"

    @property
    def settings(self):
        model = {"num_layers": self.num_layers, "max_positions": self.seq, **dict(self.model)}
        settings = tiny_gpt(**model, dropout=self.dropout)
        attention = dataclasses.replace(settings.layer.attention, backend=self.backend)
        return dataclasses.replace(settings, layer=dataclasses.replace(settings.layer, attention=attention))

    @property
    def parallel(self):
        return LayerParallel("tp", self.tp, self.sequence_parallel)

    @property
    def mesh_shape(self):
        return {"pp": 1, "dp": self.dp, "ep": 1, "cp": 1, "tp": self.tp}

    @property
    def specs(self):
        return [spec for _, spec in partition.named_specs(gpt_specs(self.settings, self.parallel))]

    @property
    def shape(self):
        """The same model in the numbers of the closed forms."""
        model, layer = self.settings, self.settings.layer
        return formulas.GPTShape(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            ffn_hidden_size=layer.mlp.ffn_hidden_size,
            num_attention_heads=layer.attention.num_heads,
            num_query_groups=layer.attention.num_kv_heads,
            kv_channels=layer.attention.head_dim,
            vocab_rows=model.padded_vocab_size,
            seq_len=self.seq,
            gated=layer.mlp.activation == "swiglu",
        )

    @property
    def tokens_per_step(self):
        return self.dp * self.num_microbatches * MICRO_BATCH * self.seq

    def __str__(self):
        changed = (
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name not in ("target", "model") and getattr(self, field.name) != field.default
        )
        model = {GPT2: "gpt2", LLAMA: "llama"}.get(self.model) or "-".join(f"{n}={v}" for n, v in self.model)
        return "-".join([self.target, model, *changed])


def on_both(cases):
    """Each case for CPU devices, and for H100s where the GPU compiler is."""
    gpus = [dataclasses.replace(case, target="h100") for case in cases]
    return [
        *(pytest.param(case, id=str(case)) for case in cases),
        *(pytest.param(case, id=str(case), marks=pytest.mark.gpu_compiler) for case in gpus),
    ]


# ---- compiling ------------------------------------------------------------------------------------------------------


def devices_of(case):
    if case.target == "cpu":
        return jax.devices()[: case.dp * case.tp]
    available, reason = gpu_compiler_available()
    if not available:
        pytest.skip(reason)
    return compile_only_devices(case.target, case.dp * case.tp)


def build(case):
    """The jitted step and its abstract arguments (state, batch, dropout key), and the evaluation step."""
    mesh = build_mesh(devices_of(case), dp=case.dp, tp=case.tp)
    dtype = jnp.dtype(case.dtype)
    settings = StepSettings(case.settings, case.parallel, OptimizerSettings(), compute_dtype=dtype)
    specs = gpt_specs(case.settings, case.parallel)
    schedule = LearningRateSchedule("cosine", 1e-3, 1e-4, 2.0, 100.0)
    optimizer = build_optimizer(settings.optimizer, schedule, specs)
    shardings = train_state_shardings(specs, optimizer, dtype, mesh)
    shapes = jax.eval_shape(lambda key: init_state(specs, key, optimizer, dtype), jax.random.key(0))
    lead = (case.num_microbatches, MICRO_BATCH * case.dp)
    batch = CompactBatch(
        text=jax.ShapeDtypeStruct((*lead, case.seq + 1), jnp.uint16),
        sample_ids=jax.ShapeDtypeStruct(lead, jnp.uint32),
    )
    key = None
    if case.dropout:
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        key = placed(jax.eval_shape(jax.random.key, 0), replicated)
    step = jax.jit(
        make_train_step(settings, mesh, optimizer, schedule), donate_argnums=0, out_shardings=(shardings, None)
    )
    arguments = (placed(shapes, shardings), placed(batch, compact_shardings(batch, mesh)), key)
    return step, arguments, jax.jit(make_eval_step(settings, mesh))


def placed(shapes, shardings):
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)


@functools.cache
def compiled(case):
    step, arguments, _ = build(case)
    return compile_for(step, *arguments)


@functools.cache
def program(case):
    return hlo.load(compiled(case))


@functools.cache
def collectives(case):
    return between_devices(program(case), case)


def between_devices(module, case):
    """Collectives of more than one device: the CPU back end keeps those of one, which copy."""
    return [record for record in hlo.collectives(module, case.mesh_shape) if record.axes != ()]


# ---- communication --------------------------------------------------------------------------------------------------

QK_NORM = (("qk_norm", True), ("kv_heads", 1), ("tied", True))
FEW_KV_UNTIED = (("kv_heads", 2), ("tied", False), ("qk_norm", True))
TALKING = on_both(
    [
        *(Case(dp=2, tp=2, num_microbatches=m) for m in (1, 2, 4)),
        *(Case(dp=2, tp=4, sequence_parallel=True, num_microbatches=m) for m in (1, 2, 4)),
        Case(dp=2, tp=4, model=QK_NORM, num_microbatches=2),
        Case(dp=2, tp=4, model=FEW_KV_UNTIED, num_microbatches=1, sequence_parallel=True),
        Case(dp=2, tp=4, model=FEW_KV_UNTIED, num_microbatches=4, sequence_parallel=True),
        Case(dp=2, tp=2, dropout=0.1, num_microbatches=4),
        Case(dp=2, tp=2, dropout=0.1, num_microbatches=2, sequence_parallel=True),
        Case(tp=4, model=LLAMA, num_microbatches=2, sequence_parallel=True),
    ]
)


def hidden_bytes(case):
    return MICRO_BATCH * case.seq * case.settings.hidden_size * 4


def counted(records):
    """Arrays by (kind, bytes of the whole array)."""
    counts = collections.Counter()
    for record in records:
        whole = max(record.operand_bytes, record.result_bytes)
        counts[record.kind, whole // record.operand_count] += record.operand_count
    return counts


def layer_loops(module, case):
    """Names of the loops over layers, in schedule order."""
    return [loop.name for loop in hlo.loops(module) if loop.trip_count == case.num_layers]


def of_the_model(record):
    """Called from the model, not from the step around it: those of the model are differentiated."""
    return "jvp(" in record.op_name


@pytest.mark.parametrize("case", TALKING)
def test_a_layer_talks_on_tp_twice_forward_and_twice_backward_per_microbatch(case):
    per_layer = {("all-reduce", hidden_bytes(case)): 2}
    if case.sequence_parallel:
        per_layer = {("all-gather", hidden_bytes(case)): 2, ("reduce-scatter", hidden_bytes(case)): 2}
    loops = layer_loops(program(case), case)
    assert len(loops) == 2  # forward and backward
    for loop in loops:
        inside = [record for record in collectives(case) if loop in record.site.loops]
        assert {record.axes for record in inside} == {("tp",)}
        assert {record.executions for record in inside} == {case.num_layers * case.num_microbatches}
        assert counted(inside) == per_layer


@pytest.mark.parametrize("case", TALKING)
def test_embedding_and_output_layer_talk_on_tp_once_each_way_per_microbatch(case):
    loops = layer_loops(program(case), case)
    records = [
        record for record in collectives(case) if of_the_model(record) and not set(loops) & set(record.site.loops)
    ]
    tokens = MICRO_BATCH * case.seq * 4
    # Largest logit; then the sum of exponentials and the label's logit, together.
    expected = {("all-reduce", tokens): 1, ("all-reduce", 2 * tokens): 1}
    if case.sequence_parallel:
        # Embedding: scatter forward, gather backward. Output layer: gather forward, scatter backward.
        expected |= {("reduce-scatter", hidden_bytes(case)): 2, ("all-gather", hidden_bytes(case)): 2}
    else:
        # Embedding: forward. Output layer: backward.
        expected |= {("all-reduce", hidden_bytes(case)): 2}
    assert {record.axes for record in records} == {("tp",)}
    assert {record.executions for record in records} == {case.num_microbatches}
    assert counted(records) == expected


@pytest.mark.parametrize("case", TALKING)
def test_nothing_talks_on_dp_but_one_reduction_of_the_gradients_a_step(case):
    records = [record for record in collectives(case) if "dp" in record.axes]
    gradient_bytes = partition.local_bytes(gpt_specs(case.settings, case.parallel), case.mesh_shape, 4)
    if case.dp == 1:
        assert records == []
        return
    assert [record.site.loops for record in records if record.site.loops] == []
    assert {(record.kind, record.executions, record.dtype) for record in records} == {("all-reduce", 1, "f32")}
    assert sum(record.operand_bytes for record in records) == gradient_bytes + 4 * len(REPORT)
    assert sum(record.operand_count for record in records) == len(case.specs) + len(REPORT)
    # The GPU compiler may sum parts over tp and dp in one go: one reduction of those leaves, one of the others.
    assert len(records) <= (2 if any(spec.partial_axes for spec in case.specs) else 1)


@pytest.mark.parametrize("case", TALKING)
def test_partial_gradients_and_the_norm_are_summed_over_tp_once_a_step(case):
    records = [record for record in collectives(case) if "tp" in record.axes and not of_the_model(record)]
    partial = [spec for spec in case.specs if spec.partial_axes]
    divided = [spec for spec in case.specs if "tp" in spec.spec]
    assert all(not set(spec.partial_axes) & set(spec.spec) for spec in partial)
    sizes = sum(int(np.prod(spec.shape)) for spec in partial)
    assert [record.site.loops for record in records if record.site.loops] == []
    assert {record.kind for record in records} == {"all-reduce"}
    reports = sum(len(REPORT) for record in records if "dp" in record.axes and record.operand_count > len(partial))
    assert sum(record.operand_bytes for record in records) == 4 * (sizes + len(divided) + reports)
    assert sum(record.operand_count for record in records) == len(partial) + len(divided) + reports


@pytest.mark.parametrize("case", on_both([Case(model=GPT2), Case(model=LLAMA)]))
def test_one_device_talks_to_nobody(case):
    assert collectives(case) == []


# ---- FLOPs ----------------------------------------------------------------------------------------------------------

WIDE = (("hidden", 64), ("head_dim", 8), ("ffn", 256), ("vocab", 120), ("padded_vocab", 128))
MULTIPLYING = on_both(
    [
        Case(tp=tp, sequence_parallel=sequence_parallel, model=model + WIDE, seq=64)
        for model in (GPT2, LLAMA)
        for tp, sequence_parallel in ((1, False), (2, False), (2, True), (4, False), (4, True))
    ]
)


@pytest.mark.parametrize("case", MULTIPLYING)
def test_training_multiplies_as_much_as_the_mathematics_asks_for(case):
    flops = hlo.matmul_flops(program(case))
    assert flops.uncounted == ()
    theory = formulas.executed_flops_per_step(case.shape, case.tokens_per_step, scores_again=True)
    assert 1 <= flops.total * case.tp * case.dp / theory <= MATMUL_FLOPS_RATIO


@pytest.mark.parametrize(
    "case",
    on_both(
        [
            Case(model=GPT2 + WIDE, seq=64),
            Case(tp=2, model=GPT2 + WIDE, seq=64),
            Case(tp=4, sequence_parallel=True, model=LLAMA + WIDE, seq=64),
        ]
    ),
)
def test_evaluation_multiplies_and_talks_as_a_forward_pass(case):
    _, (state, batch, _), evaluate = build(case)
    read = hlo.load(compile_for(evaluate, state.parameters, batch))
    theory = formulas.forward_flops_per_token(case.shape) * case.tokens_per_step
    assert 1 <= hlo.matmul_flops(read).total * case.tp / theory <= MATMUL_FLOPS_RATIO
    (loop,) = layer_loops(read, case)
    inside = [record for record in between_devices(read, case) if loop in record.site.loops]
    kinds = collections.Counter(record.kind for record in inside)
    expected = {"all-gather": 2, "reduce-scatter": 2} if case.sequence_parallel else {"all-reduce": 2}
    assert kinds == (expected if case.tp > 1 else {})


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


@pytest.mark.parametrize("case", on_both([Case(tp=2, sequence_parallel=True)]))
def test_depth_costs_neither_compile_time_nor_program_size(case, no_compilation_cache):
    seconds, sizes = collections.defaultdict(list), {}
    for _ in range(3):
        for num_layers in (8, 32):  # in turn, so that a busy machine slows both
            step, arguments, _ = build(dataclasses.replace(case, num_layers=num_layers))
            start = time.perf_counter()
            result = compile_for(step, *arguments)
            seconds[num_layers].append(time.perf_counter() - start)
            sizes[num_layers] = num_instructions(hlo.load(result))
    # The GPU compiler chooses fusions by shape, which moves a few instructions (3927 and 3939) and adds none per layer.
    assert abs(sizes[32] - sizes[8]) <= (0 if case.target == "cpu" else sizes[8] // 100)
    assert min(seconds[32]) <= 1.3 * min(seconds[8])


def num_instructions(module):
    return sum(len(computation.instructions) for computation in module.computations.values())


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    on_both([Case(), Case(dp=2, tp=4, sequence_parallel=True), Case(tp=2, dtype="bfloat16", model=LLAMA)]),
)
def test_the_donated_state_is_updated_in_place(case):
    _, (state, _, _), _ = build(case)
    state_bytes = sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
    )
    assert hlo.memory(compiled(case)).alias_bytes == state_bytes


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_temporary_memory_does_not_grow_with_the_number_of_microbatches(dtype):
    few, many = (
        hlo.memory(compiled(Case(dp=2, tp=2, dtype=dtype, num_microbatches=m, target="h100"))).temp_bytes
        for m in (2, 8)
    )
    # What the step makes of the compact batch may grow: tokens, labels, mask and weight, 4 bytes each a token.
    assert many - few <= 4 * 4 * (8 - 2) * MICRO_BATCH * SEQ
    assert many <= 1.02 * few


LARGE_VOCABULARY = (("vocab", 4096), ("padded_vocab", 4096))


@pytest.mark.parametrize(
    "case",
    on_both(
        [
            Case(model=LARGE_VOCABULARY, seq=64),
            Case(tp=2, sequence_parallel=True, model=(*LARGE_VOCABULARY, ("tied", False)), seq=64),
        ]
    ),
)
@pytest.mark.parametrize("chunks", [1, 8])
def test_logits_of_a_whole_sequence_never_exist_when_they_exceed_the_limit(case, chunks, monkeypatch):
    logits_bytes = MICRO_BATCH * case.seq * 4096 // case.tp * 4
    monkeypatch.setattr(cross_entropy, "LOGITS_BYTES", logits_bytes // chunks)
    step, arguments, _ = build(case)
    read = hlo.load(compile_for(step, *arguments))
    sizes = [
        leaf.size
        for computation in read.computations.values()
        for instruction in computation.instructions
        for leaf in leaves(instruction.shape)
    ]
    # One chunk is the control: the search does find whole logits.
    assert (max(sizes) * 4 >= logits_bytes) == (chunks == 1)


# ---- precision, on GPUs only: the CPU back end multiplies bf16 in fp32 ----------------------------------------------

HALF = (("hidden", 128), ("head_dim", 16), ("ffn", 256), ("vocab", 256), ("padded_vocab", 256))
HALVES = [
    Case(target="h100", dtype="bfloat16", backend=backend, model=model + HALF, seq=128, tp=2, sequence_parallel=True)
    for backend in ("fused", "unfused")
    for model in (GPT2, LLAMA)
]


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("case", HALVES, ids=str)
def test_bf16_matmuls_take_bf16_operands(case):
    module, wrong = program(case), []
    for instruction, site in hlo.walk(module):
        target = instruction.attributes.get("custom_call_target", "")
        if instruction.opcode == "dot" or "cublas" in target or "fmha" in target:
            computation = module.computation(site.computation)
            operands = [next(leaves(computation.by_name[name].shape)) for name in instruction.operands[:2]]
            if any(operand.dtype != "bf16" for operand in operands):
                wrong.append((instruction.op_name, [operand.dtype for operand in operands]))
    assert wrong == []


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("case", HALVES, ids=str)
def test_bf16_gradients_are_summed_in_fp32_over_microbatches(case):
    module = program(case)
    (loop,) = [each for each in hlo.loops(module) if each.depth == 0 and each.trip_count == case.num_microbatches]
    instruction = module.computation(loop.site.computation).by_name[loop.name]
    carried = collections.Counter((leaf.dtype, leaf.dims) for leaf in leaves(instruction.shape))
    sums = collections.Counter()
    for spec in case.specs:
        local = tuple(
            n // (case.tp if axis else 1) for n, axis in zip(spec.shape, (*spec.spec, *[None] * 9), strict=False)
        )
        sums["f32", local] += 1
    missing = {shape: number for shape, number in sums.items() if carried[shape] < number}
    assert missing == {}


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("case", HALVES[:2], ids=str)
def test_fused_attention_multiplies_as_much_as_the_mathematics_asks_for(case):
    flops = hlo.matmul_flops(program(case))
    theory = formulas.model_flops_per_step(case.shape, case.tokens_per_step)
    assert flops.attention > 0
    assert flops.uncounted == ()
    assert 1 <= flops.total * case.tp / theory <= MATMUL_FLOPS_RATIO
