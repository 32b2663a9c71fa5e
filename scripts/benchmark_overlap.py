"""How much of the distributed optimizer's communication eight H100s would wait for, with overlap off and on.

    python scripts/benchmark_overlap.py [--json PATH]

Needs JAX's CUDA plugin (extra dryrun) and no GPU; takes some ten minutes of one core. Compiles the step that train.py
runs (16 layers, hidden 4096, 4096 tokens, bf16, 8 micro-batches of a rank, --use-distributed-optimizer) and prints a
markdown table, a row a program:

    transfers      bytes of reduce-scatters and all-gathers (all over dp) over NVLink's bandwidth
    exposed        what the device waits for them as XLA schedules them
    step           the matmul FLOPs at the card's peak: less than any step takes, so the share is more than it can be
    not beside     a second, cruder figure: those transfers that have no matmul between start and end, each at its whole
                   length, and nothing of the rest

Milliseconds a step. "Exposed" is of XLA's own model of an H100, not measured: its scheduler logs it for each
computation that holds transfers, here times how often that runs. The model's transfers are slower than the bandwidth (a
reduce-scatter by half), and it gives a loop no time, so that what stands beside one counts as exposed.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

# Sets JAX_PLATFORMS before jax is imported.
from benchmark_pipeline import HEADS, HIDDEN, NUM_GPUS, SEQ, VOCAB, run_with_log

from jmegatron.config import load_config
from jmegatron.planner import cards, hlo
from jmegatron.planner.hlo_schedule import bodies_of, executions
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
    beside = {pair.operation for pair in hlo.async_pairs(module, mesh_shape) if pair.is_hidden}
    h100, bodies = cards.card("h100"), bodies_of(module)
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
                "computation": bodies[record.site.loops[-1]] if record.site.loops else module.entry.name,
                "executions": record.executions,
                "beside_matmul": record.name in beside,
            }
            for record in records
        ],
    }


def compile_with_log(case: Case) -> dict[str, Any]:
    """Returns the figures of a case with, per computation, the microseconds that the scheduler states."""
    row, statistics = run_with_log(__file__, case)
    unknown = {each["computation"] for each in row["transfers"]} - statistics["after"].keys()
    if unknown:
        raise RuntimeError(f"no statistics of {', '.join(sorted(unknown))}")
    return {**row, "after": {name: rows for name, rows in statistics["after"].items() if name in row["executions"]}}


# ---- the table ----------------------------------------------------------------------------------------------------
def exposed_ms(row: dict[str, Any], kind: str) -> float:
    """Returns milliseconds a step that the device waits for a kind: of each computation times its executions."""
    return sum(rows.get(kind, 0.0) * row["executions"][name] for name, rows in row["after"].items()) / 1e3


def transfer_ms(transfers: Sequence[dict[str, Any]]) -> float:
    """Returns milliseconds a step of transfers at the link's bandwidth."""
    return sum(each["us"] * each["executions"] for each in transfers) / 1e3


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines of the table."""
    lines = [
        "| dp x pp | overlap | reduce-scatter: transfers | exposed | all-gather: transfers | exposed | step |"
        " exposed / step | not beside a matmul | temp GB |",
        "|" + " --- |" * 10,
    ]
    for row in rows:
        exposed = [exposed_ms(row, kind) for kind in KINDS]
        transfers = [transfer_ms([each for each in row["transfers"] if each["kind"] == kind]) for kind in KINDS]
        bare = transfer_ms([each for each in row["transfers"] if not each["beside_matmul"]])
        step = row["matmul_us"] / 1e3
        name = ("off", "gradients", "gradients, parameters")[row["overlap"]]
        times = [f"{ms:.2f}" for pair in zip(transfers, exposed, strict=True) for ms in pair]
        cells = [f"{NUM_GPUS // row['pp']} x {row['pp']}", name, *times, f"{step:.0f}", f"{sum(exposed) / step:.2%}"]
        lines.append("| " + " | ".join([*cells, f"{bare:.2f}", f"{row['temp_bytes'] / 1e9:.1f}"]) + " |")
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
