"""What a layout costs, against the tables of the schedules, the model's own declarations and published figures."""

import dataclasses
import math

import jax
import pytest

from jmegatron.config import load_config
from jmegatron.partition import axes_of, named_specs
from jmegatron.pipeline.schedule import build_schedule, in_flight, rings, simulate
from jmegatron.planner import costs, formulas, memory
from jmegatron.planner.buffers import carried_bytes
from jmegatron.planner.costs import Layout
from jmegatron.training.build import formula_layout, formula_shape
from jmegatron.training.program import build_program, resolve_for_run

TINY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --mock-data --lr 1e-3 --train-iters 5 --vocab-size 500"
)
LLAMA = (
    "--group-query-attention --num-query-groups 2 --position-embedding-type rope --normalization RMSNorm "
    "--activation swiglu --disable-bias-linear --untie-embeddings-and-output-weights --bf16"
)
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
UNEVEN = f"{PP} 2 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3"
CHUNKS = f"{PP} 2 --num-virtual-stages-per-pipeline-rank 2"
SHARDED = "--use-distributed-optimizer"
EP = "--expert-model-parallel-size"
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96"
SHARED_EXPERT = (
    "--moe-shared-expert-intermediate-size 48 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)
LAYOUTS = {
    "one device a replica, fp32": "",
    "sequence parallel": f"--bf16 {TP} 2 --sequence-parallel",
    "fewer kv heads than tp ranks": f"{LLAMA} {TP} 4 {SHARDED}",
    "query bias, q/k norms, stages": f"{LLAMA} {TP} 4 {PP} 2 --add-qkv-bias --qk-layernorm",
    "uneven stages": f"{LLAMA} {UNEVEN}",
    "uneven stages, sharded": f"{LLAMA} {UNEVEN} {SHARDED} --overlap-grad-reduce --overlap-param-gather",
    "chunks, context parallel": f"--bf16 {CHUNKS} {SHARDED} --context-parallel-size 2 {TP} 2 --qk-layernorm",
    "a stage without layers": f"--bf16 {PP} 2 --pipeline-model-parallel-layout Et|tt|t|L",
    "positions that the ranks cannot share": f"--bf16 --optimizer sgd {PP} 4 --max-position-embeddings 33",
    "lion, sharded, fp32": f"--optimizer lion {SHARDED}",
    "experts": f"--bf16 {EXPERTS} {SHARDED}",
    "experts, ep 2": f"--bf16 {EXPERTS} {EP} 2",
    "experts, ep 4, tp 2, sharded": f"--bf16 {EXPERTS} {EP} 4 {TP} 2 {SHARDED}",
    "whole experts, ep 2, tp 2, sharded": f"{LLAMA} {EXPERTS} {EP} 2 {TP} 2 {SHARDED} --expert-tensor-parallel-size 1",
    "shared expert, bias of experts": f"{LLAMA} {EXPERTS} {SHARED_EXPERT} {EP} 2 {TP} 2 {SHARDED}",
    "experts, stages": f"{LLAMA} {EXPERTS} {EP} 2 {PP} 2 {SHARDED} --overlap-grad-reduce --overlap-param-gather",
    "experts in every second layer": f"--bf16 {EXPERTS} {EP} 2 {PP} 2 {SHARDED} --moe-layer-freq [1,0]*2",
    "experts in some layers of uneven stages": f"{LLAMA} {EXPERTS} {SHARED_EXPERT} {UNEVEN} --moe-layer-freq [0,0,1,1]",
    "experts, context parallel, chunks": f"--bf16 {EXPERTS} {EP} 2 {CHUNKS} {SHARDED} --context-parallel-size 2",
}


def planned(words: str, num_devices: int = 8):
    """The program of the options on CPU devices, with what the formulas take for it."""
    config, _ = resolve_for_run(load_config(f"{TINY} {words}".split()), num_devices)
    program = build_program(config, jax.devices()[:num_devices])
    return program, formula_shape(config), formula_layout(config, program.mesh.shape["dp"])


def bytes_on_a_device(tree) -> int:
    arrays = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim]  # counters apart
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays)


