"""A dry run's report as text and as a page: the same figures as the JSON, readable on a small screen, safe to open."""

import copy
import json
import re

import pytest
from dry_run_support import SMALL, PageReader, report_of

from jmegatron.planner import report, report_html


@pytest.fixture(scope="module")
def figures():
    # Through JSON, as a reader of report.json has it.
    return json.loads(json.dumps(report_of(), allow_nan=False))


@pytest.fixture(scope="module")
def reader(figures):
    return PageReader(report_html.page(figures))


SHOWN_LINES = """
memory.peak memory.theory_peak memory.share memory.parts.parameters memory.parts.optimizer_state
memory.parts.gradients memory.parts.activations memory.parts.other_temporaries memory.arguments memory.outputs
memory.aliased memory.temporaries memory.theory.activations memory.stages.1.total target.memory_bytes
target.usable_bytes collectives.0.bytes collectives.0.theory_bytes collectives.0.executions collectives.1.bytes
overlap.0.bytes exposed.by_kind_s.all-gather exposed.total_s exposed.no_matmul_beside_s pipeline.bubble
pipeline.bubble_of_total pipeline.bubble_with_one_chunk flops.six_n_d flops.model flops.model_causal flops.executed
time.step_s time.roofline_s time.parts.matmul time.tokens_per_s time.mfu time.mfu_causal time.days
time.token_budget compile.seconds.compiling compile.total_s
"""
SHOWN = SHOWN_LINES.split()


def test_every_number_of_the_page_is_the_one_at_its_place_in_the_json(figures, reader):
    assert not set(SHOWN) - {key for key, _, _ in reader.data}
    for key, value, _ in reader.data:
        assert float(value) == float(report_html.lookup(figures, key)), key


def test_what_the_page_prints_is_its_value_rounded(reader):
    scales = {"GB": 1e9, "MB": 1e6, "B": 1, "ms": 1e-3, "s": 1, "%": 0.01, "": 1}
    for key, value, text in reader.data:
        match = re.fullmatch(r"(-?[\d,]+(?:\.(\d+))?(?:e([+-]\d+))?) ?(GB|MB|B|ms|s|%|)", text)
        assert match, (key, text)
        digits, exponent = len(match[2] or ""), int(match[3] or 0)
        shown = float(match[1].replace(",", "")) * scales[match[4]]
        step = 10.0 ** (exponent - digits) * scales[match[4]]
        # 4 significant digits where a count is not whole.
        assert abs(shown - float(value)) <= max(0.5001 * step, 5e-4 * abs(float(value)) * (not match[4])), (key, text)


def test_tables_hold_no_number_that_is_not_marked(reader):
    assert [cell for cell in reader.cells if re.search(r"\d", cell) and "N D" not in cell] == []


def test_the_page_is_well_formed_and_asks_for_nothing(figures, reader):
    page = report_html.page(figures)
    assert reader.left_open == []
    assert re.findall(r"https?:|src=|@import|url\(|<link|<script|<iframe", page) == []


def test_nothing_is_wider_than_the_screen_unless_it_scrolls_by_itself(figures, reader):
    page = report_html.page(figures)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert re.findall(r"(?<![-\w])(?:min-)?width: ?\d+(?:px|em|rem)", page) == []
    for (tag, attributes), classes in zip(reader.tags, reader.inside, strict=True):
        if tag in ("table", "svg") and attributes.get("width") != "100%":
            assert "scroll" in classes, (tag, attributes)
    assert re.search(r"\.scroll \{[^}]*overflow-x: auto", page)


def test_hostile_words_are_shown_as_text(figures):
    hostile = copy.deepcopy(figures)
    bad = "</title><script>alert('1')</script>\"'&"
    hostile["notes"].append(bad)
    hostile["versions"]["jax"] = bad
    hostile["compile"]["xla_options"].append(bad)
    hostile["collectives"][0]["kind"] = bad
    hostile["pipeline"]["schedule"] = bad
    hostile["target"]["gpu"] = bad
    hostile["exposed"]["by_kind_s"] = {"x": 1.0}
    hostile["memory"]["fits"] = False
    hostile["proposals"] = [
        {"flags": bad, "note": bad, "compiled": False, "peak": 1.0, "step_s": 1.0, "changes": [], "theory_peak": 1.0}
    ]
    page = report_html.page(hostile)
    assert "<script" not in page
    assert page.count("</title>") == 1 + page.count("</title></rect>")
    assert PageReader(page).left_open == []


def test_the_text_has_the_same_peak_bubble_and_step(figures):
    text = "\n".join(report.text_lines(figures))
    for key, how in (
        ("memory.peak", report.gigabytes),
        ("pipeline.bubble", report.percent),
        ("time.step_s", report.seconds),
        ("flops.executed", report.flops),
        ("exposed.total_s", report.seconds),
    ):
        assert how(report_html.lookup(figures, key)) in text, key
    assert "custom-call.7" in text


def test_transfers_too_short_to_be_shown_are_counted(figures):
    changed = copy.deepcopy(figures)
    short = {**changed["overlap"][0], "link_s": 9e-6, "hidden": False, "kind": "short-one"}
    assert not any("below 0.01 ms" in line for line in report.text_lines({**changed, "overlap": [short][:0]}))
    changed["overlap"] = [{**changed["overlap"][0], "link_s": 1e-3}, short, short]
    text = "\n".join(report.text_lines(changed))
    assert "  2 more below 0.01 ms: report.json" in text
    assert "short-one" not in text


def test_closed_forms_alone_say_so_in_text_and_page():
    figures = report_of(compiled=False)
    assert "CLOSED FORMS ALONE" in "\n".join(report.text_lines(figures))
    page = report_html.page(figures)
    assert "Closed forms alone" in page
    assert PageReader(page).left_open == []


def test_a_long_schedule_leaves_its_middle_out_and_stays_small():
    words = [word if word != "32" else "16384" for word in SMALL]
    figures = report_of(words)
    assert figures["layout"]["num_microbatches"] == 4096
    page = report_html.page(figures)
    assert len(page) < 1_500_000
    assert "the middle is left out" in page
    assert figures["pipeline"]["left_out"] is not None
