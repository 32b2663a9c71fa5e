"""Attention in blocks against jax.nn.dot_product_attention's XLA path: time, memory and work of forward and backward.

    python scripts/benchmark_attention.py [--seq-length 4096] [--cases causal,gqa] [--repeats 5] [--json PATH]

One device, one sequence, 8 heads of width 64, the same arrays. Contenders of a case take turns; ratios are of the least
times. Memory is what XLA reserves for temporaries, and how much the peak of a new process that runs the compiled
function once rises over what it held before (Linux). Prints a table.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jmegatron.ops.attention import attention
from jmegatron.planner import hlo

HEADS, HEAD_DIM = 8, 64
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "gqa": {"kv_heads": 2},
    "bf16": {"dtype": jnp.bfloat16},
    "full": {"causal": False},
    "window": {"window": 511},
    "batch": {"batch": 8, "seq": 512},
}
CONTENDERS = ("blocks", "dense")


def build(case: str, contender: str, seq: int) -> tuple[Callable[..., Any], list[jax.Array]]:
    """Returns (the compiled forward and backward, its arguments)."""
    options = {"kv_heads": HEADS, "dtype": jnp.float32, "causal": True, "window": None, "batch": 1, "seq": seq}
    options |= CASES[case]
    causal, window, rows = options["causal"], options["window"], (options["batch"], options["seq"])

    def blocks(query: Any, key: Any, value: Any) -> Any:
        return attention(query, key, value, causal=causal, window=window)[0]

    def dense(query: Any, key: Any, value: Any) -> Any:
        local = None if window is None else (window, 0)
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=causal, local_window_size=local, implementation="xla"
        )

    core = {"blocks": blocks, "dense": dense}[contender]

    def both(query: Any, key: Any, value: Any, d_out: Any) -> Any:
        out, transpose = jax.vjp(core, query, key, value)
        return out, *transpose(d_out)

    heads = (HEADS, options["kv_heads"], options["kv_heads"], HEADS)
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [
        jax.random.normal(key, (*rows, n, HEAD_DIM), options["dtype"]) for key, n in zip(keys, heads, strict=True)
    ]
    return jax.jit(both).lower(*arrays).compile(), arrays


def peak(case: str, contender: str, seq: int) -> None:
    """Prints the bytes by which this process's peak rises while the compiled function runs once."""
    run, arrays = build(case, contender, seq)
    jax.block_until_ready(arrays)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident("VmRSS")
    jax.block_until_ready(run(*arrays))
    print(_resident("VmHWM") - before)


def _resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def peak_of_process(case: str, contender: str, seq: int) -> int | None:
    """Returns `peak` of a new process; None where the system does not tell."""
    line = [sys.executable, __file__, "--peak", case, contender, "--seq-length", str(seq)]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ)
    return int(done.stdout.split()[-1]) if done.returncode == 0 else None


def measure(case: str, seq: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Returns the numbers of each contender."""
    built = {name: build(case, name, seq) for name in CONTENDERS}
    outputs = {name: run(*arrays) for name, (run, arrays) in built.items()}
    errors = [
        float(abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max() / abs(b.astype(jnp.float32)).max())
        for a, b in zip(*outputs.values(), strict=True)
    ]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    for _ in range(repeats):
        for name, (run, arrays) in built.items():
            start, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(run(*arrays))
            times[name].append((time.perf_counter() - start, time.process_time() - cpu))
    return {
        name: {
            "min_s": min(wall for wall, _ in times[name]),
            "cpu_min_s": min(cpu for _, cpu in times[name]),
            "temp_bytes": hlo.memory(run).temp_bytes,
            "peak_rise_bytes": peak_of_process(case, name, seq),
            "matmul_flops": hlo.matmul_flops(hlo.load(run)).total,
            "largest_difference": max(errors),
        }
        for name, (run, _) in built.items()
    }


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Returns the report as markdown."""
    lines = [
        "| case | contender | min s | ratio | CPU ratio | temporaries MB | peak rise MB | ratios | matmul GFLOP |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case, rows in results.items():
        base = rows["dense"]
        for name, row in rows.items():
            ratio = {key: row[key] / base[key] for key in ("min_s", "cpu_min_s", "temp_bytes")}
            rise, base_rise = row["peak_rise_bytes"], base["peak_rise_bytes"]
            lines.append(
                f"| {case} | {name} | {row['min_s']:.3f} | {ratio['min_s']:.3f} | {ratio['cpu_min_s']:.3f} |"
                f" {row['temp_bytes'] / 1e6:.0f} | {'-' if rise is None else f'{rise / 1e6:.0f}'} |"
                f" {ratio['temp_bytes']:.3f}, {f'{rise / base_rise:.3f}' if rise and base_rise else '-'} |"
                f" {row['matmul_flops'] / 1e9:.1f} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints the table, and writes the result where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--seq-length", type=int, default=4096, help="of all cases but batch (8 x 512)")
    add("--cases", default="causal,gqa", help=f"of {','.join(CASES)}")
    add("--repeats", type=int, default=5)
    add("--json", metavar="PATH", help="write the result there")
    add("--peak", nargs=2, metavar=("CASE", "CONTENDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.peak:
        peak(*options.peak, options.seq_length)
        return 0
    unknown = set(options.cases.split(",")) - set(CASES)
    if unknown:
        parser.error(f"--cases: unknown {', '.join(sorted(unknown))}, expected some of {','.join(CASES)}")
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {device.device_kind}, {os.cpu_count()} CPUs, {options.seq_length} tokens")
    results = {case: measure(case, options.seq_length, options.repeats) for case in options.cases.split(",")}
    print(table(results))
    for case, rows in results.items():
        print(f"{case}: largest difference between the two, relative: {rows['blocks']['largest_difference']:.1e}")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
