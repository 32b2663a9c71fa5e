"""Layer -> (stage, chunk): the reference's cuts, every layer exactly once, and refusals whose ways out work."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmegatron.errors import ConfigError
from jmegatron.pipeline.layout import PipelineLayout, even_layout, parse_layout, pipeline_layout

RECORDED = json.loads((Path(__file__).parents[2] / "golden/data/tables/layer_split.json").read_text())
KEYWORDS = {
    "--num-layers": "num_layers",
    "--pipeline-model-parallel-size": "num_stages",
    "--num-virtual-stages-per-pipeline-rank": "num_chunks",
    "--num-layers-per-virtual-pipeline-stage": "layers_per_virtual_stage",
    "--decoder-first-pipeline-num-layers": "first_stage_layers",
    "--decoder-last-pipeline-num-layers": "last_stage_layers",
    "--no-account-for-embedding-in-pipeline-split": "account_for_embedding",
    "--no-account-for-loss-in-pipeline-split": "account_for_loss",
    "--pipeline-model-parallel-layout": "layout",
}


def path(layout: PipelineLayout) -> list[int]:
    """Returns the layers in the order in which the model runs through the chunks."""
    return [
        layer
        for chunk in range(layout.num_chunks)
        for stage in range(layout.num_stages)
        for layer in layout.layers[stage][chunk]
    ]


def refusal(**options) -> str:
    """Returns the message of a split that must not fit, after checking that each way out that it names does fit."""
    with pytest.raises(ConfigError) as error:
        pipeline_layout(**options)
    text = str(error.value)
    for part in ("where: --", "got: ", "expected: ", "fix: use --"):
        assert part in text
    for way in ways_out(text):
        changed = pipeline_layout(**{**options, **way})
        assert path(changed) == list(range(changed.num_layers)), way
    return text


def ways_out(text: str) -> list[dict]:
    """Reads the alternatives of a message, each a set of keyword changes."""
    alternatives = text.split("fix: use ")[1].split(", or ")
    return [dict(map(keyword, re.findall(r"(--[a-z-]+)(?: ('[^']*'|null|\d+))?", way))) for way in alternatives]


def keyword(found: tuple[str, str]) -> tuple[str, object]:
    flag, value = found
    if not value:
        return KEYWORDS[flag], False
    if value == "null":
        return KEYWORDS[flag], None
    return KEYWORDS[flag], value.strip("'") if value.startswith("'") else int(value)


# --- the reference's cuts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RECORDED)
def test_recorded_cuts_of_the_reference(case):
    layers, stages, chunks = re.match(r"L(\d+)_pp(\d+)_vp(None|\d+)_", case).groups()
    layout = pipeline_layout(
        int(layers),
        int(stages),
        num_chunks=None if chunks == "None" else int(chunks),
        account_for_embedding="embedding_in_pipeline_split=True" in case,
        account_for_loss="loss_in_pipeline_split=True" in case,
    )
    rows = RECORDED[case]
    assert len(rows) == layout.num_stages * layout.num_chunks
    for row in rows:
        assert layout.layers[row["pp_rank"]][row["chunk"]] == tuple(row["layers"])


# Results of megatron-core 0.16.1's get_num_layers_to_build and get_transformer_layer_offset, first layer of each chunk.
@pytest.mark.parametrize(
    ("options", "starts"),
    [
        ({"num_layers": 11, "num_stages": 4, "last_stage_layers": 2}, [[0], [3], [6], [9]]),
        ({"num_layers": 10, "num_stages": 4, "first_stage_layers": 1}, [[0], [1], [4], [7]]),
        ({"num_layers": 5, "num_stages": 2, "first_stage_layers": 2, "last_stage_layers": 3}, [[0], [2]]),
        (
            {"num_layers": 14, "num_stages": 3, "num_chunks": 2, "first_stage_layers": 2},
            [[0, 7], [1, 8], [4, 11]],
        ),
        (
            {"num_layers": 16, "num_stages": 4, "num_chunks": 2, "first_stage_layers": 2, "last_stage_layers": 2},
            [[0, 8], [1, 9], [4, 12], [7, 15]],
        ),
        ({"num_layers": 11, "num_stages": 4, "account_for_embedding": True}, [[0], [2], [5], [8]]),
        (
            {"num_layers": 23, "num_stages": 4, "num_chunks": 2, "account_for_loss": True},
            [[0, 12], [3, 15], [6, 18], [9, 21]],
        ),
    ],
)
def test_uneven_cuts_of_the_reference(options, starts):
    layout = pipeline_layout(**options)
    assert [[chunk[0] for chunk in stage] for stage in layout.layers] == starts
    assert path(layout) == list(range(options["num_layers"]))


def test_layers_per_virtual_stage_is_another_word_for_the_number_of_chunks():
    assert pipeline_layout(24, 4, layers_per_virtual_stage=2) == even_layout(24, 4, 3)
    assert pipeline_layout(24, 4, layers_per_virtual_stage=6) == even_layout(24, 4)
    assert pipeline_layout(14, 4, layers_per_virtual_stage=2, account_for_embedding=True, account_for_loss=True) == (
        pipeline_layout(14, 4, num_chunks=2, account_for_embedding=True, account_for_loss=True)
    )


def test_one_stage_holds_all_layers():
    for options in ({}, {"num_chunks": 1}, {"layers_per_virtual_stage": 5}, {"first_stage_layers": 5}):
        assert pipeline_layout(5, 1, **options).layers == (((0, 1, 2, 3, 4),),)
    both = {"account_for_embedding": True, "account_for_loss": True}
    assert pipeline_layout(5, 1, **both).layers == (((0, 1, 2, 3, 4),),)


def test_a_chunk_may_hold_the_embedding_or_the_output_layer_alone():
    layout = pipeline_layout(2, 4, account_for_embedding=True, account_for_loss=True)
    assert layout.layers == (((),), ((0,),), ((1,),), ((),))
    assert layout.layers_per_chunk == 1
    assert not layout.is_even
    assert layout.places().tolist() == [[-1, 0, 1, -1]]


def test_two_uneven_stages_may_have_chunks():
    # The reference divides by its 0 middle stages here.
    layout = pipeline_layout(6, 2, num_chunks=2, first_stage_layers=2, last_stage_layers=4)
    assert layout.layers == (((0,), (3,)), ((1, 2), (4, 5)))


# --- places ------------------------------------------------------------------------------------------------------


def test_places_of_an_even_layout_are_the_layers_chunk_by_chunk():
    layout = even_layout(8, 2, 2)
    assert layout.is_even
    assert (layout.num_layers, layout.layers_per_chunk) == (8, 2)
    places = layout.places()
    assert places.dtype == np.int32
    assert places.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_places_of_an_uneven_layout_are_padded_stage_by_stage():
    layout = pipeline_layout(10, 4, last_stage_layers=1)
    assert (layout.is_even, layout.layers_per_chunk) == (False, 3)
    assert layout.places().tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, -1, -1]]
    chunks = pipeline_layout(6, 2, num_chunks=2, first_stage_layers=2, last_stage_layers=4)
    assert chunks.places().tolist() == [[0, -1, 1, 2], [3, -1, 4, 5]]


# --- layout string -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "num_layers", "num_stages", "lengths"),
    [
        ("EttL", 2, 1, [[2]]),
        ("Ett|ttL", 4, 2, [[2], [2]]),
        ("Et*3|(tt|)*2,L", 7, 4, [[3], [2], [2], [0]]),
        ("Et*3|(tt|)*2 t, t L", 9, 4, [[3], [2], [2], [2]]),
        ("E|t*4|t*4|L", 8, 4, [[0], [4], [4], [0]]),
        ("E|t|t|tL", 3, 2, [[0, 1], [1, 1]]),
        ("Et|t*2|t*3|L", 6, 2, [[1, 3], [2, 0]]),
        ("Et||tL", 2, 3, [[1], [0], [1]]),
        ("E(t*2|)*3L", 6, 4, [[2], [2], [2], [0]]),
        ("E|*3tL", 1, 4, [[0], [0], [0], [1]]),
        ("Et*0|t*2L", 2, 2, [[0], [2]]),
    ],
)
def test_layout_strings_are_read_as_the_reference_reads_them(text, num_layers, num_stages, lengths):
    layout = parse_layout(text, num_layers, num_stages)
    assert [[len(chunk) for chunk in stage] for stage in layout.layers] == lengths
    assert path(layout) == list(range(num_layers))
    assert layout.num_chunks == len(lengths[0])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("tE|t|t|tL", ["begin with the embedding"]),
        ("t|Et|t|tL", ["begin with the embedding"]),
        ("Et|Et|t|tL", ["begin with the embedding"]),
        ("t|t|t|tL", ["begin with the embedding"]),
        ("Et|t|t|Lt", ["end with the loss"]),
        ("Et|t|tL|t", ["end with the loss"]),
        ("Et|t|t|tLL", ["end with the loss"]),
        ("Et|t|t|t", ["end with the loss"]),
        ("Et|t|t|tm|L", ["multi-token prediction"]),
        ("ET|t|t|tL", ["'T'"]),
        ("Et|(tt)|tL", ["'('", "')'"]),
        ("E((t|)*2)*2L", ["'('", "')'"]),
        ("Et*x|tL", ["'*'", "'x'"]),
        ("", ["begin with the embedding"]),
        ("Et*9999999999L", ["9999999999 times"]),
        ("E" + "(t*9999999|)*9999999L", ["9999999 times"]),
        ("Ett|t|t|tL", ["5 layers of 4", "--num-layers 5"]),
        ("Et|tt|tL", ["3 entries", "4 stages", "--pipeline-model-parallel-size 3"]),
    ],
)
def test_layout_strings_that_do_not_fit_stop(text, parts):
    message = refusal(num_layers=4, num_stages=4, layout=text)
    for part in (*parts, "pipeline_model_parallel_layout"):
        assert part in message


# --- what does not fit -------------------------------------------------------------------------------------------

REFUSED = {
    "layers by stages": (
        {"num_layers": 10, "num_stages": 4},
        [
            "10 layers cannot be divided over 4 stages",
            "num_layers 10, pipeline_model_parallel_size 4",
            "--decoder-last-pipeline-num-layers 1, or --num-layers 8, or --num-layers 12",
        ],
    ),
    "fewer layers than stages": ({"num_layers": 3, "num_stages": 4}, ["3 layers", "4 stages", "--num-layers 4"]),
    "stage by chunks": (
        {"num_layers": 20, "num_stages": 4, "num_chunks": 2},
        [
            "5 layers of a stage",
            "2 chunks: 20 layers, 4 stages",
            "--decoder-last-pipeline-num-layers 2, or --num-layers 16, or --num-layers 24",
        ],
    ),
    "stage by chunk length": (
        {"num_layers": 24, "num_stages": 4, "layers_per_virtual_stage": 4},
        ["6 layers of a stage", "chunks of 4", "--num-layers-per-virtual-pipeline-stage 3"],
    ),
    "places by stages": (
        {"num_layers": 24, "num_stages": 4, "account_for_loss": True},
        ["24 layers with output layer (25 places)", "account_for_loss_in_pipeline_split true", "--num-layers 23"],
    ),
    "places by chunks": (
        {
            "num_layers": 10,
            "num_stages": 4,
            "num_chunks": 2,
            "account_for_embedding": True,
            "account_for_loss": True,
        },
        ["3 places of a stage", "10 layers with embedding and output layer (12 places)"],
    ),
    "middle stages": (
        {"num_layers": 10, "num_stages": 4, "first_stage_layers": 2},
        ["1 of 4 stages take 2 of 10 layers: 8 layers are left for 3 stages", "--decoder-last-pipeline-num-layers"],
    ),
    "no layers left": (
        {"num_layers": 10, "num_stages": 4, "first_stage_layers": 4, "last_stage_layers": 6},
        ["2 of 4 stages take 10 of 10 layers: 0 layers are left for 2 stages"],
    ),
    "too many at the ends": (
        {"num_layers": 10, "num_stages": 2, "first_stage_layers": 4, "last_stage_layers": 7},
        ["2 of 2 stages take 11 of 10 layers", "--decoder-last-pipeline-num-layers 6"],
    ),
    "end stage by chunks": (
        {"num_layers": 16, "num_stages": 4, "num_chunks": 2, "first_stage_layers": 1},
        ["1 layers of a stage", "2 chunks"],
    ),
    "chunks of one stage": (
        {"num_layers": 8, "num_stages": 1, "num_chunks": 2},
        ["One stage", "2 chunks", "--num-virtual-stages-per-pipeline-rank 1", "--pipeline-model-parallel-size 2"],
    ),
    "chunk length of one stage": (
        {"num_layers": 8, "num_stages": 1, "layers_per_virtual_stage": 4},
        ["One stage", "--num-layers-per-virtual-pipeline-stage 8"],
    ),
    "layout of one stage": (
        {"num_layers": 8, "num_stages": 1, "layout": "Et*4|t*4L"},
        ["One stage", "--pipeline-model-parallel-size 2"],
    ),
    "chunks twice": (
        {"num_layers": 8, "num_stages": 2, "num_chunks": 2, "layers_per_virtual_stage": 2},
        ["num_virtual_stages_per_pipeline_rank 2, num_layers_per_virtual_pipeline_stage 2", "more than one way"],
    ),
    "layout and chunks": (
        {"num_layers": 8, "num_stages": 2, "num_chunks": 1, "layout": "Et*4|t*4L"},
        ["num_virtual_stages_per_pipeline_rank 1", "--num-virtual-stages-per-pipeline-rank null"],
    ),
    "layout and chunk length": (
        {"num_layers": 8, "num_stages": 2, "layers_per_virtual_stage": 2, "layout": "Et*4|t*4L"},
        ["num_layers_per_virtual_pipeline_stage 2", "--pipeline-model-parallel-layout null"],
    ),
    "layout and ends": (
        {"num_layers": 8, "num_stages": 2, "first_stage_layers": 3, "layout": "Et*4|t*4L"},
        ["decoder_first_pipeline_num_layers 3", "--pipeline-model-parallel-layout null"],
    ),
    "layout and places": (
        {"num_layers": 7, "num_stages": 2, "account_for_embedding": True, "layout": "Et*4|t*3L"},
        ["account_for_embedding_in_pipeline_split true", "--no-account-for-embedding-in-pipeline-split"],
    ),
    "ends and places": (
        {"num_layers": 7, "num_stages": 2, "first_stage_layers": 3, "account_for_embedding": True},
        ["decoder_first_pipeline_num_layers 3", "account_for_embedding_in_pipeline_split true"],
    ),
    "ends and chunk length": (
        {"num_layers": 12, "num_stages": 4, "first_stage_layers": 6, "layers_per_virtual_stage": 1},
        ["decoder_first_pipeline_num_layers 6", "--num-virtual-stages-per-pipeline-rank"],
    ),
}


@pytest.mark.parametrize(("options", "parts"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_names_the_numbers_and_ways_out_that_work(options, parts):
    message = refusal(**options)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("field", ["num_layers", "num_stages", "num_chunks", "first_stage_layers", "last_stage_layers"])
def test_numbers_below_one_stop(field):
    with pytest.raises(ConfigError, match="at least 1"):
        pipeline_layout(**{"num_layers": 4, "num_stages": 2, field: 0})


def test_numbers_without_measure_are_refused_at_once():
    with pytest.raises(ConfigError, match=f"{10**18} layers"):
        even_layout(10**18, 7, 11)


maybe = st.one_of(st.none(), st.integers(1, 13))


@settings(max_examples=500, deadline=None)
@given(
    num_layers=st.integers(1, 48),
    num_stages=st.integers(1, 8),
    num_chunks=st.one_of(st.none(), st.integers(1, 5)),
    layers_per_virtual_stage=st.one_of(st.none(), st.none(), st.integers(1, 7)),
    first_stage_layers=maybe,
    last_stage_layers=maybe,
    account_for_embedding=st.booleans(),
    account_for_loss=st.booleans(),
    layout=st.one_of(st.none(), st.none(), st.none(), st.from_regex(r"E[t|]{0,20}L|[EtL|*(),2]{0,20}", fullmatch=True)),
)
def test_every_layer_stands_in_exactly_one_place_or_the_message_says_what_would_fit(**options):
    try:
        layout = pipeline_layout(**options)
    except ConfigError:
        refusal(**options)
        return
    assert path(layout) == list(range(options["num_layers"]))
    places = layout.places()
    assert places.shape == (layout.num_chunks, layout.num_stages * layout.layers_per_chunk)
    assert sorted(places[places >= 0]) == list(range(options["num_layers"]))
    blocks = places.reshape(layout.num_chunks, layout.num_stages, -1)
    for stage, chunks in enumerate(layout.layers):
        for chunk, layers in enumerate(chunks):
            assert tuple(blocks[chunk, stage][: len(layers)]) == layers
            assert (blocks[chunk, stage][len(layers) :] == -1).all()


@settings(max_examples=300, deadline=None)
@given(
    num_stages=st.integers(2, 6),
    num_chunks=st.integers(1, 4),
    per_chunk=st.integers(1, 4),
    first=st.one_of(st.none(), st.integers(1, 4)),
    last=st.one_of(st.none(), st.integers(1, 4)),
)
def test_every_uneven_split_that_is_whole_fits(num_stages, num_chunks, per_chunk, first, last):
    lengths = [per_chunk * num_chunks] * num_stages
    for end, given_length in ((0, first), (-1, last)):
        if given_length is not None:
            lengths[end] = given_length * num_chunks
    layout = pipeline_layout(
        sum(lengths),
        num_stages,
        num_chunks=num_chunks,
        first_stage_layers=first and first * num_chunks,
        last_stage_layers=last and last * num_chunks,
    )
    assert [sum(map(len, stage)) for stage in layout.layers] == lengths
    assert path(layout) == list(range(sum(lengths)))
