"""A dry run's report as one page of HTML that needs nothing else. No communication, no jax.

The page shows the dict that is also report.json (`training.dry_run`) and computes nothing but how long bars are: every
number of it stands in a `<data data-key="memory.peak" value="...">` with its place in the dict and its exact value.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jmegatron.planner import report as words
from jmegatron.planner.report import PARTS, TIMES, Report

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --dim: #5d646d; --paper: #ffffff; --line: #d9dde2; --soft: #f3f5f7;
  --good: #1b7f4b; --bad: #b3261e; --c0: #1f5fa8; --c1: #4f8fd0; --c2: #d9730d; --c3: #e9a85c; --c4: #6a4fb0;
  --c5: #8a939c; --c6: #b7bec6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --dim: #9aa3ad; --paper: #16181b; --line: #343a41;
  --soft: #1f2327; --good: #5fc491; --bad: #ff8a80; --c0: #5b9be0; --c1: #8fbdf0; --c2: #f0954a; --c3: #f3c48c;
  --c4: #a68ee6; --c5: #7b848d; --c6: #535b63; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.35rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
p, li { overflow-wrap: anywhere; } p { margin: .4rem 0; }
.dim { color: var(--dim); font-size: .88rem; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
.scroll { overflow-x: auto; max-width: 100%; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 8px; margin: .8rem 0; }
.tile { background: var(--soft); border-radius: 6px; padding: 8px 10px; }
.tile b { display: block; font-size: 1.15rem; }
table { border-collapse: collapse; font-size: .88rem; }
th, td { padding: 3px 10px 3px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
td.text, th.text { text-align: left; } td:first-child { white-space: normal; }
svg { display: block; } svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: .85rem; margin: .3rem 0; padding: 0;
  list-style: none; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px; }
pre { background: var(--soft); padding: 8px; overflow-x: auto; font-size: .8rem; border-radius: 6px; }
code { font-size: .88rem; overflow-wrap: anywhere; }
"""


def page(report: Report) -> str:
    """Returns the page."""
    title = words.title(report)
    sections = (_summary, _notes, _proposals, _memory, _collectives, _overlap, _pipeline, _flops, _time, _compile)
    body = "\n".join(part for section in sections for part in section(report))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{html.escape(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


# ---- pieces ---------------------------------------------------------------------------------------------------------
def lookup(report: Report, key: str) -> Any:
    """Returns the value at a place such as `memory.stages.0.total`."""
    value: Any = report
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, (list, tuple)) else value[part]
    return value


def _data(report: Report, key: str, how: Callable[[Any], str]) -> str:
    value = lookup(report, key)
    if value is None:
        return "-"
    return f'<data data-key="{html.escape(key)}" value="{value!r}">{html.escape(how(value))}</data>'


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: Sequence[int] = ()) -> str:
    """Returns a table; cells are HTML already."""

    def line(tag: str, row: Sequence[str]) -> str:
        kinds = ("" if i not in text_columns else ' class="text"' for i in range(len(row)))
        return "<tr>" + "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"

    lines = [line("th", [html.escape(cell) for cell in header]), *(line("td", row) for row in rows)]
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _bar(parts: Sequence[tuple[str, int | float]], whole: int | float, mark: int | float | None = None) -> str:
    """Returns a bar of coloured parts over `whole`, with a line at `mark`."""
    drawn, begin = [], 0.0
    for i, (name, value) in enumerate(parts):
        size = 1000 * value / whole if whole else 0.0
        drawn.append(
            f'<rect x="{begin:.2f}" y="2" width="{max(size, 0):.2f}" height="26" fill="var(--c{i % 7})">'
            f"<title>{html.escape(name)}</title></rect>"
        )
        begin += size
    if mark is not None:
        x = 1000 * mark / whole
        drawn.append(f'<rect x="{x - 1.5:.2f}" y="0" width="3" height="30" fill="var(--bad)"/>')
    return (
        '<svg role="img" width="100%" height="30" viewBox="0 0 1000 30" preserveAspectRatio="none">'
        '<rect x="0" y="2" width="1000" height="26" fill="var(--soft)"/>' + "".join(drawn) + "</svg>"
    )


def _legend(items: Sequence[str]) -> str:
    cells = (f'<li><i style="background:var(--c{i % 7})"></i>{item}</li>' for i, item in enumerate(items))
    return f'<ul class="legend">{"".join(cells)}</ul>'


