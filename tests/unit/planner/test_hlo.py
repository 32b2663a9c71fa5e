"""Analysis of small HLO texts, as the GPU and CPU back ends print them, with counts known by hand."""

import pytest

from jmegatron.planner import hlo

MESH = {"pp": 1, "dp": 2, "ep": 1, "cp": 1, "tp": 4}
SUM = """%sum (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %s = bf16[] add(%a, %b)
}
"""


def module(entry, *computations, devices=8):
    header = f"HloModule jit_step, is_scheduled=true, num_partitions={devices}\n\n"
    body = "\n".join("  " + line for line in entry.strip().splitlines())
    return hlo.load(header + "\n".join((SUM, *computations)) + f"\nENTRY %main () -> f32[] {{\n{body}\n}}\n")


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


def flops_of(line, operands="%l = bf16[3,5,7]{2,1,0} parameter(0)\n%r = bf16[3,7,11]{2,1,0} parameter(1)"):
    return hlo.matmul_flops(module(f"{operands}\n{line}"))


BATCHED = (
    'lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}, metadata={op_name="x"}'
)
GEMM = (
    '"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],'
    '"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}'
)


@pytest.mark.parametrize(
    "line",
    [
        f"ROOT %d = f32[3,5,11]{{2,1,0}} dot(%l, %r), {BATCHED}",
        f"ROOT %d = f32[3,5,11]{{2,1,0}} dot(bf16[3,5,7]{{2,1,0}} %l, bf16[3,7,11]{{2,1,0}} %r), {BATCHED}",
        'ROOT %d = (bf16[3,5,11]{2,1,0}, s8[64]{0}) custom-call(%l, %r), custom_call_target="__cublas$lt$matmul", '
        f"backend_config={{{GEMM}}}",
        'ROOT %d = (bf16[3,5,11]{2,1,0}, s8[64]{0}) custom-call(%l, %r), custom_call_target="__cublas$gemm", '
        f"backend_config={{{GEMM}}}",
        'ROOT %d = bf16[3,5,11]{2,1,0} custom-call(%l, %r), custom_call_target="__onednn$matmul", '
        'backend_config={"onednn_matmul_config":{"transpose_a":false}}',
    ],
)
def test_every_spelling_of_a_batched_matmul_counts_the_same(line):
    assert flops_of(line) == hlo.MatmulFlops(dot=2 * 3 * 5 * 7 * 11)


def test_a_transposed_onednn_matmul_sums_over_the_other_dim():
    line = (
        'ROOT %d = bf16[3,7,11]{2,1,0} custom-call(%l, %r), custom_call_target="__onednn$matmul", '
        'backend_config={"onednn_matmul_config":{"transpose_a":true}}'
    )
    assert flops_of(line, "%l = bf16[3,5,7] parameter(0)\n%r = bf16[3,5,11] parameter(1)").dot == 2 * 3 * 5 * 7 * 11


def test_a_gemm_call_that_does_not_say_its_dims_is_refused():
    with pytest.raises(ValueError, match="does not say what it sums over"):
        flops_of('ROOT %d = bf16[3,5,11] custom-call(%l, %r), custom_call_target="__cublas$gemm", backend_config={}')


