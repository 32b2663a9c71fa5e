"""Trains the tiny mixture of experts and its dense twin of equal FLOPs, compares their losses, and follows the loads.

    python scripts/benchmark_moe.py [--iterations 300] [--seed 1234] [--json PATH]

One CPU device, some four minutes. The mixture is configs/moe_tiny.yaml (8 experts of width 256, 2 a token), the twin
configs/gpt_tiny.yaml with one layer of width 512 in their place and start values of the same spread: the same matmul
FLOPs but for the router's. Losses are those of the validation text after the last step.

The load of a step is the largest number of tokens of any expert of any layer over its layer's mean; 4.0 if all tokens
choose one. Start values alone make it about 3, and while the warm-up moves all states to one side the router has to
follow: "settled" are the steps after the first 60.

Exit status: 0 the mixture's loss is at most 1.01 of the twin's and no settled step's load above 2; 1 not so; 2 an
option.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SETTLED = 60
LOSS_BOUND, LOAD_BOUND = 1.01, 2.0
RUNS = {
    "mixture": ("--config", "configs/moe_tiny.yaml"),
    "dense": ("--config", "configs/gpt_tiny.yaml", "--ffn-hidden-size", "512", "--init-method-std", "0.06"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--iterations", type=int, default=300, metavar="N", help="of each (default: 300)")
    parser.add_argument("--seed", type=int, default=1234, help="of start values and order of samples (default: 1234)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there as well")
    given = parser.parse_args(arguments)
    if given.iterations <= SETTLED:
        parser.error(f"--iterations: got {given.iterations}, expected more than {SETTLED}, when loads have settled")
    with tempfile.TemporaryDirectory() as folder:
        lines = {name: train(Path(folder) / f"{name}.jsonl", options, given) for name, options in RUNS.items()}
    figures = compare(lines["mixture"], lines["dense"])
    print(table(figures))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    failures = []
    if not figures["loss_ratio"] <= LOSS_BOUND:
        failures.append(f"loss ratio {figures['loss_ratio']:.4f} (at most {LOSS_BOUND})")
    if not figures["load"]["settled"] <= LOAD_BOUND:
        failures.append(f"load of settled steps {figures['load']['settled']:.2f} (at most {LOAD_BOUND})")
    if failures:
        print("not met: " + "; ".join(failures), file=sys.stderr)
    return 1 if failures else 0


def train(metrics: Path, options: Sequence[str], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the lines of the metrics file of one run.

    Raises:
      subprocess.CalledProcessError: it failed; what it said stands in the terminal.
    """
    numbers = ("--train-iters", str(given.iterations), "--seed", str(given.seed), "--log-interval", "1")
    # What lies between the evaluations at the end is no part of the comparison.
    numbers += ("--eval-interval", str(given.iterations), "--num-cpu-devices", "1", "--metrics-file", str(metrics))
    command = [sys.executable, str(ROOT / "train.py"), *options, *numbers]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def compare(mixture: Sequence[dict[str, Any]], dense: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of two runs from the lines of their metrics files."""
    losses = {"mixture": _validation_loss(mixture), "dense": _validation_loss(dense)}
    loads = [line["expert_load_max"] for line in mixture if "expert_load_max" in line]
    above = [step for step, load in enumerate(loads, start=1) if load > LOAD_BOUND]
    return {
        "iterations": len(loads),
        "validation_loss": losses,
        "loss_ratio": losses["mixture"] / losses["dense"],
        "load": {
            "first": loads[0],
            "largest": max(loads),
            "settled": max(loads[SETTLED:]),
            "settled_mean": sum(loads[SETTLED:]) / len(loads[SETTLED:]),
            "last": loads[-1],
            "steps_above": len(above),
            "last_step_above": above[-1] if above else 0,
        },
    }


def _validation_loss(lines: Sequence[dict[str, Any]]) -> float:
    return [line["loss"] for line in lines if line.get("split") == "valid"][-1]


def table(figures: dict[str, Any]) -> str:
    """Returns the figures as markdown."""
    load, losses = figures["load"], figures["validation_loss"]
    rows = [
        (f"validation loss after {figures['iterations']} steps, mixture", f"{losses['mixture']:.4f}"),
        ("the same, dense", f"{losses['dense']:.4f}"),
        ("ratio", f"{figures['loss_ratio']:.4f}"),
        ("load over mean, first step", f"{load['first']:.2f}"),
        ("largest of any step", f"{load['largest']:.2f}"),
        (f"largest after step {SETTLED}", f"{load['settled']:.2f}"),
        (f"mean after step {SETTLED}", f"{load['settled_mean']:.2f}"),
        (f"steps above {LOAD_BOUND:g}, the last of them", f"{load['steps_above']}, {load['last_step_above']}"),
    ]
    return "\n".join(["| | |", "|-|-|", *(f"| {name} | {value} |" for name, value in rows)])


if __name__ == "__main__":
    sys.exit(main())
