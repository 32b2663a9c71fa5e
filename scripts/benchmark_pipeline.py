"""What XLA makes of the pipelined training step for eight H100s: exposed communication, memory, compile time.

    python scripts/benchmark_pipeline.py [--json PATH] [--only exposed|plain]

Needs JAX's CUDA plugin (extra dryrun) and no GPU; takes some ten minutes of one core. Compiles the step that train.py
runs (16 layers, hidden 4096, 4096 tokens, bf16, tp 2, sequence parallel) and prints markdown tables:

    exposed    a steady tick that computes a loss, outside its loops over layers: microseconds in which the device waits
    plain      temporaries of a device, size of the program, seconds of tracing and compiling

The microseconds are those of XLA's own model of an H100, not measured ones. Its latency hiding scheduler logs them
(`TF_CPP_VMODULE`) and gives a loop no time: what is hidden beside a loop counts as exposed there. So permutes, which
stand beside whole loops over layers, are counted; for the others a second figure takes all that have no matmul beside
them at their whole length, and nothing of the rest.
"""

import argparse
import collections
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

# Before jax is imported: no GPU is needed, and autotuning would need one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jmegatron.config import load_config
from jmegatron.pipeline.schedule import rings
from jmegatron.planner import formulas, hlo
from jmegatron.planner.hlo_schedule import SCHEDULER_LOG, bodies_of, scheduler_statistics
from jmegatron.planner.topology import compile_for, compile_only_devices
from jmegatron.training.build import formula_shape
from jmegatron.training.program import Program, build_program, resolve_for_run

NUM_GPUS, TP = 8, 2
HIDDEN, SEQ, VOCAB, HEADS = 4096, 4096, 32768, 32
KINDS = ("collective-permute", "all-reduce", "all-gather", "reduce-scatter")


@dataclasses.dataclass(frozen=True)
class Case:
    """One program."""

    pp: int
    chunks: int = 1
    num_microbatches: int = 16
    num_layers: int = 16
    schedule: str | None = None
    loss_delay: int = 0


# ---- one program --------------------------------------------------------------------------------------------------
def build(case: Case) -> Program:
    """Returns the program of a case."""
    dp = NUM_GPUS // (case.pp * TP)
    line = (
        f"--num-layers {case.num_layers} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --ffn-hidden-size "
        f"{4 * HIDDEN} --seq-length {SEQ} --max-position-embeddings {SEQ} --vocab-size {VOCAB} --micro-batch-size 1 "
        f"--global-batch-size {case.num_microbatches * dp} --lr 1e-4 --train-iters 10 --mock-data --hidden-dropout 0 "
        f"--attention-dropout 0 --bf16 --attention-backend fused --sequence-parallel --tensor-model-parallel-size {TP} "
        f"--pipeline-model-parallel-size {case.pp} --untie-embeddings-and-output-weights"
    ).split()
    line += ["--num-virtual-stages-per-pipeline-rank", str(case.chunks)] if case.chunks > 1 else []
    line += ["--pipeline-schedule", case.schedule] if case.schedule else []
    config, _ = resolve_for_run(load_config(line), NUM_GPUS)
    program = build_program(config, compile_only_devices("h100", NUM_GPUS))
    # No option sets it: the better order is what runs train with.
    pipeline = dataclasses.replace(program.settings.pipeline, loss_delay=case.loss_delay)
    return dataclasses.replace(program, settings=dataclasses.replace(program.settings, pipeline=pipeline))


def compile_case(case: Case) -> dict[str, Any]:
    """Returns the figures of a case that its compiled program tells."""
    program = build(case)
    start = time.perf_counter()
    state, batch = program.abstract_state(), program.abstract_batch()
    compiled = compile_for(program.train_step(), state, batch, program.dropout_key())
    seconds = time.perf_counter() - start
    module, memory = hlo.load(compiled), hlo.memory(compiled)
    schedule = program.settings.pipeline.build(case.num_microbatches)
    return {
        **dataclasses.asdict(case),
        "seconds": seconds,
        "temp_bytes": memory.temp_bytes,
        "argument_bytes": memory.argument_bytes,
        "num_instructions": sum(len(each.instructions) for each in module.computations.values()),
        "places": rings(schedule).residuals.size,
        "chunk_flops": chunk_flops(program, case),
        "ticks": steady_ticks(module, dict(program.mesh.shape)),
    }


def chunk_flops(program: Program, case: Case) -> float:
    """Returns matmul FLOPs of a chunk's forward on one device."""
    shape = formula_shape(program.config)
    layers = formulas.forward_flops_per_token(shape) - 2 * shape.vocab_rows * shape.hidden_size
    return layers / (case.pp * case.chunks) * SEQ / TP


def steady_ticks(module: Any, mesh_shape: dict[str, int]) -> list[dict[str, Any]]:
    """Returns the loops whose ticks run forward and backward: computation, number of ticks, loss loop, transfers."""
    loops = hlo.loops(module)
    inside = collections.defaultdict(list)
    for loop in loops:
        if loop.site.loops:
            inside[loop.site.loops[-1]].append(loop)
    body = bodies_of(module)
    pairs = {pair.operation: pair for pair in hlo.async_pairs(module, mesh_shape)}
    found = []
    for loop in loops:
        own = inside[loop.name]
        # Which loops are over layers is told by what is in them: those of the loss reduce over all stages.
        talks: dict[str, set[str]] = {inner.name: set() for inner in own}
        for record in hlo.collectives(module, mesh_shape):
            if record.site.loops and record.site.loops[-1] in talks:
                talks[record.site.loops[-1]].update(record.axes or ())
        layers = [inner for inner in own if talks[inner.name] == {"tp"}]
        losses = [inner for inner in own if "pp" in talks[inner.name]]
        if len(layers) != 2 or loop.trip_count is None or loop.site.executions is None:
            continue
        transfers = [
            {
                "kind": record.kind,
                "axes": record.axes,
                "bytes": record.operand_bytes,
                "async": record.is_async,
                "flops_beside": pairs[record.name].hidden_flops if record.name in pairs else 0,
                "op_name": record.op_name,
            }
            for record in hlo.collectives(module, mesh_shape)
            if record.site.loops[-1:] == (loop.name,)
        ]
        found.append(
            {
                "computation": body[loop.name],
                "ticks": loop.trip_count * loop.site.executions,
                "loss": [(body[inner.name], inner.trip_count) for inner in losses],
                "layers": [(body[inner.name], inner.trip_count) for inner in layers],
                "transfers": transfers,
            }
        )
    return found