# ---- parameters and model state -------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", LAYOUTS.values(), ids=LAYOUTS)
def test_model_state_is_that_of_the_real_tree_to_the_byte(words):
    program, shape, layout = planned(words)
    state = program.abstract_state()
    found = memory.model_state_bytes(shape, layout)
    assert (found.parameters, found.master, found.moments) == tuple(
        map(bytes_on_a_device, (state.parameters, state.master, state.optimizer))
    )
    assert found.between_steps == bytes_on_a_device(state)


@pytest.mark.parametrize("words", LAYOUTS.values(), ids=LAYOUTS)
def test_parameters_of_the_stages_sum_to_the_model_and_are_those_of_the_declarations(words):
    program, shape, layout = planned(words)
    sizes = dict(program.mesh.shape)
    held = unique = 0
    owned = [0] * layout.pp
    for path, spec in named_specs(program.specs):
        local = math.prod(spec.shape) // math.prod(sizes[axis] for entry in spec.spec for axis in axes_of(entry))
        held += local
        layers = path.startswith("layers/")
        real = sum(layer >= 0 for row in spec.stacked for layer in row) if layers else 1
        unique += math.prod(spec.shape[spec.num_stacked_dims :]) * real
        for stage in range(layout.pp):
            own = sum(
                layer >= 0
                for row in spec.stacked
                for layer in row[stage * len(row) // layout.pp : (stage + 1) * len(row) // layout.pp]
            )
            places = sum(map(len, spec.stacked)) // layout.pp
            owned[stage] += local // places * own if layers else local
    ranks = [costs.parameters_of_rank(shape, layout, stage) for stage in range(layout.pp)]
    assert [rank.total for rank in ranks] == owned
    assert {rank.held for rank in ranks} == {held}
    assert costs.unique_parameters(shape, layout) == formulas.parameters(shape).total == unique


def test_stages_of_one_and_three_layers_hold_as_many_places_and_own_their_layers():
    program, shape, layout = planned(f"{LLAMA} {UNEVEN}")
    first, last = (costs.parameters_of_rank(shape, layout, stage) for stage in (0, 1))
    layer = sum(leaf.size for leaf in costs.leaves(shape, layout) if leaf.per_layer)
    assert last.total - first.total == 2 * layer
    assert (first.empty, last.empty) == (2 * layer, 0)
    # Only the final norm is on both stages.
    assert first.total + last.total == formulas.parameters(shape).total + shape.hidden_size
    parameters = program.abstract_state().parameters
    assert 2 * first.held == bytes_on_a_device(parameters) == 2 * last.held


def test_muon_keeps_one_moment_of_a_matrix_and_two_of_all_else():
    program, shape, layout = planned(f"--bf16 --optimizer muon {TP} 2 {SHARDED}")
    coefficients = 5 * 3 * 4  # of its five Newton-Schulz steps, which its state carries
    assert memory.model_state_bytes(shape, layout).moments + coefficients == bytes_on_a_device(
        program.abstract_state().optimizer
    )


def test_70b_on_512_gpus_needs_39_gb_of_state_and_14_8_with_the_distributed_optimizer():
    layout = Layout(tp=8, pp=4, dp=16)
    a_device = 70e9 / 32
    assert memory.state_bytes_per_parameter(layout).total == 18
    assert memory.state_bytes_per_parameter(layout).total * a_device / 1e9 == pytest.approx(39.4, abs=0.05)
    sharded = memory.state_bytes_per_parameter(dataclasses.replace(layout, distributed_optimizer=True))
    assert sharded.total == 6 + 12 / 16
    assert sharded.between_steps == 2 + 12 / 16
    assert sharded.total * a_device / 1e9 == pytest.approx(14.8, abs=0.05)


@pytest.mark.parametrize(
    ("options", "arguments", "peak"),
    [
        ({}, 14, 18),
        ({"distributed_optimizer": True}, 2 + 12 / 8, 6 + 12 / 8),
        ({"distributed_optimizer": True, "overlap_grad_reduce": True}, 2 + 12 / 8, 6 + 16 / 8),
        (
            {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
            14 / 8,
            6 + 18 / 8,
        ),
        ({"parameter_bytes": 4}, 12, 16),
        ({"parameter_bytes": 4, "distributed_optimizer": True}, 4 + 8 / 8, 8 + 8 / 8),
    ],
)
def test_bytes_a_parameter_are_those_of_the_optimizers_table(options, arguments, peak):
    found = memory.state_bytes_per_parameter(Layout(dp=4, cp=2, **options))
    assert (found.between_steps, found.total) == (arguments, peak)


# ---- activations ----------------------------------------------------------------------------------------------------

GPT_70B = formulas.GPTShape(
    80, 8192, 4 * 8192, 64, 64, 128, vocab_rows=128_000, seq_len=4096, tied=False, num_positions=4096
)
ON_512 = Layout(
    tp=8,
    pp=4,
    dp=16,
    num_microbatches=64,
    sequence_parallel=True,
    distributed_optimizer=True,
    recompute="selective",
)


def test_a_layer_of_70b_takes_143_mb_by_the_paper_and_20_layers_of_4_microbatches_11_4_gb():
    layer = memory.textbook_activation_bytes(GPT_70B, ON_512)
    assert layer == 34 * 4096 * 8192 / 8
    assert layer / 1e6 == pytest.approx(143, abs=0.5)
    assert layer * 20 * 4 / 1e9 == pytest.approx(11.4, abs=0.05)
    half = dataclasses.replace(ON_512, cp=2)
    assert memory.textbook_activation_bytes(GPT_70B, half) == layer / 2
    assert memory.activation_bytes(GPT_70B, half) == memory.activation_bytes(GPT_70B, ON_512) / 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # arXiv:2205.05198, table 2: x s b h, with a s / h = 32
        ({"recompute": "selective"}, 10 + 24 / 8),
        ({"recompute": "selective", "sequence_parallel": True}, 34 / 8),
        ({}, 10 + 24 / 8 + 5 * 32 / 8),
        ({"sequence_parallel": True}, 34 / 8 + 5 * 32 / 8),
        ({"recompute": "full"}, 2),
        ({"recompute": "full", "sequence_parallel": True}, 2 / 8),
    ],
)
def test_textbook_activations_are_the_papers_table(options, expected):
    found = memory.textbook_activation_bytes(GPT_70B, Layout(tp=8, micro_batch_size=2, **options))
    assert found == pytest.approx(expected * 2 * 4096 * 8192, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # models/README.md: x s b h / t, head width 128, t = 8; norms keep two fp32 numbers a token where they are not
        # computed again
        ({"recompute": "selective"}, 20 + 4 / 128),
        ({}, 20 + 4 * 8 + 4 / 128 + 2 * 8 / 8192),
        ({"recompute": "selective", "recompute_modules": ("core_attn", "mlp")}, 12 + 4 / 128),
        ({"recompute": "full"}, 2),
        ({"recompute": "selective", "dropout": True}, 22 + 4 / 128),
    ],
)
def test_our_activations_are_those_of_the_models_table(options, expected):
    layout = Layout(tp=8, sequence_parallel=True, **options)
    assert memory.activation_bytes(GPT_70B, layout) == pytest.approx(expected * 4096 * 8192 / 8, rel=1e-12)