FUSED = """%gemm (p0: bf16[4,8], p1: bf16[8,2]) -> f32[4,2] {
  %p0 = bf16[4,8]{1,0} parameter(0)
  %p1 = bf16[8,2]{1,0} parameter(1)
  ROOT %dot = f32[4,2]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
FUSED_OPERANDS = "%l = bf16[4,8]{1,0} parameter(0)\n%r = bf16[8,2]{1,0} parameter(1)\n"


@pytest.mark.parametrize(
    "line",
    [
        "ROOT %f = f32[4,2] fusion(%l, %r), kind=kCustom, calls=%gemm",
        "ROOT %f = f32[4,2] call(%l, %r), to_apply=%gemm",
        "%s = ((bf16[4,8], bf16[8,2]), f32[4,2]) async-start(%l, %r), calls=%gemm\n"
        "ROOT %f = f32[4,2] async-done(%s), calls=%gemm",
        "%s = ((bf16[4,8], bf16[8,2]), f32[4,2]) fusion-start(%l, %r), kind=kLoop, calls=%gemm\n"
        "ROOT %f = f32[4,2] fusion-done(%s)",
    ],
)
def test_a_dot_is_found_in_whatever_calls_it_and_counted_once(line):
    assert hlo.matmul_flops(module(FUSED_OPERANDS + line, FUSED)).dot == 2 * 4 * 8 * 2


def test_two_calls_of_one_computation_count_twice():
    text = FUSED_OPERANDS + "%f = f32[4,2] fusion(%l, %r), calls=%gemm\nROOT %g = f32[4,2] fusion(%l, %r), calls=%gemm"
    assert hlo.matmul_flops(module(text, FUSED)).dot == 2 * 2 * 4 * 8 * 2


def attention(target, mask):
    config = (
        '{"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"dimensions": ["2", "8", "512", "256"]}, '
        f'"mask_type": "{mask}"}}}}'
    )
    return flops_of(
        f'ROOT %d = (bf16[2,8,512,128], u8[0]) custom-call(%q, %k, %k), custom_call_target="{target}", '
        f"backend_config={config}",
        "%q = bf16[2,512,8,128] parameter(0)\n%k = bf16[2,256,2,128] parameter(1)",
    )


def test_cudnn_attention_is_counted_apart_from_its_shapes():
    rectangle = 2 * 2 * 8 * 512 * 256 * 128
    assert attention("__cudnn$fmhaSoftmax", "NO_MASK") == hlo.MatmulFlops(0, 2 * rectangle, 2 * rectangle)
    assert attention("__cudnn$fmhaSoftmax", "CAUSAL") == hlo.MatmulFlops(0, 2 * rectangle, rectangle)
    backward = attention("__cudnn$fmhaSoftmaxBackward", "PADDING_CAUSAL")
    assert (backward.total, backward.attention_visible) == (4 * rectangle, 2 * rectangle)


@pytest.mark.parametrize(
    "line",
    [
        "ROOT %odd = f32[3,5,11] convolution(%l, %r), window={size=1}, dim_labels=b0f_0io->b0f",
        'ROOT %odd = f32[3,5,11] custom-call(%l, %r), custom_call_target="__cudnn$convForward"',
        'ROOT %odd = f32[3,5,11] custom-call(%l, %r), custom_call_target="mosaic_gpu_v2"',
        "ROOT %odd = f32[3,5,11] ragged-dot(%l, %r), lhs_contracting_dims={2}",
    ],
)
def test_what_multiplies_without_saying_how_much_is_flagged(line):
    assert flops_of(line) == hlo.MatmulFlops(uncounted=("odd",))


BRANCHES = """%twice (x: bf16[4,4]) -> bf16[4,4] {
  %x = bf16[4,4]{1,0} parameter(0)
  %y = bf16[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %m = bf16[4,4]{1,0} all-reduce(%y), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum
  ROOT %z = bf16[4,4]{1,0} dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%nothing (x.1: bf16[4,4]) -> bf16[4,4] {
  ROOT %x.1 = bf16[4,4]{1,0} parameter(0)
}
"""


@pytest.mark.parametrize(
    "attribute",
    ["branch_computations={%nothing, %twice}", "true_computation=%nothing, false_computation=%twice"],
)
def test_a_conditional_counts_its_largest_branch_and_lists_all(attribute):
    operands = "%a = bf16[4,4] parameter(0)\n%p = pred[] parameter(1)\n"
    read = module(f"{operands}ROOT %c = bf16[4,4] conditional(%p, %a, %a), {attribute}", BRANCHES)
    assert hlo.matmul_flops(read) == hlo.MatmulFlops(dot=256, branches={"c": (0, 256)})
    (record,) = hlo.collectives(read, MESH)
    assert (record.site.branches, record.executions) == (("c[1]",), 1)


# ---- loops ----------------------------------------------------------------------------------------------------------

NESTED = """%inner_test (s1: bf16[4,4]) -> pred[] {
  %s1 = bf16[4,4]{1,0} parameter(0)
  ROOT %go1 = pred[] custom-call(), custom_call_target="ask"
}

%inner (s2: bf16[4,4]) -> bf16[4,4] {
  %s2 = bf16[4,4]{1,0} parameter(0)
  %d = bf16[4,4]{1,0} dot(%s2, %s2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %ar = bf16[4,4]{1,0} all-reduce(%d), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%sum
}

%outer (s3: bf16[4,4]) -> bf16[4,4] {
  %s3 = bf16[4,4]{1,0} parameter(0)
  ROOT %w2 = bf16[4,4]{1,0} while(%s3), condition=%inner_test, body=%innerINNER
}
"""


def nested(inner='{"known_trip_count":{"n":"5"}}', outer='{"known_trip_count":{"n":"3"}}'):
    config = {key: f", backend_config={value}" if value else "" for key, value in {"i": inner, "o": outer}.items()}
    entry = (
        f"%x = bf16[4,4] parameter(0)\nROOT %w1 = bf16[4,4] while(%x), condition=%inner_test, body=%outer{config['o']}"
    )
    return module(entry, NESTED.replace("INNER", config["i"]))


def test_nested_loops_multiply():
    read = nested()
    assert [(each.name, each.trip_count, each.depth, each.site.executions) for each in hlo.loops(read)] == [
        ("w1", 3, 0, 1),
        ("w2", 5, 1, 3),
    ]
    assert hlo.matmul_flops(read).dot == 3 * 5 * 2 * 4**3
    (record,) = hlo.collectives(read, MESH)
    assert (record.executions, record.site.loops, record.axes) == (15, ("w1", "w2"), ("tp",))


@pytest.mark.parametrize("unknown", ["inner", "outer"])
def test_an_unknown_trip_count_is_reported_never_taken_as_one(unknown):
    read = nested(**{unknown: ""})
    name = {"outer": "w1", "inner": "w2"}[unknown]
    assert {each.name: each.trip_count for each in hlo.loops(read)}[name] is None
    with pytest.raises(hlo.UnknownTripCountError, match=f"'{name}'"):
        hlo.matmul_flops(read)
    records = hlo.collectives(read, MESH)
    assert records[0].executions is None
    with pytest.raises(hlo.UnknownTripCountError):
        hlo.summary(records)
    given = {name: {"outer": 3, "inner": 5}[unknown]}
    assert hlo.matmul_flops(read, given).dot == 3 * 5 * 2 * 4**3
    assert hlo.collectives(read, MESH, given)[0].executions == 15


def test_an_unknown_loop_without_matmuls_does_not_matter_for_flops():
    body = "%idle (s: bf16[4,4]) -> bf16[4,4] {\n  ROOT %s = bf16[4,4]{1,0} parameter(0)\n}\n"
    entry = "%x = bf16[4,4] parameter(0)\nROOT %w = bf16[4,4] while(%x), condition=%inner_test, body=%idle"
    assert hlo.matmul_flops(module(entry, NESTED.replace("INNER", ""), body)).total == 0


# ---- collectives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "kind", "operand", "result", "wire"),
    [
        ("all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%sum", "all-reduce", 64, 64, 2 * 3 / 4 * 64),
        ("all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}", "all-gather", 64, 256, 3 / 4 * 256),
        ("reduce-scatter(%x), replica_groups=[2,4]<=[8], to_apply=%sum", "reduce-scatter", 64, 16, 3 / 4 * 64),
        ("all-to-all(%x), replica_groups=[2,4]<=[8]", "all-to-all", 64, 64, 3 / 4 * 64),
        ("collective-permute(%x), source_target_pairs={{0,1},{1,0}}", "collective-permute", 64, 64, 64),
        ("collective-permute(%x), source_target_pairs={{0,0},{1,1}}", "collective-permute", 64, 64, 0),
        ("all-reduce(%x), replica_groups=[8,1]<=[8], to_apply=%sum", "all-reduce", 64, 64, 0),
    ],
)
def test_bytes_on_the_wire_follow_the_ring_formulas(line, kind, operand, result, wire):
    elements = result // 2
    read = module(f"%x = bf16[32] parameter(0)\nROOT %c = bf16[{elements}] {line}")
    (record,) = hlo.collectives(read, MESH)
    assert (record.kind, record.dtype, record.is_async) == (kind, "bf16", False)
    assert (record.operand_bytes, record.result_bytes, record.wire_bytes) == (operand, result, wire)


def test_a_combined_collective_counts_its_arrays():
    operands = "%x = bf16[32] parameter(0)\n%y = f32[8] parameter(1)\n"
    attributes = "channel_id=7, replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%sum"
    read = module(f"{operands}ROOT %c = (bf16[32], f32[8]) all-reduce(%x, %y), {attributes}")
    (record,) = hlo.collectives(read, MESH)
    assert (record.operand_count, record.operand_bytes, record.result_bytes) == (2, 96, 96)
    assert (record.channel_id, record.use_global_device_ids, record.group_size) == (7, True, 4)


def test_arrays_concatenated_by_the_combiner_are_counted():
    joined = """%joined (c0: bf16[8], c1: bf16[24]) -> bf16[32] {
  %c0 = bf16[8]{0} parameter(0)
  %c1 = bf16[24]{0} parameter(1)
  ROOT %cat = bf16[32]{0} concatenate(%c0, %c1), dimensions={0}
}
"""
    entry = """
%x = bf16[8] parameter(0)
%y = bf16[24] parameter(1)
%wrapped_concatenate = bf16[32] fusion(%x, %y), kind=kLoop, calls=%joined
ROOT %c = bf16[32] all-reduce(%wrapped_concatenate), replica_groups=[2,4]<=[8], to_apply=%sum
"""
    assert hlo.collectives(module(entry, joined), MESH)[0].operand_count == 2


WRAPPED = """%scatter (q: bf16[64]) -> bf16[16] {
  %q = bf16[64]{0} parameter(0)
  ROOT %rs = bf16[16]{0} reduce-scatter(%q), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%sum
}
"""
SYNC = 'backend_config={"collective_backend_config":{"is_sync":true}}'
PAIRS = f"""
%x = bf16[64] parameter(0)
%l = bf16[4,8]{{1,0}} parameter(1)
%r = bf16[8,2]{{1,0}} parameter(2)
%ag-start = (bf16[64], bf16[128]) all-gather-start(%x), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={{0}}
%f = f32[4,2] fusion(%l, %r), kind=kCustom, calls=%gemm
%ag-done = bf16[128] all-gather-done(%ag-start)
%rs-start = ((bf16[64]), bf16[16]) async-start(%x), calls=%scatter
%up = ((bf16[64]), bf16[16]) async-update(%rs-start), calls=%scatter
%t = (bf16[64]) tuple(%x)
%n = bf16[64] negate(%x)
%rs-done = bf16[16] async-done(%up), calls=%scatter
%ar-start = ((bf16[64]), bf16[64]) all-reduce-start(%x), replica_groups=[1,8]<=[8], to_apply=%sum, {SYNC}
%ar-done = bf16[64] all-reduce-done(%ar-start)
%copy-start = (bf16[64], bf16[64], u32[]) copy-start(%x)
ROOT %copy-done = bf16[64] copy-done(%copy-start)
"""


def test_asynchronous_collectives_are_read_in_both_spellings():
    gather, scatter, reduce = hlo.collectives(module(PAIRS, FUSED, WRAPPED), MESH)
    assert (gather.kind, gather.is_async, gather.axes) == ("all-gather", True, ("dp",))
    assert (gather.operand_bytes, gather.result_bytes) == (128, 256)
    assert (scatter.kind, scatter.is_async, scatter.axes) == ("reduce-scatter", True, ("tp",))
    assert (scatter.operand_bytes, scatter.result_bytes) == (128, 32)
    assert (reduce.kind, reduce.is_async, reduce.axes) == ("all-reduce", False, ("dp", "tp"))


def test_a_kernel_that_carries_a_collective_is_a_pair_of_that_kind():
    entry = """
%x = bf16[64] parameter(0)
%fusion-start = ((bf16[64]), bf16[16]) fusion-start(%x), kind=kCustom, calls=%scatter
ROOT %fusion-done = bf16[16] fusion-done(%fusion-start)
"""
    read = module(entry, WRAPPED)
    (pair,) = hlo.async_pairs(read, MESH)
    assert (pair.kind, pair.start, pair.axes) == ("reduce-scatter", "fusion-start", ("tp",))
    (record,) = hlo.collectives(read, MESH)
    assert (record.is_async, record.axes, record.operand_bytes) == (True, ("tp",), 128)


def test_pairs_tell_what_stands_between_start_and_done():
    pairs = {pair.start: pair for pair in hlo.async_pairs(module(PAIRS, FUSED, WRAPPED), MESH)}
    assert list(pairs) == ["ag-start", "rs-start", "ar-start"]
    assert pairs["ag-start"].between == (hlo.Work("f", "fusion", 128),)
    assert (pairs["ag-start"].is_hidden, pairs["ag-start"].hidden_flops, pairs["ag-start"].axes) == (True, 128, ("dp",))
    assert pairs["rs-start"].between == (hlo.Work("n", "negate", 0),)
    assert (pairs["rs-start"].kind, pairs["rs-start"].is_hidden, pairs["rs-start"].axes) == (
        "reduce-scatter",
        False,
        ("tp",),
    )
    assert "copy" in [pair.kind for pair in hlo.async_pairs(module(PAIRS, FUSED, WRAPPED), kinds=None)]


def test_a_loop_of_unknown_length_between_start_and_done_counts_as_hiding():
    entry = """
%x = bf16[4,4] parameter(0)
%s = ((bf16[4,4]), bf16[4,4]) collective-permute-start(%x), source_target_pairs={{0,4}}
%w = bf16[4,4] while(%x), condition=%inner_test, body=%inner
ROOT %d2 = bf16[4,4] collective-permute-done(%s)
"""
    (pair,) = [p for p in hlo.async_pairs(module(entry, NESTED.replace("INNER", ""))) if p.start == "s"]
    assert (pair.hidden_flops, pair.is_hidden, pair.axes) == (None, True, None)


def test_a_start_that_is_never_awaited_is_refused():
    start = "ROOT %s = ((bf16[64]), bf16[64]) all-reduce-start(%x), replica_groups={}, to_apply=%sum"
    entry = f"%x = bf16[64] parameter(0)\n{start}"
    with pytest.raises(ValueError, match="started but not awaited"):
        hlo.collectives(module(entry), MESH)


def test_a_send_counts_and_a_host_transfer_does_not():
    pairs = "frontend_attributes={_xla_send_recv_source_target_pairs={{0,4},{1,5}}}"
    entry = f"""
%x = bf16[64] parameter(0)
%tok = token[] after-all()
%s = (bf16[64], u32[], token[]) send(%x, %tok), channel_id=1, {pairs}
%h = (bf16[64], u32[], token[]) send(%x, %tok), channel_id=2, is_host_transfer=true
ROOT %sd = token[] send-done(%s)
"""
    (record,) = hlo.collectives(module(entry), MESH)
    assert (record.kind, record.wire_bytes, record.axes, record.pairs) == ("send", 128, ("dp",), ((0, 4), (1, 5)))


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ValueError, match="8 devices"):
        hlo.collectives(nested(), {"tp": 4})


def test_the_summary_adds_up_per_axes_and_kind():
    entry = """
%x = bf16[32] parameter(0)
%a = bf16[32] all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%sum
%b = bf16[32] all-reduce(%a), replica_groups=[2,4]<=[8], to_apply=%sum
ROOT %c = bf16[32] all-reduce(%b), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%sum
"""
    rows = hlo.summary(hlo.collectives(module(entry), MESH))
    assert rows[("tp",), "all-reduce"] == hlo.AxisTraffic(("tp",), "all-reduce", 2, 2, 2 * 96.0)
    assert rows[("dp",), "all-reduce"] == hlo.AxisTraffic(("dp",), "all-reduce", 1, 1, 64.0)