# ---- sections -------------------------------------------------------------------------------------------------------
def _summary(report: Report) -> Iterator[str]:
    get = lambda key, how: _data(report, key, how)  # noqa: E731
    fits = report["memory"]["fits"]
    if not report["compiled"]:
        yield '<p class="bad">Closed forms alone: nothing was compiled.</p>'
    tiles = [
        ("peak memory a GPU", get("memory.peak", words.gigabytes)),
        ("of the card", get("memory.share", words.percent)),
        ("expected step", get("time.step_s", words.seconds)),
        ("tokens a second", get("time.tokens_per_s", lambda v: words.number(round(v)))),
        ("MFU, whole attention rectangle", get("time.mfu", words.percent)),
        ("days for all tokens", get("time.days", lambda v: f"{v:.1f}")),
    ]
    if report["pipeline"] is not None:
        tiles.append(("bubble, of the ideal time", get("pipeline.bubble", words.percent)))
    boxes = "".join(f'<div class="tile"><b>{value}</b>{name}</div>' for name, value in tiles)
    verdict = f'<span class="{"good" if fits else "bad"}">{"It fits." if fits else "It does not fit."}</span>'
    yield f'<p>{verdict} <span class="dim">{html.escape(report["date"])}, {_versions(report)}</span></p>'
    yield f"<p>{html.escape(words.layout_text(report))}</p>"
    yield f'<div class="tiles">{boxes}</div>'


def _versions(report: Report) -> str:
    return html.escape(", ".join(f"{name} {version}" for name, version in report["versions"].items()))


def _notes(report: Report) -> Iterator[str]:
    if report["notes"]:
        yield '<ul class="dim">' + "".join(f"<li>{html.escape(note)}</li>" for note in report["notes"]) + "</ul>"


def _proposals(report: Report) -> Iterator[str]:
    if report["memory"]["fits"]:
        return
    yield "<h2>What would fit</h2>"
    if not report["proposals"]:
        yield "<p>No layout on these GPUs was found that fits: more GPUs, another card, or a smaller model.</p>"
        return
    rows = []
    for i, row in enumerate(report["proposals"]):
        key = f"proposals.{i}."
        sizes = ("peak", "arguments", "temporaries") if row["compiled"] else ("peak",)
        cells = [_data(report, key + name, words.gigabytes) for name in sizes]
        note = f" ({html.escape(row['note'])})" if row["note"] else ""
        rows.append(
            [
                f"<code>{html.escape(row['flags'])}</code>{note}",
                *cells,
                *["-"] * (3 - len(cells)),
                _data(report, key + "step_s", words.seconds),
                "compiled" if row["compiled"] else "closed form",
            ]
        )
    yield _table(["change", "peak", "arguments", "temporaries", "step (estimated)", "memory is"], rows)


def _memory(report: Report) -> Iterator[str]:
    memory, target = report["memory"], report["target"]
    yield "<h2>Memory of a GPU</h2>"
    keys = [key for key in PARTS if memory["parts"][key] or memory["theory"][key]]
    whole = max(memory["peak"], memory["theory_peak"], target["memory_bytes"])
    for title, part in (("compiled", "parts"), ("closed form", "theory")):
        if part == "parts" and not report["compiled"]:
            continue
        yield f'<p class="dim">{title}; the red line is what may be used</p>'
        yield _bar([(PARTS[key], memory[part][key]) for key in keys], whole, target["usable_bytes"])
    yield _legend([PARTS[key] for key in keys])
    rows = []
    for key in keys:
        rows.append(
            [PARTS[key], *(_data(report, f"memory.{part}.{key}", words.gigabytes) for part in ("parts", "theory"))]
        )
    rows.append(["peak", *(_data(report, f"memory.{key}", words.gigabytes) for key in ("peak", "theory_peak"))])
    rows.append(["card", _data(report, "target.memory_bytes", words.gigabytes), ""])
    rows.append(["of it may be used", _data(report, "target.usable_bytes", words.gigabytes), ""])
    for key in ("arguments", "outputs", "aliased", "temporaries"):
        if key in memory:
            rows.append([f"compiler: {key}", _data(report, f"memory.{key}", words.gigabytes), ""])
    rows.append(
        ["state, by the rule of bytes a parameter", "", _data(report, "memory.state_rule.bytes", words.gigabytes)]
    )
    for key, name in (("activations_per_layer", "here"), ("textbook_activations_per_layer", "textbook")):
        if memory[key] is None:
            continue  # the textbook knows no experts
        rows.append([f"activations of a layer, {name}", "", _data(report, f"memory.{key}", words.gigabytes)])
    yield _table(["", "compiled" if report["compiled"] else "closed form", "closed form"], rows)
    if len(memory["stages"]) > 1:
        yield f"<p>Stages: {html.escape(words.ONE_PROGRAM)}.</p>"
        rows = []
        for i in range(len(memory["stages"])):
            key = f"memory.stages.{i}."
            rows.append(
                [
                    _data(report, key + "stage", str) + (" (worst)" if i == memory["worst_stage"] else ""),
                    _data(report, key + "parameters", words.number),
                    _data(report, key + "chunks_in_flight", str),
                    *(_data(report, key + name, words.gigabytes) for name in ("state", "activations", "total")),
                ]
            )
        yield _table(["stage", "parameters", "chunks in flight", "state", "activations", "sum"], rows)


