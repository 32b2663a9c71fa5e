"""What a step sends and how long it takes, against hand-made sums and the figures for 70B on 512 GPUs."""

import dataclasses

import pytest

from jmegatron.planner import costs, formulas, times
from jmegatron.planner.cards import CARDS
from jmegatron.planner.costs import Layout
from jmegatron.planner.formulas import ExpertShape, GPTShape

H100 = CARDS["h100"]
GPT_70B = GPTShape(80, 8192, 4 * 8192, 64, 64, 128, vocab_rows=51200, seq_len=4096, num_positions=4096)
ON_512 = Layout(
    tp=8,
    pp=4,
    dp=16,
    num_chunks=4,
    num_microbatches=64,
    sequence_parallel=True,
    distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    recompute="selective",
)
SMALL = GPTShape(4, 64, 256, 4, 2, 16, vocab_rows=512, seq_len=128, gated=True, biases=False, norm="rmsnorm")
B = 2 * 128 * 64
"""Bytes of one micro-batch's activation of SMALL, in half precision."""


def sent(shape, layout):
    """{(axis, kind, what): (executions, bytes)} of a step."""
    return {(t.axis, t.kind, t.what): (t.executions, t.bytes) for t in times.communication(shape, layout)}


# ---- where the bytes go ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sequence_parallel", "factor"), [(False, 2), (True, 1)])
def test_tp_sends_four_reductions_a_layer_and_microbatch_and_the_same_bytes_with_sequence_parallelism(
    sequence_parallel, factor
):
    layout = Layout(tp=2, num_microbatches=3, sequence_parallel=sequence_parallel)
    found = sent(SMALL, layout)
    layers = [value for (axis, _, what), value in found.items() if axis == "tp" and "layers" in what]
    assert sum(count for count, _ in layers) == 4 * 4 * 3 * (2 / factor)
    assert sum(size for _, size in layers) == 4 * 4 * 3 * B  # 2 (t-1)/t = 1 of B
    ends = [value for (axis, _, what), value in found.items() if axis == "tp" and "embedding" in what]
    assert sum(size for _, size in ends) == 2 * 3 * B


@pytest.mark.parametrize(
    ("options", "gathers", "scatters"),
    [
        ({}, 4, 4),
        ({"recompute": "selective"}, 6, 4),
        # All of the forward again but its last reduction; a unit of several layers runs as a whole.
        ({"recompute": "full"}, 6, 5),
        ({"recompute": "full", "recompute_num_layers": 2}, 6, 6),
        ({"recompute": "full", "recompute_method": "block", "recompute_num_layers": 2}, 5, 4.5),
    ],
)
def test_recompute_gathers_again(options, gathers, scatters):
    found = sent(SMALL, Layout(tp=2, sequence_parallel=True, **options))
    assert found["tp", "all-gather", "activations of layers"] == (4 * gathers, 4 * gathers * B / 2)
    assert found["tp", "reduce-scatter", "activations of layers"] == (4 * scatters, 4 * scatters * B / 2)


def test_a_ring_sends_keys_and_values_twice_and_their_gradients_in_fp32_once():
    found = sent(SMALL, Layout(cp=4, num_microbatches=3))
    key_values = 2 * 2 * (128 / 4) * 2 * 16  # both, two bytes, tokens, kv heads, width
    hops = 4 * 3 * 3
    assert found["cp", "permute", "keys and values"] == (2 * hops, 2 * hops * key_values)
    assert found["cp", "permute", "gradients of keys and values"] == (hops, hops * 2 * key_values)
    again = sent(SMALL, Layout(cp=4, num_microbatches=3, recompute="full"))
    assert again["cp", "permute", "keys and values"][0] == 3 * hops


def test_gathering_and_exchanging_heads_send_what_their_readme_says():
    key_values, query = 2 * 2 * 32 * 32, 2 * 32 * 64
    gathered = sent(SMALL, Layout(cp=4, cp_comm_type="all_gather"))
    assert gathered["cp", "all-gather", "keys and values"] == (8, 8 * 3 * key_values)
    assert gathered["cp", "reduce-scatter", "gradients of keys and values"] == (4, 4 * 3 * 2 * key_values)
    exchanged = sent(SMALL, Layout(cp=2, cp_comm_type="a2a"))
    assert exchanged["cp", "all-to-all", "queries, keys, values"] == (8, 8 * (2 * query + 2 * key_values) / 2)
    assert exchanged["cp", "all-to-all", "output of attention"] == (8, 8 * 2 * query / 2)


def test_stages_send_once_a_chunk_and_direction_and_reduce_four_activations_a_microbatch():
    found = sent(SMALL, Layout(pp=2, tp=2, num_chunks=2, num_microbatches=6, sequence_parallel=True))
    assert found["pp", "permute", "activations"] == (12, 12 * B / 2)
    assert found["pp", "permute", "gradients of activations"] == (12, 12 * B / 2)
    reductions = [value for (axis, kind, _), value in found.items() if (axis, kind) == ("pp", "all-reduce")]
    assert sum(count for count, _ in reductions) == 4 * 6
    assert sum(size for _, size in reductions) == 4 * 6 * B / 2


