"""scripts/show_schedule.py: text, numbers and pictures of schedules, and what it says about wrong numbers."""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from schedule_support import schedule_arguments

from jmegatron.errors import ConfigError
from jmegatron.pipeline.picture import boxes, headline, write_picture
from jmegatron.pipeline.schedule import build_schedule, simulate

ROOT = Path(__file__).parents[2]
PICTURES = {
    "schedule_1f1b": ("1f1b", 1),
    "schedule_interleaved": ("interleaved", 2),
    "schedule_low_memory": ("1f1b-low-memory", 1),
    "schedule_gpipe": ("gpipe", 1),
}


def _main(*arguments):
    spec = importlib.util.spec_from_file_location("show_schedule", ROOT / "scripts" / "show_schedule.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(list(map(str, arguments)))


@pytest.fixture(autouse=True)
def _width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def _texts(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text())


# ----------------------------------------------------------------------------------------------------------------- text


def test_1f1b_as_text_and_numbers(capsys):
    assert _main("--pp", 2, "--num-microbatches", 3) == 0
    assert capsys.readouterr().out == (
        "tick     0   1      2      3      4\n"
        "stage 0  F0  F1 .   F2 B0  .  B1  B2\n"
        "stage 1  .   F0 B0  F1 B1  F2 B2  .\n"
        "\n"
        "1F1B: 2 stages, 3 micro-batches\n"
        "bubble 33.33 % of the ideal time, 25 % of the total\n"
        "5 ticks; 4 forward slots, 4 backward slots\n"
        "time 12, ideal 9 (forward 1, backward 2)\n"
        "stage                   0  1\n"
        "chunks in flight        3  1\n"
        "messages forward        3  0\n"
        "messages backward       0  3\n"
        "warm-up in Megatron-LM  1  0\n"
    )


def test_several_chunks_have_letters_and_long_schedules_go_on_below(capsys):
    assert _main("--pp", 4, "--num-microbatches", 8, "--chunks", 2) == 0
    out = capsys.readouterr().out
    assert "Interleaved 1F1B: 4 stages, 8 micro-batches, 2 chunks a stage" in out
    assert "bubble 18.75 % of the ideal time, 15.79 % of the total" in out
    assert re.search(r"^warm-up in Megatron-LM +10 +8 +6 +4$", out, re.MULTILINE)
    assert re.search(r"^chunks in flight +11 +9 +7 +5$", out, re.MULTILINE)
    rows = [line for line in out.splitlines() if re.match(r"stage 2  +[F.B]", line)]
    assert len(rows) > 1
    work = " ".join(row[len("stage 2") :] for row in rows).split()
    schedule = build_schedule("interleaved", 4, 8, 2)
    order = [f"{way}{microbatch}{'ab'[chunk]}" for way, microbatch, chunk in schedule.order(2)]
    assert [cell for cell in work if cell != "."] == order
    assert max(map(len, out.splitlines())) <= 100


def test_the_middle_of_a_long_schedule_is_left_out(capsys):
    assert _main("--pp", 4, "--num-microbatches", 512, "--chunks", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= 100
    (note,) = [line for line in lines if "not shown" in line]
    first, last = map(int, re.findall(r"\d+", note))
    shown = [int(tick) for line in lines if line.startswith("tick ") for tick in line.split()[1:]]
    ticks = build_schedule("interleaved", 4, 512, 2).num_ticks
    assert shown == [*range(first), *range(last + 1, ticks)]


def test_low_memory_has_one_cell_a_half_tick_and_gpipe_no_warm_up(capsys):
    assert _main("--pp", 2, "--num-microbatches", 2, "--schedule", "1f1b-low-memory") == 0
    out = capsys.readouterr().out
    assert "stage 0  F0  .   F1  B0  .   B1\n" in out
    assert "stage 1  .   F0  B0  F1  B1  .\n" in out
    assert "6 half ticks" in out
    assert _main("--pp", 2, "--num-microbatches", 2, "--schedule", "gpipe") == 0
    assert "no warm-up counts" in capsys.readouterr().out
    assert _main("--pp", 4, "--num-microbatches", 2, "--chunks", 2) == 0
    assert "no warm-up counts" in capsys.readouterr().out


def test_options_reach_the_schedule(capsys):
    options = ["--group-size", 5, "--loss-delay", 1, "--forward-cost", 2, "--backward-cost", 3.5]
    assert _main("--pp", 4, "--num-microbatches", 10, "--chunks", 2, *options) == 0
    out = capsys.readouterr().out
    assert "loss a tick late" in out
    assert "(forward 2, backward 3.5)" in out
    assert re.search(r"^warm-up in Megatron-LM +11 +9 +7 +5$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--pp", 0, "--num-microbatches", 8), "got 0 stages"),
        (("--pp", 4, "--num-microbatches", 0), "0 micro-batches"),
        (("--pp", 4, "--num-microbatches", 8, "--chunks", 0), "0 chunks a stage"),
        (("--pp", 4, "--num-microbatches", 8, "--chunks", 2, "--schedule", "1f1b"), "got 2 chunks a stage, expected 1"),
        (("--pp", 4, "--num-microbatches", 8, "--chunks", 2, "--group-size", 3), "got 3 with 8 micro-batches"),
        (("--pp", 4, "--num-microbatches", 8, "--group-size", 4), "expected several chunks"),
        (("--pp", 4, "--num-microbatches", 8, "--forward-cost", 0), "got 0, 2, expected more than 0"),
        (("--pp", 4, "--num-microbatches", 8, "--backward-cost", "nan"), "got 1, nan"),
        (("--pp", 4, "--num-microbatches", 8, "--schedule", "1f1b-low-memory", "--loss-delay", 1), "leave it out"),
        (("--pp", 4, "--num-microbatches", 8, "--output", "/nowhere/at/all"), "no folder /nowhere/at"),
        (("--pp", 4, "--num-microbatches", 8, "--output", ""), "expected the beginning of a file name"),
        (("--pp", 4, "--num-microbatches", 8, "--output", "/"), "expected the beginning of a file name"),
    ],
)
def test_wrong_numbers_give_one_line_and_status_2(arguments, message, capsys):
    assert _main(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_without_matplotlib_the_text_stays(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert _main("--pp", 2, "--num-microbatches", 2) == 0
    out = capsys.readouterr().out
    assert "stage 1  .   F0 B0" in out
    assert out.splitlines()[-1].endswith("fix: pip install 'jmegatron[plots]'")
    assert _main("--pp", 2, "--num-microbatches", 2, "--output", tmp_path / "picture") == 2
    out, error = capsys.readouterr()
    assert "stage 1  .   F0 B0" in out
    assert "pip install 'jmegatron[plots]'" in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------------------------- picture


@settings(deadline=None, max_examples=60)
@given(schedule_arguments(max_microbatches=16))
def test_boxes_lie_where_the_simulation_counts_them(arguments):
    schedule = build_schedule(**arguments)
    for costs in ((1.0, 2.0), (2.0, 0.5)):
        work, simulation = boxes(schedule, *costs), simulate(schedule, *costs)
        assert (work.start + work.width).max() == simulation.total
        for stage in range(schedule.num_stages):
            own = work.stage == stage
            assert work.width[own].sum() == simulation.ideal
            order = np.argsort(work.start[own])
            ends = (work.start + work.width)[own][order]
            assert (work.start[own][order][1:] >= ends[:-1]).all()
            letters = "FB"
            found = [
                (letters[int(work.backward[own][i])], int(work.microbatch[own][i]), int(work.chunk[own][i]))
                for i in order
            ]
            assert found == schedule.order(stage)


def test_pictures_are_written_and_always_the_same(tmp_path, capsys):
    arguments = ("--pp", 4, "--num-microbatches", 8, "--chunks", 2, "--output")
    for name in ("a", "b"):
        assert _main(*arguments, tmp_path / name) == 0
    assert f"wrote {tmp_path / 'b'}.svg, {tmp_path / 'b'}.png" in capsys.readouterr().out
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    texts = _texts(tmp_path / "a.svg")
    lines = headline(build_schedule("interleaved", 4, 8, 2), simulate(build_schedule("interleaved", 4, 8, 2)))
    assert set(lines) <= set(texts)
    assert {"stage 0", "stage 3", "forward, chunk 0", "backward, chunk 1", "idle"} <= set(texts)
    assert texts.count("7") == 4 * 2 * 2  # a box on each stage, in each chunk, each way
    assert "<dc:date>" not in (tmp_path / "a.svg").read_text()


def test_a_prefix_with_an_ending_names_one_file(tmp_path):
    assert _main("--pp", 2, "--num-microbatches", 2, "--output", tmp_path / "only.svg") == 0
    assert _main("--pp", 2, "--num-microbatches", 2, "--output", tmp_path / "v1.5") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["only.svg", "v1.5.png", "v1.5.svg"]


def test_a_path_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "taken.svg").mkdir()
    assert _main("--pp", 2, "--num-microbatches", 2, "--output", tmp_path / "taken") == 2
    assert "cannot write" in capsys.readouterr().err


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"expected an ending of \.svg or \.png"):
        write_picture(build_schedule("1f1b", 2, 2), [tmp_path / "a.pdf"])


def test_thousands_of_boxes_stay_small(tmp_path):
    assert _main("--pp", 8, "--num-microbatches", 512, "--chunks", 4, "--output", tmp_path / "large") == 0
    assert (tmp_path / "large.svg").stat().st_size < 500_000
    assert "511" not in _texts(tmp_path / "large.svg")
    assert (tmp_path / "large.png").stat().st_size < 1_000_000


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_of_the_documentation_are_those_of_today(name):
    kind, v = PICTURES[name]
    schedule = build_schedule(kind, 4, 8, v)
    texts = _texts(ROOT / "docs" / "pictures" / f"{name}.svg")
    assert set(headline(schedule, simulate(schedule))) <= set(texts)
    numbers = [text for text in texts if text.isdigit()]
    assert numbers.count("1") == 4 * 2 * v