# ---- XLA's log ----------------------------------------------------------------------------------------------------
def run_with_log(script: str, case: Any) -> tuple[dict[str, Any], dict[str, dict[str, dict[str, float]]]]:
    """Returns (the JSON that `script --case` prints, what XLA's scheduler logs meanwhile), from a process of its own.

    Raises:
      RuntimeError: it ended with an error.
    """
    command = [sys.executable, os.path.abspath(script), "--case", json.dumps(dataclasses.asdict(case))]
    environment = {**os.environ, **SCHEDULER_LOG}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        statistics = scheduler_statistics(process.stderr)
        text = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return json.loads(text), statistics


def compile_with_log(case: Case) -> dict[str, Any]:
    """Returns the figures of a case and, for each steady tick, the microseconds that the scheduler states."""
    row, statistics = run_with_log(__file__, case)
    for tick in row["ticks"]:
        for when, rows in statistics.items():
            tick[when] = rows[tick["computation"]]
            tick[f"loss_{when}"] = [rows[name] for name, _ in tick["loss"]]
            tick[f"layers_{when}"] = [rows[name] for name, _ in tick["layers"]]
    return row


# ---- tables -------------------------------------------------------------------------------------------------------
def without_matmul(tick: dict[str, Any], kind: str) -> float:
    """Returns microseconds of the transfers of a kind that have no matmul beside them, each at its whole length.

    An upper bound of what they expose; the length is XLA's own, of transfers that nothing hides (before scheduling).
    """
    own = [each for each in tick["transfers"] if each["kind"] == kind and each["bytes"] > 2**20]
    bare = [each for each in own if not each["flops_beside"]]
    return tick["before"].get(kind, 0.0) * len(bare) / len(own) if own else 0.0


def exposed_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the table of steady ticks that compute a loss."""
    lines = [
        "| pp | v | loss delay | temp GB | layers, us | permutes beside layers | log: all-reduce, us | all-gather |"
        " reduce-scatter | no matmul beside: all-reduce, us | all-gather | reduce-scatter |",
        "|" + " --- |" * 12,
    ]
    for row in rows:
        tick = max(row["ticks"], key=lambda tick: len(tick["transfers"]))
        layers = sum(each["total"] * n for each, (_, n) in zip(tick["layers_after"], tick["layers"], strict=True))
        permutes = [each for other in row["ticks"] for each in other["transfers"] if each["kind"] == KINDS[0]]
        # A forward loop over layers is the shortest that hides one.
        hidden = [each for each in permutes if (each["flops_beside"] or 0) >= row["chunk_flops"]]
        cells = [row["pp"], row["chunks"], row["loss_delay"], f"{row['temp_bytes'] / 1e9:.2f}", f"{layers:.0f}"]
        cells.append(f"{len(hidden)} of {len(permutes)}")
        cells += [f"{tick['after'].get(kind, 0):.0f}" for kind in KINDS[1:]]
        cells += [f"{without_matmul(tick, kind):.0f}" for kind in KINDS[1:]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def plain_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the table of memory, program size and compile time."""
    lines = [
        "| schedule | pp | v | layers | micro-batches | chunks kept | temp GB | instructions | compile s |",
        "|" + " --- |" * 9,
    ]
    for row in rows:
        name = row["schedule"] or ("1f1b" if row["chunks"] == 1 else "interleaved")
        cells = [name, row["pp"], row["chunks"], row["num_layers"], row["num_microbatches"], row["places"]]
        cells += [f"{row['temp_bytes'] / 1e9:.3f}", row["num_instructions"], f"{row['seconds']:.1f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


EXPOSED = [Case(pp, chunks, loss_delay=delay) for pp in (2, 4) for chunks in (1, 2) for delay in (0, 1)]
MEMORY = [
    *(Case(4, num_microbatches=m) for m in (8, 16, 32, 64)),
    Case(4, chunks=2),
    Case(4, schedule="gpipe"),
    Case(4, schedule="1f1b-low-memory"),
]
COMPILE = [Case(4, num_layers=layers) for layers in (8, 32)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables, and writes what they were made from where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", choices=("exposed", "plain"), help="one of the two tables")
    parser.add_argument("--json", metavar="PATH", help="write the figures there")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.case:
        print(json.dumps(compile_case(Case(**json.loads(given.case)))))
        return 0
    result: dict[str, Any] = {}
    if given.only != "plain":
        result["exposed"] = []
        for case in EXPOSED:
            result["exposed"].append(compile_with_log(case))
        print("\n".join(exposed_table(result["exposed"])), flush=True)
    if given.only != "exposed":
        compile_case(Case(4, num_microbatches=4))  # the first compile also starts the compiler
        result["plain"] = [compile_case(case) for case in (*MEMORY, *COMPILE)]
        print("\n".join(plain_table(result["plain"])), flush=True)
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