def _collectives(report: Report) -> Iterator[str]:
    if not report["collectives"]:
        return
    yield "<h2>Collectives of a step</h2>"
    yield '<p class="dim">bytes that one GPU sends, by ring algorithms; theory without idle slots</p>'
    rows = []
    for i, row in enumerate(report["collectives"]):
        key = f"collectives.{i}."
        rows.append(
            [
                html.escape(words.axes_text(row["axes"])),
                html.escape(row["kind"]),
                "in a node" if row["within_node"] else "between nodes",
                _data(report, key + "executions", words.number),
                _data(report, key + "bytes", words.gigabytes),
                _data(report, key + "theory_bytes", words.gigabytes),
                _data(report, key + "link_s", words.seconds),
                html.escape(", ".join(row["what"])),
            ]
        )
    header = ["axes", "kind", "link", "runs", "bytes", "theory", "at link speed", "what theory sends"]
    yield _table(header, rows, (1, 2, 7))


def _overlap(report: Report) -> Iterator[str]:
    if not report["overlap"]:
        return
    yield "<h2>What runs beside the transfers</h2>"
    rows = []
    for i, row in enumerate(report["overlap"]):
        key = f"overlap.{i}."
        rows.append(
            [
                html.escape(words.axes_text(row["axes"])),
                html.escape(row["kind"]),
                f'<span class="{"good" if row["hidden"] else "dim"}">{html.escape(row["beside"])}</span>',
                _data(report, key + "count", words.number),
                _data(report, key + "executions", words.number),
                _data(report, key + "bytes", words.gigabytes),
                _data(report, key + "link_s", words.seconds),
            ]
        )
    yield _table(["axes", "kind", "beside", "places", "runs", "bytes", "at link speed"], rows, (1, 2))
    if report["exposed"] is None:
        return
    yield f"<p>Exposed, {html.escape(words.LOG_NOTE)}:</p>"
    rows = [
        [html.escape(kind), _data(report, f"exposed.by_kind_s.{kind}", words.seconds)]
        for kind, value in report["exposed"]["by_kind_s"].items()
        if value
    ]
    rows.append(["all", _data(report, "exposed.total_s", words.seconds)])
    rows.append(["no matmul beside, at link speed", _data(report, "exposed.no_matmul_beside_s", words.seconds)])
    yield _table(["kind", "a step"], rows)


_ROW, _UNIT = 22, 9.0


def _pipeline(report: Report) -> Iterator[str]:
    pipeline = report["pipeline"]
    if pipeline is None:
        return
    yield "<h2>Pipeline</h2>"
    get = lambda key, how: _data(report, f"pipeline.{key}", how)  # noqa: E731
    one = f"; with one chunk a stage {get('bubble_with_one_chunk', words.percent)}" if pipeline["chunks"] > 1 else ""
    yield (
        f"<p>{get('stages', str)} stages, {get('chunks', str)} chunks a stage, {get('num_microbatches', str)}"
        f" micro-batches, {html.escape(pipeline['schedule'])}: bubble {get('bubble', words.percent)} of the ideal time,"
        f" {get('bubble_of_total', words.percent)} of the total{one}.</p>"
    )
    yield f'<div class="scroll">{_picture(pipeline)}</div>'
    later = " (later chunks are lighter)" if pipeline["chunks"] > 1 else ""
    cut = "; the middle is left out" if pipeline["left_out"] else ""
    yield (
        '<ul class="legend"><li><i style="background:var(--c0)"></i>forward</li>'
        f'<li><i style="background:var(--c2)"></i>backward{later}</li>'
        f'<li><i style="background:var(--soft)"></i>idle{cut}</li></ul>'
    )
    yield f"<details><summary>as text</summary><pre>{html.escape(chr(10).join(pipeline['text']))}</pre></details>"


