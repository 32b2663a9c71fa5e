"""Schedules as text and as pictures. numpy; matplotlib (extra `plots`) for pictures alone. No communication.

Time runs to the right, one row a stage. In lock step all stages begin a tick's slots together; a slot in which a stage
has nothing to do is idle.
"""

import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jmegatron.errors import ConfigError, UsageError
from jmegatron.pipeline.schedule import (
    NONE,
    Schedule,
    Simulation,
    group_sizes,
    num_warmup,
    simulate,
    slot_costs,
)

TITLES = {"1f1b": "1F1B", "interleaved": "Interleaved 1F1B", "1f1b-low-memory": "1F1B, low memory", "gpipe": "GPipe"}


class Boxes(NamedTuple):
    """The work of a schedule, one entry a chunk of a micro-batch: arrays [boxes]."""

    stage: np.ndarray
    backward: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    start: np.ndarray
    width: np.ndarray


def boxes(schedule: Schedule, forward_cost: float = 1.0, backward_cost: float = 2.0) -> Boxes:
    """Returns where in time every piece of work lies, as `simulate` counts it.

    Args:
      schedule: the table.
      forward_cost: of one chunk.
      backward_cost: of one chunk.
    """
    costs = slot_costs(schedule, forward_cost, backward_cost)
    lasts = costs.max(0) if schedule.half_ticks else costs.sum(0)
    begin = np.cumsum(lasts) - lasts
    starts = [begin, begin if schedule.half_ticks else begin + costs[0]]
    parts = []
    for way, (microbatch, chunk) in enumerate(
        (
            (schedule.forward_microbatch, schedule.forward_chunk),
            (schedule.backward_microbatch, schedule.backward_chunk),
        )
    ):
        tick, stage = np.nonzero(microbatch != NONE)
        work = (microbatch[tick, stage], chunk[tick, stage])
        parts.append((stage, np.full(len(tick), bool(way)), *work, starts[way][tick], costs[way][tick]))
    return Boxes(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def headline(schedule: Schedule, simulation: Simulation) -> list[str]:
    """Returns two lines: what the schedule is, and its bubble in both definitions."""
    p, m, v = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    numbers = [_count(p, "stage"), _count(m, "micro-batch", "es")]
    if v > 1:
        numbers.append(f"{v} chunks a stage")
    if schedule.loss_delay:
        numbers.append("loss a tick late")
    ideal, total = 100 * simulation.bubble, 100 * simulation.bubble_of_total
    return [
        f"{TITLES[schedule.name]}: {', '.join(numbers)}",
        f"bubble {ideal:.4g} % of the ideal time, {total:.4g} % of the total",
    ]


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


# ---- text ---------------------------------------------------------------------------------------------------------
def text_lines(schedule: Schedule, width: int = 120, max_blocks: int = 6) -> Iterator[str]:
    """Yields the schedule as text, one row a stage: `F3` or `B1b` is a micro-batch (and chunk), `.` idle.

    Args:
      schedule: the table.
      width: longest line; longer schedules go on below.
      max_blocks: pieces of the schedule to show; the middle is left out if there are more.
    """
    header, rows = _fields(schedule)
    label = len(f"stage {schedule.num_stages - 1}")
    blocks: list[tuple[int, int]] = []
    first, used = 0, label
    for tick, name in enumerate(header):
        if used + 2 + len(name) > width and tick > first:
            blocks.append((first, tick))
            first, used = tick, label
        used += 2 + len(name)
    blocks.append((first, len(header)))
    end_blocks = max_blocks // 3
    left_out = range(max_blocks - end_blocks, len(blocks) - end_blocks)
    for i, (begin, end) in enumerate(blocks):
        if i in left_out:
            if i == left_out[0]:
                yield f"... ticks {begin} .. {blocks[left_out[-1]][1] - 1} are not shown\n"
            continue
        yield "  ".join(["tick".ljust(label), *header[begin:end]]).rstrip()
        for stage, row in enumerate(rows):
            yield "  ".join([f"stage {stage}".ljust(label), *row[begin:end]]).rstrip()
        yield ""


def _fields(schedule: Schedule) -> tuple[list[str], list[list[str]]]:
    """Returns for each tick its number, and for each stage and tick its work, all of one tick equally wide."""
    v = schedule.num_chunks
    forward = _cells("F", schedule.forward_microbatch, schedule.forward_chunk, v)
    backward = _cells("B", schedule.backward_microbatch, schedule.backward_chunk, v)
    size = len(f"F{schedule.num_microbatches - 1}{_letter(v - 1, v)}")
    used = (schedule.forward_slots, schedule.backward_slots)
    header: list[str] = []
    rows: list[list[str]] = [[] for _ in range(schedule.num_stages)]
    for tick in range(schedule.num_ticks):
        if schedule.half_ticks:  # forward or backward, and "." sorts before both
            work = [[max(pair)] for pair in zip(forward[tick], backward[tick], strict=True)]
        else:
            slots = [cells[tick] for slot, cells in zip(used, (forward, backward), strict=True) if slot[tick]]
            work = [list(cells) for cells in zip(*slots, strict=True)]
        width = max((size + 1) * len(work[0]) - 1, len(str(tick)))
        header.append(str(tick).ljust(width))
        for row, cells in zip(rows, work, strict=True):
            row.append(" ".join(cell.ljust(size) for cell in cells).ljust(width))
    return header, rows


def _cells(way: str, microbatch: np.ndarray, chunk: np.ndarray, num_chunks: int) -> list[list[str]]:
    """Returns the text of each slot [ticks, stages]."""
    return [
        [f"{way}{i}{_letter(c, num_chunks)}" if i != NONE else "." for i, c in zip(*row, strict=True)]
        for row in zip(microbatch.tolist(), chunk.tolist(), strict=True)
    ]


def _letter(chunk: int, num_chunks: int) -> str:
    """Returns the chunk as a suffix, nothing where there is one chunk."""
    if num_chunks == 1:
        return ""
    return string.ascii_lowercase[chunk] if num_chunks <= 26 else f".{chunk}"


def number_lines(
    schedule: Schedule, forward_cost: float = 1.0, backward_cost: float = 2.0, group_size: int | None = None
) -> Iterator[str]:
    """Yields what `simulate` says.

    Args:
      schedule: the table.
      forward_cost: of one chunk.
      backward_cost: of one chunk.
      group_size: with which it was built, for the reference's warm-up counts.
    """
    p, m, v = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    simulation = simulate(schedule, forward_cost, backward_cost)
    yield from headline(schedule, simulation)
    kind = "half ticks" if schedule.half_ticks else "ticks"
    slots = f"{simulation.num_forward_slots} forward slots, {simulation.num_backward_slots} backward slots"
    yield f"{simulation.num_ticks} {kind}; {slots}"
    costs = f"forward {forward_cost:g}, backward {backward_cost:g}"
    yield f"time {simulation.total:g}, ideal {simulation.ideal:g} ({costs})"
    table: list[tuple[str, Sequence[int]]] = [
        ("stage", range(p)),
        ("chunks in flight", simulation.in_flight.tolist()),
        ("messages forward", simulation.messages[0].tolist()),
        ("messages backward", simulation.messages[1].tolist()),
    ]
    note = ""
    if schedule.name == "gpipe":
        note = "Megatron-LM has no such schedule, so no warm-up counts"
    elif v > 1 and m < p:
        note = "Megatron-LM refuses fewer micro-batches than stages here, so no warm-up counts"
    else:
        largest = max(group_sizes(m, p, group_size)) if v > 1 else None
        table.append(("warm-up in Megatron-LM", [num_warmup(stage, p, m, v, largest) for stage in range(p)]))
    names = max(len(name) for name, _ in table)
    size = max(len(str(value)) for _, values in table for value in values)
    for name, values in table:
        yield "  ".join([name.ljust(names), *(str(value).rjust(size) for value in values)])
    if note:
        yield note


# ---- pictures -----------------------------------------------------------------------------------------------------
FORWARD, BACKWARD, IDLE = "#1f5fa8", "#d9730d", "#ececec"
_UNIT, _ROW = 0.25, 0.34  # inches of a forward slot and of a stage
_MAX_WIDTH = 40.0  # inches
_MAX_VECTOR = 4000  # boxes; more are stored as pixels in the SVG
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "jmegatron",  # the same names every time
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.0,
}