def test_grouped_queries_and_a_gate_count_by_their_own_widths():
    # docs/performance.md: 23 s b h / cp, and the log-sum-exp, with hidden 1024, a gated MLP of 2816, tp 1
    shape = formulas.GPTShape(4, 1024, 2816, 8, 8, 128, 1000, 8192, gated=True, biases=False, norm="rmsnorm")
    layout = Layout(cp=4, recompute="selective")
    assert memory.activation_bytes(shape, layout) == (23 + 4 / 128) * 8192 * 1024 / 4
    grouped = dataclasses.replace(shape, num_query_groups=2)
    saved = memory.activation_bytes(shape, layout) - memory.activation_bytes(grouped, layout)
    assert saved == 2 * 2 * 6 * 128 * 8192 / 4
    # Two kv heads on four ranks: each computes one.
    layout = Layout(tp=4, sequence_parallel=True, recompute="selective")
    assert memory.kept_of_layer(grouped, layout)["key"] == 2 * 128 * 8192


def test_units_and_blocks_of_full_recompute_keep_by_the_chunk():
    full = Layout(pp=4, recompute="full", sequence_parallel=True, tp=8)
    unit, plain = 2 * 4096 * 8192 / 8, memory.activation_bytes(GPT_70B, Layout(sequence_parallel=True, tp=8))
    kept = lambda **how: memory.chunk_activation_bytes(GPT_70B, dataclasses.replace(full, **how))  # noqa: E731
    assert kept() == 20 * unit
    assert kept(recompute_num_layers=6) == 4 * unit
    assert kept(recompute_num_layers=100) == unit
    assert kept(recompute_method="block", recompute_num_layers=6) == 6 * unit + 14 * plain
    assert kept(recompute_method="block", recompute_num_layers=100) == 20 * unit


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        (f"{EXPERTS} {EP} 2 --recompute-granularity selective", 0),
        (f"{LLAMA} {EXPERTS} {SHARED_EXPERT} {EP} 2 {TP} 2 --recompute-granularity selective", 0),
        (
            f"{LLAMA} {EXPERTS} {EP} 2 {TP} 2 --sequence-parallel --expert-tensor-parallel-size 1 "
            "--recompute-granularity selective --recompute-modules core_attn mlp --moe-receive-bound-factor 1.5",
            0,
        ),
        (f"{EXPERTS} {EP} 2 --recompute-granularity selective --moe-expert-capacity-factor 1.5", 0),
        # What the router keeps beside it: counts, offsets, and with experts' biases nothing of its scores.
        (f"{EXPERTS} {EP} 2 {TP} 2 --sequence-parallel", 0.01),
        (f"{EXPERTS} {EP} 4 --moe-layer-freq [0,1]*2 --moe-expert-capacity-factor 1.5", 0.02),
    ],
    ids=[
        *("selective", "shared expert", "whole experts, bound, mlp", "capacity"),
        *("no recompute", "in every second layer"),
    ],
)
def test_kept_activations_of_experts_are_what_the_traced_step_carries(words, left_out):
    program, shape, layout = planned(f"{PP} 2 --bf16 --hidden-dropout 0 --attention-dropout 0 {words}")
    step = program.train_step().trace(program.abstract_state(), program.abstract_batch(), program.dropout_key())
    carried = carried_bytes(step.jaxpr)["residuals"]
    kept = costs.chunks_kept(layout) * memory.chunk_activation_bytes(shape, layout)
    assert kept <= carried <= kept / (1 - left_out)