def _picture(pipeline: Report) -> str:
    """Returns the schedule as SVG, one row a stage, time to the right."""
    begin, end = pipeline["left_out"] or (None, None)
    gap = 3.0
    shift = 0.0 if begin is None else end - begin - gap
    length = pipeline["time"] - shift
    height, label = _ROW * pipeline["stages"], 52
    unit = max(_UNIT, 560 / max(length, 1e-9)) if length < 60 else _UNIT
    width = label + unit * length
    drawn = []
    for stage in range(pipeline["stages"]):
        y = stage * _ROW
        drawn.append(f'<text x="0" y="{y + 15}">stage {stage}</text>')
        drawn.append(
            f'<rect x="{label}" y="{y + 1}" width="{unit * length:.1f}" height="{_ROW - 2}" fill="var(--soft)"/>'
        )
    for stage, backward, microbatch, chunk, start, size in pipeline["boxes"]:
        x = label + unit * (start - (shift if begin is not None and start >= end else 0.0))
        shade = 1 - 0.6 * chunk / max(pipeline["chunks"] - 1, 1)
        way = "backward" if backward else "forward"
        drawn.append(
            f'<rect x="{x + 0.3:.1f}" y="{stage * _ROW + 1}" width="{unit * size - 0.6:.1f}" height="{_ROW - 2}"'
            f' fill="var(--c{2 if backward else 0})" fill-opacity="{shade:.2f}">'
            f"<title>{way} of micro-batch {microbatch}, chunk {chunk}</title></rect>"
        )
    if begin is not None:
        drawn.append(f'<text x="{label + unit * (begin + gap / 2) - 6:.1f}" y="{height / 2 + 4}">...</text>')
    size = f'width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}"'
    return f'<svg role="img" {size}>{"".join(drawn)}</svg>'


def _flops(report: Report) -> Iterator[str]:
    yield "<h2>Matmul FLOPs of a step, all GPUs</h2>"
    names = {
        "six_n_d": words.six_n_d_name(report),
        "model": "model, attention over the whole rectangle",
        "model_causal": "model, causal half (as Megatron-LM counts)",
        "with_recompute": "the same with what is recomputed",
        "executed": "executed, masked halves of cuDNN's attention left out",
        "executed_whole_rectangle": "executed, whole rectangles",
    }
    rows = [
        [html.escape(name), _data(report, f"flops.{key}", words.flops)]
        for key, name in names.items()
        if report["flops"].get(key) is not None
    ]
    yield _table(["", "FLOP"], rows)


def _time(report: Report) -> Iterator[str]:
    time = report["time"]
    yield "<h2>Expected time of a step</h2>"
    keys = [key for key in TIMES if time["parts"][key]]
    yield '<p class="dim">by a roofline of the card and its links</p>'
    yield _bar([(TIMES[key], time["parts"][key]) for key in keys], time["roofline_s"])
    yield _legend([f"{TIMES[key]} {_data(report, f'time.parts.{key}', words.seconds)}" for key in keys])
    tflops = lambda value: f"{value:.0f}"  # noqa: E731
    rows = [["roofline", _data(report, "time.roofline_s", words.seconds)]]
    if time["assumed_tflops"] is not None:
        rows.append(["assumed TFLOP/s a GPU, end to end", _data(report, "time.assumed_tflops", lambda v: f"{v:g}")])
    rows += [
        ["step", _data(report, "time.step_s", words.seconds)],
        ["tokens of a step", _data(report, "time.tokens_per_step", words.number)],
        ["tokens a second", _data(report, "time.tokens_per_s", lambda v: words.number(round(v)))],
        ["TFLOP/s a GPU, attention over the whole rectangle", _data(report, "time.tflops_per_gpu", tflops)],
        ["TFLOP/s a GPU, causal half", _data(report, "time.tflops_per_gpu_causal", tflops)],
        ["MFU, attention over the whole rectangle", _data(report, "time.mfu", words.percent)],
        ["MFU, causal half", _data(report, "time.mfu_causal", words.percent)],
        ["tokens of the run", _data(report, "time.token_budget", words.number)],
        ["days of the run", _data(report, "time.days", lambda v: f"{v:.1f}")],
    ]
    yield _table(["", ""], rows)


def _compile(report: Report) -> Iterator[str]:
    if report["compile"] is None:
        return
    yield "<h2>Compiling</h2>"
    rows = [
        [html.escape(phase), _data(report, f"compile.seconds.{phase}", lambda v: f"{v:.1f} s")]
        for phase in report["compile"]["seconds"]
    ]
    rows.append(["all", _data(report, "compile.total_s", lambda v: f"{v:.1f} s")])
    rows.append(["HLO instructions", _data(report, "compile.num_instructions", words.number)])
    yield _table(["", ""], rows)
    yield (
        '<ul class="dim">'
        + "".join(f"<li>{html.escape(line)}</li>" for line in report["compile"]["xla_options"])
        + "</ul>"
    )
