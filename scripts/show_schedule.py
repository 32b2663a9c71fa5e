"""Show a pipeline schedule: as text, in numbers, and as a picture.

    python scripts/show_schedule.py --pp 4 --num-microbatches 8 --chunks 2
    python scripts/show_schedule.py --pp 4 --num-microbatches 8 --schedule gpipe --output gpipe  # gpipe.svg, gpipe.png
    python scripts/show_schedule.py --pp 4 --num-microbatches 8 --output docs/pictures/schedule_1f1b.svg

In the text F3 is the forward of micro-batch 3, B3b its backward in the second chunk, . an idle slot. Pictures need
matplotlib (extra `plots`).

Exit status: 0 done, 2 an option or a file cannot be used, or there is no matplotlib for --output.
"""

import argparse
import importlib.util
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from jmegatron.errors import ConfigError, UsageError
from jmegatron.pipeline.picture import missing_matplotlib, number_lines, text_lines, write_picture
from jmegatron.pipeline.schedule import SCHEDULES, build_schedule


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    parser = argparse.ArgumentParser(description="Show a pipeline schedule.", allow_abbrev=False)
    parser.add_argument("--pp", type=int, required=True, help="stages")
    parser.add_argument("--num-microbatches", type=int, required=True, help="of a step and data-parallel rank")
    parser.add_argument("--chunks", type=int, default=1, help="chunks a stage (default: 1)")
    parser.add_argument("--schedule", choices=SCHEDULES, help="default: 1f1b, with several chunks interleaved")
    parser.add_argument("--group-size", type=int, help="micro-batches through a chunk before the next chunk follows")
    parser.add_argument("--loss-delay", type=int, choices=(0, 1), default=0, help="ticks from last forward to loss")
    parser.add_argument("--forward-cost", type=float, default=1.0, help="time of a chunk's forward (default: 1)")
    parser.add_argument("--backward-cost", type=float, default=2.0, help="time of a chunk's backward (default: 2)")
    parser.add_argument(
        "--output", help="write PREFIX.svg and PREFIX.png, or the one file that ends so", metavar="PREFIX"
    )
    given = parser.parse_args(arguments)
    try:
        show(given)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def show(given: argparse.Namespace) -> None:
    """Prints the schedule, and writes its picture if asked to."""
    costs = (given.forward_cost, given.backward_cost)
    if not all(math.isfinite(cost) and cost > 0 for cost in costs):
        raise ConfigError(f"--forward-cost, --backward-cost: got {costs[0]:g}, {costs[1]:g}, expected more than 0")
    name = given.schedule or ("1f1b" if given.chunks == 1 else "interleaved")
    if given.loss_delay and name == "1f1b-low-memory":
        raise ConfigError(f"--loss-delay {given.loss_delay}: 1f1b-low-memory has none; fix: leave it out")
    schedule = build_schedule(
        name,
        given.pp,
        given.num_microbatches,
        given.chunks,
        group_size=given.group_size,
        loss_delay=given.loss_delay,
    )
    for line in text_lines(schedule, shutil.get_terminal_size((120, 24)).columns):
        print(line)
    for line in number_lines(schedule, *costs, group_size=given.group_size):
        print(line)
    if given.output is not None:
        paths = picture_paths(given.output)
        write_picture(schedule, paths, *costs)
        print(f"wrote {', '.join(map(str, paths))}")
    elif importlib.util.find_spec("matplotlib") is None:
        print(missing_matplotlib())


def picture_paths(output: str) -> list[Path]:
    """Returns the files that --output names."""
    if not output or Path(output).is_dir():
        raise UsageError(f"--output: got {output!r}, expected the beginning of a file name")
    if not Path(output).parent.is_dir():
        raise UsageError(f"--output: there is no folder {Path(output).parent}")
    if output.endswith((".svg", ".png")):
        return [Path(output)]
    return [Path(output + ending) for ending in (".svg", ".png")]


if __name__ == "__main__":
    sys.exit(main())