def test_full_recompute_keeps_the_input_of_each_unit_of_equal_layers():
    pattern = (False, True, True, True, False, True, True, True)
    experts = formulas.ExpertShape(8, 2, 1024, 6, pattern=pattern)
    shape = dataclasses.replace(GPT_70B, num_layers=8, experts=experts)
    layout = Layout(pp=2, recompute="full", recompute_num_layers=2)
    # of 1 + 3 layers: one unit of 1, one of 2, one of 1
    assert memory.chunk_activation_bytes(shape, layout) == 3 * 2 * 4096 * 8192
    block = dataclasses.replace(layout, recompute_method="block")
    plain = memory.activation_bytes(shape, Layout(), experts=True)
    assert memory.chunk_activation_bytes(shape, block) == 2 * 2 * 4096 * 8192 + 2 * plain


def test_buffers_of_experts_have_the_bounds_of_the_moe_readme():
    experts = formulas.ExpertShape(8, 2, 14336, 32)
    mixtral = formulas.GPTShape(
        32, 4096, 14336, 32, 8, 128, 32000, 4096, gated=True, biases=False, norm="rmsnorm", tied=False, experts=experts
    )
    rows = lambda layout, **changes: costs.expert_rows(  # noqa: E731
        dataclasses.replace(mixtral, experts=dataclasses.replace(experts, **changes)), layout
    )
    # ep T min(k, E / ep), F T k, and ep E / ep of the capacity ceil(T k / E x factor); T tokens of a tp rank
    assert rows(Layout(ep=8)).received == 8 * 4096
    assert rows(Layout(ep=4)).received == 4 * 4096 * 2
    assert rows(Layout(ep=8), bound_factor=2.0).received == 2 * 4096 * 2
    assert rows(Layout(ep=8), capacity_factor=1.5).received == 8 * 1536
    assert rows(Layout(), bound_factor=2.0).received == rows(Layout()).sent == 4096 * 2
    divided = rows(Layout(ep=8, tp=2))
    assert (divided.tokens, divided.received, divided.joined) == (2048, 8 * 2048, 8 * 4096)
    assert rows(Layout(ep=8, tp=2, experts_over_tp=False)).joined == 8 * 2048
    # all tokens of all sources for one expert, one expert a rank
    assert rows(Layout(ep=8)).places == 8 * 4096