def test_data_ranks_send_their_gradients_and_parameters_once_a_step_whatever_the_microbatches():
    for microbatches in (1, 8):
        plain = Layout(dp=2, cp=2, tp=2, num_microbatches=microbatches)
        held = costs.parameters_of_rank(SMALL, plain).held
        assert sent(SMALL, plain)["data", "all-reduce", "gradients"] == (1, 2 * 3 / 4 * 4 * held)
        sharded = sent(SMALL, dataclasses.replace(plain, distributed_optimizer=True))
        assert sharded["data", "reduce-scatter", "gradients"] == (1, 3 / 4 * 4 * held)
        assert sharded["data", "all-gather", "parameters"] == (1, 3 / 4 * 2 * held)


def test_one_device_sends_nothing():
    assert times.communication(SMALL, Layout(num_microbatches=4), H100) == ()


# ---- which link -----------------------------------------------------------------------------------------------------


def test_an_axis_stays_in_its_node_while_stride_times_size_does():
    groups = times.groups(Layout(tp=2, cp=4, dp=4, pp=2))
    inside = {axis: group.within_node for axis, group in groups.items()}
    assert inside == {
        "tp": True, "cp": True, "ep": True, "dp": False, "pp": False, "data": False, "expert data": False
    }  # fmt: skip
    assert times.groups(Layout(tp=4, cp=4))["cp"].within_node is False
    assert times.groups(Layout(tp=4, cp=4, gpus_per_node=16))["cp"].within_node
    # Three does not divide eight: some groups lie across two nodes.
    assert times.groups(Layout(tp=3, dp=8))["tp"].within_node is False


def test_a_group_uses_as_many_network_cards_as_it_has_members_in_a_node():
    network = times.LINK_SHARE * H100.network_bytes_per_s
    groups = times.groups(Layout(tp=2, dp=64))
    assert groups["dp"].members_per_node == 4
    assert groups["dp"].bytes_per_s(H100, "all-reduce") == 4 * network
    assert groups["dp"].bytes_per_s(H100, "permute") == network
    assert times.groups(Layout(tp=8, dp=64))["dp"].bytes_per_s(H100, "all-reduce") == network
    assert times.groups(Layout(tp=8))["tp"].bytes_per_s(H100, "all-reduce") == times.LINK_SHARE * 450e9


# ---- time -----------------------------------------------------------------------------------------------------------


def test_70b_takes_1_76e18_flop_by_6nd_and_8_6_s_at_400_tflops():
    flop = formulas.flops_6nd(70e9, 1024 * 4096)
    assert flop == pytest.approx(1.76e18, rel=0.002)
    assert flop / (512 * 400e12) == pytest.approx(8.6, abs=0.05)


def test_at_a_given_rate_the_products_take_their_flops_over_it_and_nothing_else_is_added_for_memory():
    layout = dataclasses.replace(ON_512, recompute=None)
    found = times.step_time(GPT_70B, layout, H100, assumed_tflops=400.0)
    tokens = 1024 * 4096
    executed = formulas.executed_flops_per_step(GPT_70B, tokens, causal_skip=True, scores_again=True)
    # Positions and norms are no products, and no stage has idle slots in this part.
    assert found.matmul == pytest.approx(executed / (512 * 400e12), rel=1e-12)
    assert found.memory_bound == 0
    assert found.model_flops == formulas.model_flops_per_step(GPT_70B, tokens, causal_skip=True)
    assert found.tokens == tokens
    assert found.tokens_per_s == tokens / found.total
    assert found.days(15e12) == pytest.approx(15e12 / tokens * found.total / 86400)
    assert found.mfu == pytest.approx(found.tflops_per_device * 1e12 / H100.peak_bf16_flops)


def test_full_recompute_costs_a_third_of_the_layers_products():
    plain, full = (
        times.step_time(GPT_70B, dataclasses.replace(ON_512, recompute=how), H100, 400.0) for how in (None, "full")
    )
    rows = 3 * 2 * GPT_70B.vocab_rows * GPT_70B.hidden_size * 1024 * 4096 / (512 * 400e12)
    attention = formulas.attention_flops_per_token(GPT_70B, causal_skip=True) * 1024 * 4096 / (512 * 400e12)
    assert full.matmul - plain.matmul == pytest.approx((plain.matmul - rows - attention / 2) / 3)


def test_idle_slots_cost_what_full_ones_do():
    for chunks, part in ((1, 3 / 64), (4, 3 / 256)):
        found = times.step_time(GPT_70B, dataclasses.replace(ON_512, num_chunks=chunks), H100, 400.0)
        # Embedding and output layer have no idle slots.
        in_slots = found.bubble / part
        assert 0.9 * (found.matmul + found.tp) < in_slots < found.matmul + found.tp


def test_overlap_hides_what_layers_have_time_for_and_no_more():
    exposed = {
        flags: times.step_time(
            GPT_70B,
            dataclasses.replace(ON_512, overlap_grad_reduce=flags >= 1, overlap_param_gather=flags >= 2),
            H100,
        ).data
        for flags in (0, 1, 2)
    }
    traffic = {t.what: t.seconds for t in times.communication(GPT_70B, ON_512, H100) if t.axis == "data"}
    assert exposed[0] == pytest.approx(sum(traffic.values()))
    assert exposed[0] > exposed[1] > exposed[2] > 0


