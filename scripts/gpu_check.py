"""Checks on one GPU what a machine without one cannot show: fused attention's numbers, and how fast a step is.

    python scripts/gpu_check.py [--json PATH] [--minutes 8] [--rehearse]

1. attention   fused forward and backward against blockwise in fp32 on the same rounded inputs: causal, grouped queries
2. ring        the ring of context parallelism, its ranks emulated side by side on one GPU by vmap, with the fused
               kernel, against whole attention: the backward from the global log-sum-exp, which no CPU run reaches
3. step        a training step of a GPT of 1.5e9 parameters at 4096 tokens in bf16: seconds, tokens/s, MFU, and the peak
               of memory against what the compiler said

Prints a table and writes JSON. Without a GPU it says so and exits with 0. `--rehearse` runs the same code anywhere at
toy sizes with the unfused kernel: it shows that the script works and says nothing of a GPU. Exit status 1: a number is
wrong; a check that the time did not allow is listed as not run.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmegatron.config import load_config
from jmegatron.context_parallel import ring
from jmegatron.context_parallel.blocks import Blocks, Masks, Queries, joined
from jmegatron.context_parallel.layout import to_order
from jmegatron.ops.attention import attention, attention_backward, attention_forward
from jmegatron.ops.attention_mask import AttentionMask
from jmegatron.planner import cards, formulas
from jmegatron.training import startup
from jmegatron.training.build import formula_shape
from jmegatron.training.program import build_program, resolve_for_run

TOLERANCE = 2e-2
"""Largest difference over largest value: bf16 has 8 bits of mantissa, rounded a few times on the way."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the checks are, and which kernel they ask for."""

    backend: Any
    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    ring_ranks: tuple[int, ...]
    step_options: str
    repeats: int


GPU = Sizes(
    backend="fused",
    batch=2,
    seq=4096,
    heads=16,
    kv_heads=4,
    head_dim=128,
    ring_ranks=(2, 4, 8),
    step_options="--num-layers 28 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 8192 --seq-length 4096"
    " --max-position-embeddings 4096 --vocab-size 50257 --micro-batch-size 4 --global-batch-size 16 --bf16"
    " --attention-backend fused",
    repeats=10,
)
REHEARSAL = Sizes(
    backend="unfused",
    batch=1,
    seq=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ring_ranks=(2, 4),
    step_options="--num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 --seq-length 32"
    " --max-position-embeddings 32 --vocab-size 61 --micro-batch-size 2 --global-batch-size 4 --bf16",
    repeats=2,
)