# ---- pipeline -------------------------------------------------------------------------------------------------------


def tables():
    for p in range(1, 6):
        for m in (1, 2, 3, 4, 5, 7, 8, 10, 16):
            for name, v in (("1f1b", 1), ("gpipe", 1), ("1f1b-low-memory", 1), ("interleaved", 2), ("interleaved", 3)):
                if v == 1 or p > 1:
                    yield p, m, v, name, None
                if v > 1 and 1 < p < m:
                    yield p, m, v, name, m


def test_chunks_in_flight_and_kept_are_those_of_every_schedules_table():
    for p, m, v, name, group in tables():
        schedule = build_schedule(name, p, m, v, group_size=group)
        layout = Layout(pp=p, num_microbatches=m, num_chunks=v, schedule=name, group_size=group)
        found = [costs.chunks_in_flight(layout, stage) for stage in range(p)]
        assert found == in_flight(schedule).tolist(), layout
        assert costs.chunks_kept(layout) == rings(schedule).residuals.size, layout


@pytest.mark.parametrize("backward", [2.0, 3.0])
def test_the_bubble_is_that_of_every_simulated_schedule(backward):
    for p, m, v, name, group in tables():
        simulation = simulate(build_schedule(name, p, m, v, group_size=group), 1.0, backward)
        layout = Layout(pp=p, num_microbatches=m, num_chunks=v, schedule=name, group_size=group)
        assert costs.bubble(layout, 1.0, backward) == pytest.approx(simulation.bubble, abs=1e-12), layout
        assert costs.bubble_of_total(layout, 1.0, backward) == pytest.approx(simulation.bubble_of_total, abs=1e-12)
        if name != "1f1b-low-memory":
            assert costs.slots(layout) == simulation.num_forward_slots


def test_the_bubble_of_70b_is_3_of_64_and_with_four_chunks_3_of_256():
    assert costs.bubble(ON_512) == 3 / 64 == pytest.approx(0.047, abs=5e-4)
    assert costs.bubble_of_total(ON_512) == pytest.approx(3 / 67)
    chunks = dataclasses.replace(ON_512, num_chunks=4)
    assert costs.bubble(chunks) == 3 / 256 == pytest.approx(0.012, abs=5e-4)
    assert costs.chunks_in_flight(chunks) == 2 * 3 + 3 * 4 + 1


# ---- misuse ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=3), "num_attention_heads 64 cannot be divided over 3"),
        (Layout(tp=64, pp=7), "rows of the vocabulary 128000 cannot be divided over 448"),
        (Layout(pp=64), "80 layers on 64 stages"),
        (Layout(pp=2, chunk_lengths=((40,), (30,))), "expected 80 layers"),
    ],
)
def test_a_model_that_cannot_be_divided_so_is_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        memory.memory_of_step(GPT_70B, dataclasses.replace(layout, num_microbatches=4))


@pytest.mark.parametrize("options", [{"recompute": "some"}, {"cp_comm_type": "ring"}])
def test_unknown_words_are_refused(options):
    with pytest.raises(ValueError, match="expected"):
        Layout(**options)
