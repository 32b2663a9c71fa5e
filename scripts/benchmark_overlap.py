"""How much of the distributed optimizer's communication eight H100s would wait for, with overlap off and on.

    python scripts/benchmark_overlap.py [--json PATH]

Needs JAX's CUDA plugin (extra dryrun) and no GPU; takes some ten minutes of one core. Compiles the step that train.py
runs (16 layers, hidden 4096, 4096 tokens, bf16, 8 micro-batches of a rank, --use-distributed-optimizer) and prints a
markdown table, a row a program:

    exposed        what XLA's scheduler says that the device waits for reduce-scatters and all-gathers (all over dp), of
                   each computation times its executions in a step, milliseconds
    step           the scheduler's total time of each computation times its executions
    matmuls alone  the matmul FLOPs at the card's peak, a bound that no step reaches
    not beside     the same transfers as a second, cruder figure: bytes over NVLink of those that have no matmul between
                   start and end, each at its whole length, and nothing of the rest

The times are XLA's model of an H100, not measured ones. The scheduler gives a loop no time, so that what it puts
beside one counts as exposed.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

# Sets JAX_PLATFORMS before jax is imported.
from benchmark_pipeline import HEADS, HIDDEN, NUM_GPUS, SCHEDULER_LOG, SEQ, VOCAB, scheduler_statistics

from jmegatron.config import load_config
from jmegatron.planner import cards, hlo
from jmegatron.planner.topology import compile_for, compile_only_devices
from jmegatron.training.program import Program, build_program, resolve_for_run

SWITCHES = ("--overlap-grad-reduce", "--overlap-param-gather")
KINDS = ("reduce-scatter", "all-gather")


@dataclasses.dataclass(frozen=True)
class Case:
    """One program."""

    pp: int
    overlap: int
    """How many of `SWITCHES` are on."""
    num_microbatches: int = 8
    num_layers: int = 16

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return NUM_GPUS // self.pp


CASES = [Case(pp, overlap) for pp in (1, 2) for overlap in (0, 1, 2)]


# ---- one program --------------------------------------------------------------------------------------------------
def build(case: Case) -> Program:
    """Returns the program of a case."""
    line = (
        f"--num-layers {case.num_layers} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --ffn-hidden-size "
        f"{4 * HIDDEN} --seq-length {SEQ} --max-position-embeddings {SEQ} --vocab-size {VOCAB} --micro-batch-size 1 "
        f"--global-batch-size {case.num_microbatches * case.dp} --lr 1e-4 --train-iters 10 --mock-data --bf16 "
        f"--hidden-dropout 0 --attention-dropout 0 --attention-backend fused --untie-embeddings-and-output-weights "
        f"--pipeline-model-parallel-size {case.pp} --use-distributed-optimizer"
    ).split()
    config, _ = resolve_for_run(load_config([*line, *SWITCHES[: case.overlap]]), NUM_GPUS)
    return build_program(config, compile_only_devices("h100", NUM_GPUS))


def compile_case(case: Case) -> dict[str, Any]:
    """Returns the figures of a case that its compiled program tells."""
    program = build(case)
    state, batch = program.abstract_state(), program.abstract_batch()
    compiled = compile_for(program.train_step(), state, batch, program.dropout_key())
    module, memory, mesh_shape = hlo.load(compiled), hlo.memory(compiled), dict(program.mesh.shape)
    records = [one for one in hlo.collectives(module, mesh_shape) if "dp" in (one.axes or ()) and one.kind in KINDS]
    beside = {pair.start for pair in hlo.async_pairs(module, mesh_shape) if pair.is_hidden}
    h100 = cards.card("h100")
    return {
        **dataclasses.asdict(case),
        "executions": executions(module),
        "matmul_us": hlo.matmul_flops(module).total / h100.peak_bf16_flops * 1e6,
        "temp_bytes": memory.temp_bytes,
        "argument_bytes": memory.argument_bytes,
        "transfers": [
            {
                "kind": record.kind,
                "us": record.wire_bytes / h100.nvlink_bytes_per_s * 1e6,
                "executions": record.executions,
                "beside_matmul": record.name in beside,
            }
            for record in records
        ],
    }


def executions(module: hlo.Module) -> dict[str, int]:
    """Returns how often a step runs the entry computation and the body of each loop."""
    body = {each.name: each.called("body")[0] for each, _ in hlo.walk(module) if each.opcode == "while"}
    times = {module.entry.name: 1}
    for loop in hlo.loops(module):
        if loop.trip_count is None or loop.site.executions is None:
            raise RuntimeError(f"{loop.name}: the program does not tell how often it runs")
        times[body[loop.name]] = loop.trip_count * loop.site.executions
    return times


def compile_with_log(case: Case) -> dict[str, Any]:
    """Returns the figures of a case with, per computation, the microseconds that the scheduler states."""
    command = [sys.executable, os.path.abspath(__file__), "--case", json.dumps(dataclasses.asdict(case))]
    environment = {**os.environ, **SCHEDULER_LOG}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        statistics = scheduler_statistics(process.stderr)
        text = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    row = json.loads(text)
    missing = row["executions"].keys() - statistics["after"].keys()
    if missing:
        raise RuntimeError(f"no statistics of {', '.join(sorted(missing))}")
    return {
        **row,
        **{when: {name: rows.get(name, {}) for name in row["executions"]} for when, rows in statistics.items()},
    }


# ---- the table ----------------------------------------------------------------------------------------------------
def summed(row: dict[str, Any], what: str, when: str = "after") -> float:
    """Returns microseconds a step of a kind (or "total"): of each computation times its executions."""
    return sum(row[when][name].get(what, 0.0) * times for name, times in row["executions"].items())


def not_beside(row: dict[str, Any]) -> float:
    """Returns microseconds a step of the transfers that have no matmul between start and end."""
    return sum(each["us"] * each["executions"] for each in row["transfers"] if not each["beside_matmul"])


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines of the table."""
    lines = [
        "| dp x pp | overlap | transfers, ms | exposed reduce-scatter, ms | exposed all-gather, ms | step, ms |"
        " exposed / step | matmuls alone, ms | not beside a matmul, ms | temp GB |",
        "|" + " --- |" * 10,
    ]
    for row in rows:
        exposed = [summed(row, kind) for kind in KINDS]
        whole = sum(each["us"] * each["executions"] for each in row["transfers"])
        step = summed(row, "total")
        name = ("off", "gradients", "gradients, parameters")[row["overlap"]]
        times = [f"{us / 1e3:.2f}" for us in (whole, *exposed, step)]
        cells = [f"{NUM_GPUS // row['pp']} x {row['pp']}", name, *times, f"{sum(exposed) / step:.2%}"]
        cells += [f"{row['matmul_us'] / 1e3:.0f}", f"{not_beside(row) / 1e3:.2f}", f"{row['temp_bytes'] / 1e9:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, and writes what it was made from where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--json", metavar="PATH", help="write the figures there")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.case:
        print(json.dumps(compile_case(Case(**json.loads(given.case)))))
        return 0
    rows = []
    for case in CASES:
        rows.append(compile_with_log(case))
        print("\n".join(table(rows[-1:]) if len(rows) == 1 else table(rows[-1:])[-1:]), flush=True)
        if given.json:
            with open(given.json, "w", encoding="utf-8") as file:
                json.dump(rows, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