@pytest.mark.parametrize("comm_type", ["p2p", "a2a"])
def test_attention_hides_a_ring_at_long_sequences_and_never_an_exchange(comm_type):
    # Eight ranks of a node, 16384 tokens each.
    shape = dataclasses.replace(GPT_70B, seq_len=131072, num_positions=0, num_query_groups=8)
    found = times.step_time(shape, Layout(cp=8, cp_comm_type=comm_type), H100)
    assert (found.cp == 0) == (comm_type == "p2p")
    short = dataclasses.replace(shape, seq_len=4096)
    assert times.step_time(short, Layout(cp=8, dp=1, tp=8, cp_comm_type=comm_type), H100).cp > 0


def test_parts_add_up_and_a_faster_card_is_faster():
    h100, b200 = (times.step_time(GPT_70B, ON_512, CARDS[name]) for name in ("h100", "b200"))
    parts = ("matmul", "memory_bound", "tp", "cp", "pp", "data", "bubble")
    assert h100.total == pytest.approx(sum(getattr(h100, part) for part in parts))
    assert b200.total < h100.total
    assert 0.3 < h100.mfu < times.MATMUL_SHARE


# ---- experts --------------------------------------------------------------------------------------------------------

EXPERTS = ExpertShape(8, 2, 1024, 4)
MIXTURE = GPTShape(4, 1024, 4096, 8, 8, 128, vocab_rows=8192, seq_len=2048, biases=False, experts=EXPERTS)


@pytest.mark.parametrize(("recompute", "times_sent"), [(None, 4), ("selective", 4), ("full", 6)])
def test_rows_of_experts_go_and_come_forward_and_backward_and_again_with_full_recompute(recompute, times_sent):
    found = sent(MIXTURE, Layout(ep=4, num_microbatches=3, recompute=recompute))
    rows = 2048 * 2 * 1024 * 2
    assert found["ep", "ragged-all-to-all", "rows of experts"][1] == times_sent * 4 * 3 * rows * 3 / 4


def test_gradients_of_experts_are_reduced_over_dp_and_cp_and_all_others_over_ep_as_well():
    layout = Layout(dp=2, ep=4, distributed_optimizer=True)
    found = sent(MIXTURE, layout)
    experts = 4 * 2 * 2 * 1024 * 1024
    rest = costs.parameters_of_rank(MIXTURE, layout).held - experts
    assert found["expert data", "reduce-scatter", "gradients of experts"][1] == 4 * experts / 2
    assert found["data", "reduce-scatter", "gradients"][1] == 4 * rest * 7 / 8
    assert not any(axis == "expert data" for axis, _, _ in sent(MIXTURE, Layout(ep=4)))


def test_tp_carries_buffers_of_rows_only_where_it_divides_experts():
    layout = Layout(tp=2, ep=2, sequence_parallel=True, recompute="selective")
    joined = 2 * (2 * 1024 * 2) * 1024 * 2  # of two tp ranks: all tokens of both ep ranks, two experts each
    found = sent(MIXTURE, layout)
    assert found["tp", "all-gather", "rows of experts"][1] == 3 * 4 * joined / 2
    assert found["tp", "reduce-scatter", "rows of experts"][1] == 2 * 4 * joined / 2
    whole = sent(MIXTURE, dataclasses.replace(layout, experts_over_tp=False))
    assert not any(what == "rows of experts" for axis, _, what in whole if axis == "tp")


def test_time_of_experts_is_that_of_the_rows_of_an_even_load_and_all_of_the_exchange_is_exposed():
    layout = Layout(ep=4, num_microbatches=3)
    found = times.step_time(MIXTURE, layout, H100)
    assert found.ep > 0
    assert found.exposed >= found.ep
    # As many products for a token, but for the router.
    dense = dataclasses.replace(MIXTURE, experts=None, ffn_hidden_size=2 * 1024)
    router = 3 * 4 * 2 * 1024 * 8 * 2048 * 3 / (times.MATMUL_SHARE * H100.peak_bf16_flops)
    assert found.matmul == pytest.approx(times.step_time(dense, layout, H100).matmul + router, rel=1e-9)
    # The first of two products of the two experts again: 1/2 of a forward of them.
    mlp = dataclasses.replace(layout, recompute="selective", recompute_modules=("core_attn", "mlp"))
    again = 3 * 4 * 2 * 1024 * 2 * 1024 * 2048 / (times.MATMUL_SHARE * H100.peak_bf16_flops)
    assert times.step_time(MIXTURE, mlp, H100).matmul == pytest.approx(found.matmul + again, rel=1e-9)
    padded = dataclasses.replace(
        MIXTURE, experts=dataclasses.replace(EXPERTS, capacity_factor=1.5, pad_to_capacity=True)
    )
    assert times.step_time(padded, layout, H100).matmul > found.matmul
