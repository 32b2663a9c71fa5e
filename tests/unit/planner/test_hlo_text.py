"""The parser of HLO text: shapes, operands, attributes, computations, and refusal of what it does not understand."""

import pytest

from jmegatron.planner.hlo_text import (
    ArrayShape,
    bits_of,
    leaves,
    parse_instruction,
    parse_module,
    parse_shape,
    shape_bytes,
    split_top_level,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f32[]", ArrayShape("f32", ())),
        ("bf16[4,64]{1,0}", ArrayShape("bf16", (4, 64))),
        ("f32[8,128]{1,0:T(8,128)(2,1)S(5)}", ArrayShape("f32", (8, 128))),
        ("s32[<=8,2]", ArrayShape("s32", (8, 2))),
        (
            "(f32[2], /*index=1*/(pred[], u8[0]{0}))",
            (ArrayShape("f32", (2,)), (ArrayShape("pred", ()), ArrayShape("u8", (0,)))),
        ),
        ("()", ()),
    ],
)
def test_shapes_are_read(text, expected):
    assert parse_shape(text) == expected


def test_bytes_follow_the_element_type():
    assert shape_bytes(parse_shape("bf16[3,5]")) == 30
    assert shape_bytes(parse_shape("(f32[4], pred[4], s4[3], token[])")) == 16 + 4 + 2
    assert bits_of("f8e4m3fn") == 8
    assert [leaf.dtype for leaf in leaves(parse_shape("(f32[], (s8[], c64[]))"))] == ["f32", "s8", "c64"]


@pytest.mark.parametrize("text", ["", "what", "[3]"])
def test_a_text_that_is_no_shape_is_refused(text):
    with pytest.raises(ValueError, match="expected a shape"):
        parse_shape(text)


def test_commas_inside_brackets_and_quotes_do_not_split():
    assert split_top_level('a={0,1}, b="x,\\"y,{", c=f(1, 2)') == ["a={0,1}", 'b="x,\\"y,{"', "c=f(1, 2)"]


def test_an_instruction_has_name_shape_operands_and_attributes():
    line = (
        "  ROOT %all-reduce.1 = (f32[4]{0}, f32[]) all-reduce(%a.1, /*index=1*/f32[] %b), channel_id=3, "
        "replica_groups=mesh['dp'=2,'tp'=4] {'dp'}, use_global_device_ids=true, to_apply=%sum, "
        'metadata={op_name="jit(f)/psum[x=1, y={}]" stack_frame_id=2}, backend_config={"a":{"n":"4"},"b":[]}'
    )
    read = parse_instruction(line)
    assert (read.name, read.opcode, read.operands, read.is_root) == ("all-reduce.1", "all-reduce", ("a.1", "b"), True)
    assert read.attributes["replica_groups"] == "mesh['dp'=2,'tp'=4] {'dp'}"
    assert read.op_name == "jit(f)/psum[x=1, y={}]"
    assert read.backend_config == {"a": {"n": "4"}, "b": []}
    assert read.called("to_apply") == ("sum",)


def test_a_backend_config_that_is_no_json_object_is_empty():
    assert parse_instruction('  %x = f32[] custom-call(), backend_config="binary \\" stuff"').backend_config == {}
    assert parse_instruction("  %x = f32[] custom-call(), backend_config={not json}").backend_config == {}
    assert parse_instruction('  %x = f32[] custom-call(), backend_config="{\\"n\\": 1}"').backend_config == {"n": 1}


def test_constants_and_parameters_have_no_operands():
    assert parse_instruction("  %c = s32[2,2]{1,0} constant({ { 1, 2 }, { 3, 4 } })").operands == ()
    assert parse_instruction("  p = f32[2] parameter(0), sharding={replicated}").argument_text == "0"


MODULE = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[2]{0})->f32[2]{0}}, num_partitions=8

FileNames
1 "somewhere.py"

%double (p.1: f32[2]) -> f32[2] {
  %p.1 = f32[2]{0} parameter(0)
  ROOT %add = f32[2]{0} add(%p.1, %p.1)
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %f = f32[2]{0} fusion(%x), kind=kLoop, calls=%double

  ROOT %g = f32[2]{0} negate(%f)
}, execution_thread="main"
"""


def test_a_module_has_computations_and_one_entry():
    module = parse_module(MODULE)
    assert module.name == "jit_f"
    assert module.num_devices == 8
    assert list(module.computations) == ["double", "main"]
    assert module.entry.root.name == "g"
    assert module.computation("double").parameters[0].name == "p.1"


def test_names_without_percent_signs_are_read_too():
    module = parse_module(MODULE.replace("%", ""))
    assert module.entry.by_name["f"].called("calls") == ("double",)


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        ("not HLO at all", "ENTRY"),
        (MODULE.replace("ROOT %g = f32[2]{0} negate(%f)", "something else"), "expected an instruction"),
        (MODULE.replace("negate(%f)", "negate"), "expected an opcode"),
        (MODULE.replace("negate(%f)", "negate(%f"), "never closed"),
    ],
)
def test_text_outside_the_grammar_is_refused_not_skipped(damaged, message):
    with pytest.raises(ValueError, match=message):
        parse_module(damaged)


def test_a_missing_computation_is_named():
    with pytest.raises(ValueError, match="'nowhere'"):
        parse_module(MODULE).computation("nowhere")