def write_picture(
    schedule: Schedule, paths: Sequence[Path], forward_cost: float = 1.0, backward_cost: float = 2.0
) -> None:
    """Writes the schedule as a picture; the same schedule gives the same bytes.

    Args:
      schedule: the table.
      paths: files to write, by their ending .svg or .png.
      forward_cost: of one chunk.
      backward_cost: of one chunk.

    Raises:
      UsageError: matplotlib is missing, or a path cannot be written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(missing_matplotlib()) from error
    for path in paths:
        if path.suffix not in (".svg", ".png"):
            raise ConfigError(f"picture of a schedule: got {path}, expected an ending of .svg or .png")
    with matplotlib.rc_context(_STYLE):
        figure = _figure(schedule, forward_cost, backward_cost)
        for path in paths:
            metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
            try:
                figure.savefig(path, dpi=150, metadata=metadata)
            except OSError as error:
                raise UsageError(f"picture of a schedule: cannot write {path}: {error.strerror or error}") from error


def missing_matplotlib() -> str:
    """Returns the message for a machine without matplotlib."""
    return "pictures need matplotlib, which is not installed; fix: pip install 'jmegatron[plots]'"


def _figure(schedule: Schedule, forward_cost: float, backward_cost: float) -> Any:
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    p, v = schedule.num_stages, schedule.num_chunks
    simulation = simulate(schedule, forward_cost, backward_cost)
    work = boxes(schedule, forward_cost, backward_cost)
    label = max(len(str(schedule.num_microbatches - 1)), 1)
    shortest = min(forward_cost, backward_cost)
    unit = max(_UNIT, 0.09 * label + 0.1) / shortest  # inches of one unit of time
    width = min(max(unit * simulation.total, 5.0), _MAX_WIDTH)
    unit = width / simulation.total
    left, right, bottom, top = 0.7, 0.15, 0.68, 0.55
    height = _ROW * p
    figure = Figure(figsize=(left + width + right, bottom + height + top))
    area = (left, bottom, width, height)
    axes = figure.add_axes(tuple(a / b for a, b in zip(area, figure.get_size_inches().tolist() * 2, strict=True)))
    axes.set(xlim=(0, simulation.total), ylim=(p - 0.5, -0.5), xlabel="time")
    axes.set_yticks(range(p), [f"stage {stage}" for stage in range(p)])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=max(int(width / 0.7), 2), integer=True))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)

    rows = [(0.0, simulation.total, stage) for stage in range(p)]
    axes.add_collection(PolyCollection([_corners(*row) for row in rows], facecolor=IDLE, linewidth=0))
    colours = np.array([[_shade(base, chunk, v) for chunk in range(v)] for base in (FORWARD, BACKWARD)])
    faces = colours[work.backward.astype(int), work.chunk]
    gap = min(0.012 / unit, 0.1 * shortest)  # a thin line between neighbours
    corners = [
        _corners(start + gap, start + size - gap, stage)
        for start, size, stage in zip(work.start.tolist(), work.width.tolist(), work.stage.tolist(), strict=True)
    ]
    drawn = PolyCollection(corners, facecolor=faces, linewidth=0)
    drawn.set_rasterized(len(corners) > _MAX_VECTOR)
    axes.add_collection(drawn)
    if unit * shortest >= 0.055 * label + 0.04 and len(corners) <= _MAX_VECTOR:
        for stage, microbatch, start, size, face in zip(
            work.stage, work.microbatch, work.start, work.width, faces, strict=True
        ):
            dark = face @ (0.299, 0.587, 0.114) < 0.6
            place = (start + size / 2, stage)
            colour = "white" if dark else "black"
            axes.text(*place, str(microbatch), ha="center", va="center_baseline", color=colour)

    lines = headline(schedule, simulation)
    figure.text(left / figure.get_figwidth(), 1 - 0.2 / figure.get_figheight(), lines[0], fontsize=10, va="center")
    figure.text(left / figure.get_figwidth(), 1 - 0.38 / figure.get_figheight(), lines[1], va="center")
    _legend(figure, colours, left)
    return figure


def _corners(begin: float, end: float, stage: int) -> list[tuple[float, float]]:
    top, bottom = stage - 0.44, stage + 0.44
    return [(begin, top), (end, top), (end, bottom), (begin, bottom)]


def _shade(base: str, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    """Returns the colour of a chunk, the later the lighter."""
    red, green, blue = (int(base[i : i + 2], 16) / 255 for i in (1, 3, 5))
    white = 0.6 * chunk / max(num_chunks - 1, 1)
    return red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white


def _legend(figure: Any, colours: np.ndarray, left: float) -> None:
    from matplotlib.patches import Patch

    v = colours.shape[1]
    chunks = range(v) if v <= 4 else (0, v - 1)
    handles = [
        Patch(facecolor=tuple(colours[way, chunk]), label=name if v == 1 else f"{name}, chunk {chunk}")
        for way, name in enumerate(("forward", "backward"))
        for chunk in chunks
    ]
    handles.append(Patch(facecolor=IDLE, label="idle"))
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(left / figure.get_figwidth(), 0.02),
        ncols=len(handles),
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        handlelength=1,
        handleheight=1,
        columnspacing=1.2,
    )