# ---- measuring ----------------------------------------------------------------------------------------------------
def seconds_of(function: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call until its result is there; the first call, which compiles, is left out."""
    jax.block_until_ready(function())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def difference(got: Any, expected: Any) -> float:
    """Largest difference over the largest expected value; infinite where a number is not finite."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def random_inputs(sizes: Sizes) -> tuple[Any, ...]:
    """Query, key, value and the output's gradient, bf16."""
    shape = lambda heads: (sizes.batch, sizes.seq, heads, sizes.head_dim)  # noqa: E731
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
    return tuple(
        jax.random.normal(k, shape(n), jnp.float32).astype(jnp.bfloat16) for k, n in zip(keys, heads, strict=True)
    )


def reference(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Output and gradients of blockwise attention in fp32 on the same numbers."""
    query, key, value, d_out = (x.astype(jnp.float32) for x in inputs)

    @jax.jit
    def run(query, key, value, d_out):
        with jax.default_matmul_precision("highest"):
            out, vjp = jax.vjp(lambda *x: attention(*x, causal=True, backend="unfused")[0], query, key, value)
            return out, *vjp(d_out)

    return run(query, key, value, d_out)


# ---- the checks ---------------------------------------------------------------------------------------------------
def check_attention(sizes: Sizes) -> list[dict[str, Any]]:
    """Fused attention as the model calls it, and the two primitives that the ring calls."""
    inputs = random_inputs(sizes)
    expected = reference(inputs)
    options = dict(causal=True, backend=sizes.backend)

    @jax.jit
    def forward(query, key, value):
        return attention(query, key, value, **options)[0]

    @jax.jit
    def both(query, key, value, d_out):
        out, vjp = jax.vjp(forward, query, key, value)
        return out, *vjp(d_out)

    @jax.jit
    def primitives(query, key, value, d_out):
        mask = AttentionMask(causal=True)
        out, lse = attention_forward(query, key, value, mask, backend=sizes.backend)
        return out, *attention_backward(query, key, value, out, lse, d_out, mask, backend=sizes.backend)

    names = ("out", "dq", "dk", "dv")
    flops = 4 * sizes.batch * sizes.heads * sizes.head_dim * sizes.seq**2 / 2
    forward_s = seconds_of(lambda: forward(*inputs[:3]), sizes.repeats)
    both_s = seconds_of(lambda: both(*inputs), sizes.repeats)
    blockwise = jax.jit(lambda *x: jax.vjp(lambda *y: attention(*y, causal=True)[0], *x[:3])[1](x[3]))
    rows = [
        {
            "check": f"{sizes.backend} attention, {name}",
            "errors": {n: difference(g, e) for n, g, e in zip(names, run(*inputs), expected, strict=True)},
        }
        for name, run in (("differentiated", both), ("by its two parts", primitives))
    ]
    rows[0] |= {
        "forward_ms": forward_s * 1e3,
        "forward_tflops": flops / forward_s / 1e12,
        "forward_backward_ms": both_s * 1e3,
        "forward_backward_tflops": 3.5 * flops / both_s / 1e12,
        "blockwise_forward_backward_ms": seconds_of(lambda: blockwise(*inputs), 2) * 1e3,
    }
    return rows


def check_ring(sizes: Sizes) -> list[dict[str, Any]]:
    """The ring of `context_parallel/ring.py`, every rank a row of a vmap, against whole attention."""
    inputs = random_inputs(sizes)
    expected = reference(inputs)
    rows = []
    for ranks in sizes.ring_ranks:
        blocks = Blocks("cp", ranks, "zigzag", causal=True, window=None, backend=sizes.backend)

        def one_rank(query, key, value, d_out, blocks=blocks):
            queries, key_value = blocks.cut(query, 1), blocks.stacked(key, value)
            merged = ring.forward(blocks, queries, key_value, Masks())
            out = merged.out.astype(query.dtype)
            found = Queries(queries, out, merged.lse, blocks.cut(d_out, 1))
            gradients = ring.backward(blocks, found, key_value, Masks())
            d_key, d_value = joined(gradients.key_value, 2)
            return joined(out, 1), joined(gradients.query, 1), d_key, d_value

        def by_rank(x, ranks=ranks):
            x = to_order(x, ranks, 1)
            return jnp.moveaxis(x.reshape(x.shape[0], ranks, -1, *x.shape[2:]), 1, 0)

        found = jax.jit(jax.vmap(one_rank, axis_name="cp"))(*map(by_rank, inputs))
        errors = {
            name: difference(got, by_rank(want))
            for name, got, want in zip(("out", "dq", "dk", "dv"), found, expected, strict=True)
        }
        rows.append({"check": f"ring of {ranks} ranks, {sizes.backend}", "errors": errors})
    return rows


def check_step(sizes: Sizes) -> list[dict[str, Any]]:
    """The program that train.py runs, on mock data: seconds of a step, MFU, and memory against the compiler's word."""
    words = f"{sizes.step_options} --lr 1e-4 --train-iters 100 --mock-data --hidden-dropout 0 --attention-dropout 0"
    device = jax.devices()[0]
    config, _ = resolve_for_run(load_config(words.split()), 1)
    program = build_program(config, [device])
    state, key = program.init(), program.dropout_key()
    size, seq = config.training.global_batch_size, config.model.seq_length
    assert size is not None
    text = np.random.default_rng(0).integers(0, config.model.vocab_size, (size, seq + 1)).astype(np.uint16)
    batch = program.put({"text": text, "sample_ids": np.arange(size, dtype=np.uint32)})
    start = time.perf_counter()
    step = program.train_step().lower(state, batch, key).compile()
    compile_s = time.perf_counter() - start
    losses, times = [], []
    for _ in range(sizes.repeats + 2):
        start = time.perf_counter()
        state, metrics = step(state, batch, key)
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter() - start)
    step_s = statistics.median(times[2:])
    flops = formulas.model_flops_per_step(formula_shape(config), size * seq, causal_skip=True)
    card = cards.card_of_device_kind(device.device_kind)
    memory = step.memory_analysis()
    row: dict[str, Any] = {
        "check": "training step",
        "parameters": sum(int(leaf.size) for leaf in jax.tree.leaves(state.parameters)),
        "step_s": step_s,
        "slowest_over_fastest": max(times[2:]) / min(times[2:]),
        "tokens_per_s": size * seq / step_s,
        "tflops": flops / step_s / 1e12,
        "mfu": None if card is None else formulas.mfu(flops, step_s, 1, card.peak_bf16_flops),
        "compile_s": compile_s,
        "compiler_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        # The same batch again and again must be learnt.
        "errors": {"loss does not fall": 0.0 if losses[-1] < losses[0] else float("inf")},
    }
    return [row]


CHECKS = {"attention": check_attention, "ring": check_ring, "step": check_step}


# ---- the report ---------------------------------------------------------------------------------------------------
def run_checks(sizes: Sizes, seconds: float) -> list[dict[str, Any]]:
    """Returns the rows of all checks; one that fails does not keep the others from running."""
    rows, start = [], time.perf_counter()
    for name, check in CHECKS.items():
        if time.perf_counter() - start > seconds:
            rows.append({"check": name, "not_run": "the time is up"})
            continue
        print(f"{name} ...", flush=True)
        try:
            rows += check(sizes)
        except Exception as error:  # said in the report, with the rest of it
            traceback.print_exc()
            rows.append({"check": name, "failed": f"{type(error).__name__}: {str(error)[:300]}"})
    return rows


def is_right(row: dict[str, Any]) -> bool:
    """Whether nothing of a row is wrong (not run is not wrong)."""
    return "failed" not in row and all(error <= TOLERANCE for error in row.get("errors", {}).values())


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = []
    for row in rows:
        word = "not run" if "not_run" in row else "right" if is_right(row) else "WRONG"
        figures = {**row.get("errors", {}), **{k: v for k, v in row.items() if k not in ("check", "errors")}}
        text = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
        lines.append(f"{word:8}{row['check']:44}{text}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Runs the checks and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--minutes", type=float, default=8.0, help="no check starts after this time (default 8)")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes without a GPU's kernel, on any machine")
    options = parser.parse_args(argv)
    device = jax.devices()[0]
    if device.platform != "gpu" and not options.rehearse:
        print(f"no GPU here ({device.device_kind}): nothing was checked and nothing is claimed")
        return 0
    rows = run_checks(REHEARSAL if options.rehearse else GPU, 60 * options.minutes)
    print(table(rows))
    if options.rehearse:
        print("a rehearsal: the figures say nothing of a GPU")
    if options.json:
        found = {"device": device.device_kind, "rehearsal": options.rehearse, "versions": startup.versions()}
        with open(options.json, "w") as file:
            json.dump(found | {"date": time.strftime("%Y-%m-%d"), "tolerance": TOLERANCE, "rows": rows}, file, indent=1)
    return 0 if all(map(is_right, rows)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
