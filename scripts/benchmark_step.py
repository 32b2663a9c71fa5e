"""Times jmegatron's training step against a hand-written jitted step of the same mathematics, in one run.

    python scripts/benchmark_step.py [--json PATH]

One device, no communication. The contenders take turns (A B C, A B C, ...), so that a busy machine slows all of them,
and start from the same parameters with the same batches:

    jmegatron      the compiled program that train.py runs
    hand-written   the same GPT in plain JAX with optax.adamw; its losses must equal jmegatron's
    torch          plain PyTorch modules and torch.optim.AdamW, where torch is installed

Conventions: step seconds from the call until the results are ready, batch on the host; host seconds until the call
returns; CPU seconds are those of all threads of this process, which other programs on the machine disturb less; ratios
are hand-written = 1; FLOP/s count 6 x matmul weights x tokens and the whole attention rectangle
(planner/formulas.py), also for kernels that skip half of it; the bare dot is the model's up-projection alone.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmegatron.config import load_config
from jmegatron.data.indexed_dataset import best_dtype
from jmegatron.planner import formulas
from jmegatron.training.build import formula_shape
from jmegatron.training.program import Program, build_program, resolve_for_run

LOSS_TOLERANCE = 1e-5
NUM_LOSSES = 3
"""Steps whose losses are compared before anything is timed."""
LEARNING_RATE, BETA1, BETA2, EPS, DECAY, CLIP = 1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0
Runner = Callable[[dict[str, np.ndarray]], tuple[float, float, float]]
"""One batch -> (seconds until ready, seconds until the call returned, loss); keeps its own state."""


# ---- the hand-written step ----------------------------------------------------------------------------------------
def hand_written_step(heads: int) -> tuple[Callable[..., Any], optax.GradientTransformation]:
    """Returns (the jitted donated step (parameters, state, tokens, labels) -> (..., loss), its optimizer)."""

    def layer_norm(x: Any, p: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    def attention(x: Any, p: Any) -> Any:
        batch, seq, hidden = x.shape
        qkv = (x @ p["qkv"] + p["qkv_bias"]).reshape(batch, seq, 3, heads, hidden // heads)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bsnd,btnd->bnst", q, k) * (hidden // heads) ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), scores, jnp.finfo(scores.dtype).min)
        out = jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores, axis=-1), v)
        return out.reshape(batch, seq, hidden) @ p["out"] + p["out_bias"]

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        x = x + attention(layer_norm(x, p["norm1"]), p)
        inner = jax.nn.gelu(layer_norm(x, p["norm2"]) @ p["up"] + p["up_bias"], approximate=True)
        return x + inner @ p["down"] + p["down_bias"], None

    def loss(p: Any, tokens: Any, labels: Any) -> Any:
        x = p["word"][tokens] + p["position"][: tokens.shape[1]]
        x, _ = jax.lax.scan(layer, x, p["layers"])
        logits = layer_norm(x, p["final_norm"]) @ p["word"].T
        label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - label_logits).mean()

    def decays(parameters: Any) -> Any:
        vector = lambda path: any(part in str(path[-1].key) for part in ("bias", "scale"))  # noqa: E731
        return jax.tree_util.tree_map_with_path(lambda path, _: not vector(path), parameters)

    optimizer = optax.adamw(LEARNING_RATE, BETA1, BETA2, EPS, weight_decay=DECAY, mask=decays)

    def step(parameters: Any, state: Any, tokens: Any, labels: Any) -> tuple[Any, Any, Any]:
        value, gradients = jax.value_and_grad(loss)(parameters, tokens, labels)
        scale = jnp.minimum(1.0, CLIP / (optax.tree.norm(gradients) + 1e-6))
        updates, state = optimizer.update(jax.tree.map(lambda g: g * scale, gradients), state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1)), optimizer


def hand_written_parameters(tree: Any) -> Any:
    """Returns jmegatron's parameters in the hand-written layout: all matrices two-dimensional, q, k and v joined."""
    layers, attention = tree["layers"], tree["layers"]["attention"]
    query, key_value, output = attention["query"], attention["key_value"], attention["output"]
    num_layers, hidden = query["kernel"].shape[:2]
    # [..., heads, 2, d] -> the keys of all heads, then the values of all heads
    flat = lambda a, lead: a.reshape(*lead, -1)  # noqa: E731
    parts = lambda p, name, lead: [  # noqa: E731
        flat(p[name][..., 0, :], lead),
        flat(p[name][..., 1, :], lead),
    ]
    return {
        "word": tree["embedding"]["word"]["embedding"],
        "position": tree["embedding"]["position"]["embedding"],
        "final_norm": tree["final_norm"],
        "layers": {
            "norm1": layers["input_norm"],
            "norm2": layers["mlp_norm"],
            "qkv": np.concatenate(
                [flat(query["kernel"], (num_layers, hidden)), *parts(key_value, "kernel", (num_layers, hidden))], -1
            ),
            "qkv_bias": np.concatenate(
                [flat(query["bias"], (num_layers,)), *parts(key_value, "bias", (num_layers,))], -1
            ),
            "out": output["kernel"].reshape(num_layers, -1, hidden),
            "out_bias": output["bias"],
            "up": layers["mlp"]["up"]["kernel"],
            "up_bias": layers["mlp"]["up"]["bias"],
            "down": layers["mlp"]["down"]["kernel"],
            "down_bias": layers["mlp"]["down"]["bias"],
        },
    }


def hand_written_runner(parameters: Any, heads: int, example: dict[str, np.ndarray]) -> Runner:
    """Returns the runner of the hand-written step."""
    step, optimizer = hand_written_step(heads)
    state = (jax.device_put(parameters), optimizer.init(jax.device_put(parameters)))
    compiled = step.lower(*state, example["tokens"], example["labels"]).compile()

    def run(batch: dict[str, np.ndarray]) -> tuple[float, float, float]:
        nonlocal state
        start = time.perf_counter()
        *new, loss = compiled(*state, batch["tokens"], batch["labels"])
        returned = time.perf_counter()
        state = jax.block_until_ready(tuple(new))
        return time.perf_counter() - start, returned - start, float(loss)

    return run


# ---- jmegatron ----------------------------------------------------------------------------------------------------
def build(arguments: argparse.Namespace) -> Program:
    """Returns the program of train.py for the benchmark's model on the first device."""
    options = {
        "num-layers": arguments.num_layers,
        "hidden-size": arguments.hidden_size,
        "num-attention-heads": arguments.num_attention_heads,
        "seq-length": arguments.seq_length,
        "max-position-embeddings": arguments.seq_length,
        "vocab-size": arguments.vocab_size,
        "make-vocab-size-divisible-by": 1,
        "activation": "gelu_tanh",
        "hidden-dropout": 0.0,
        "attention-dropout": 0.0,
        "lr": LEARNING_RATE,
        "lr-decay-style": "constant",
        "adam-beta1": BETA1,
        "adam-beta2": BETA2,
        "adam-eps": EPS,
        "weight-decay": DECAY,
        "clip-grad": CLIP,
        "micro-batch-size": arguments.batch_size,
        "global-batch-size": arguments.batch_size,
        "train-iters": 1000,
    }
    line = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    config, _ = resolve_for_run(load_config([*line, "--mock-data"]), 1)
    return build_program(config, jax.devices()[:1])


def jmegatron_runner(program: Program) -> tuple[Runner, Any]:
    """Returns (the runner of the program, its start parameters on the host)."""
    state, key = program.init(), program.dropout_key()
    parameters = jax.tree.map(np.array, state.parameters)
    compiled = program.train_step().lower(state, program.abstract_batch(), key).compile()

    def run(batch: dict[str, np.ndarray]) -> tuple[float, float, float]:
        nonlocal state
        start = time.perf_counter()
        new, metrics = compiled(state, program.put({name: batch[name] for name in ("text", "sample_ids")}), key)
        returned = time.perf_counter()
        state = jax.block_until_ready(new)
        return time.perf_counter() - start, returned - start, float(metrics["loss"])

    return run, parameters


# ---- PyTorch ------------------------------------------------------------------------------------------------------
def torch_runner(parameters: Any, heads: int) -> Runner:
    """Returns the runner of the PyTorch twin; takes the hand-written parameters.

    Raises:
        ImportError: torch is not installed.
    """
    import torch
    from torch import nn
    from torch.nn import functional

    torch.set_num_threads(os.cpu_count() or 1)
    vocab, hidden = parameters["word"].shape
    seq = parameters["position"].shape[0]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
            self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(batch, length, hidden))
            return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word, self.position = nn.Embedding(vocab, hidden), nn.Embedding(seq, hidden)
            self.layers = nn.ModuleList(Layer() for _ in range(parameters["layers"]["up"].shape[0]))
            self.final_norm = nn.LayerNorm(hidden)

        def forward(self, tokens: Any, labels: Any) -> Any:
            x = self.word(tokens) + self.position.weight[: tokens.shape[1]]
            for layer in self.layers:
                x = layer(x)
            logits = functional.linear(self.final_norm(x), self.word.weight)
            return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    model = Model()
    _copy_into_torch(model, parameters)
    groups: list[Any] = [[], []]
    for name, parameter in model.named_parameters():
        groups["norm" in name or name.endswith("bias")].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": DECAY}, {"params": groups[1], "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(BETA1, BETA2),
        eps=EPS,
        fused=True,
    )

    def run(batch: dict[str, np.ndarray]) -> tuple[float, float, float]:
        start = time.perf_counter()
        loss = model(torch.from_numpy(batch["tokens"]).long(), torch.from_numpy(batch["labels"]).long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - start
        return seconds, seconds, loss.item()

    return run


def _copy_into_torch(model: Any, parameters: Any) -> None:
    import torch

    def copy(target: Any, value: np.ndarray) -> None:
        with torch.no_grad():
            target.copy_(torch.from_numpy(np.ascontiguousarray(value)))

    copy(model.word.weight, parameters["word"])
    copy(model.position.weight, parameters["position"])
    norms = [(model.final_norm, parameters["final_norm"])]
    for i, layer in enumerate(model.layers):
        own = jax.tree.map(lambda a, i=i: a[i], parameters["layers"])
        norms += [(layer.norm1, own["norm1"]), (layer.norm2, own["norm2"])]
        for name in ("qkv", "out", "up", "down"):
            copy(getattr(layer, name).weight, own[name].T)
            copy(getattr(layer, name).bias, own[f"{name}_bias"])
    for module, own in norms:
        copy(module.weight, own["scale"])
        copy(module.bias, own["bias"])


# ---- measuring ----------------------------------------------------------------------------------------------------
def random_batches(vocab: int, batch: int, seq: int, number: int) -> list[dict[str, np.ndarray]]:
    """Returns global batches of made-up tokens in which every token counts."""
    rng = np.random.default_rng(0)
    texts = rng.integers(0, vocab, (number, batch, seq + 1), dtype=np.int32)
    return [
        {
            "tokens": np.ascontiguousarray(text[:, :-1]),
            "labels": np.ascontiguousarray(text[:, 1:]),
            "text": text.astype(best_dtype(vocab)),
            "sample_ids": np.arange(batch, dtype=np.uint32),
        }
        for text in texts
    ]


def check_losses(runners: dict[str, Runner], batches: Sequence[dict[str, np.ndarray]]) -> dict[str, list[float]]:
    """Returns the losses of the first steps (which also warm up).

    Raises:
        ValueError: two contenders differ, so they do not compute the same.
    """
    losses = {name: [run(batch)[2] for batch in batches[:NUM_LOSSES]] for name, run in runners.items()}
    expected = losses["hand-written"]
    for name, values in losses.items():
        error = max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))
        if not error <= LOSS_TOLERANCE:
            raise ValueError(f"losses of {name} {values} and of hand-written {expected} differ by {error:.1e} relative")
    return losses


def bare_dot(tokens: int, hidden: int) -> Callable[[], float]:
    """Returns a function that times one [tokens, hidden] x [hidden, 4 hidden] product and gives its FLOP/s."""
    x, kernel = jnp.ones((tokens, hidden)), jnp.ones((hidden, 4 * hidden))
    dot = jax.jit(jnp.dot).lower(x, kernel).compile()

    def run() -> float:
        start = time.perf_counter()
        dot(x, kernel).block_until_ready()
        return 2 * tokens * hidden * 4 * hidden / (time.perf_counter() - start)

    return run


def measure(
    runners: dict[str, Runner], batches: Sequence[dict[str, np.ndarray]], steps: int, dot: Callable[[], float]
) -> tuple[dict[str, list[tuple[float, ...]]], list[float]]:
    """Returns (seconds until ready, until the call returned and of CPU, of every step of each; FLOP/s of bare dots)."""
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in runners}
    dots = []
    names = list(runners)
    for step in range(steps):
        # Each takes every place in turn: what ran just before may still hold a core.
        for name in (*names[step % len(names) :], *names[: step % len(names)]):
            start = time.process_time()
            ready, returned, _ = runners[name](batches[step % len(batches)])
            times[name].append((ready, returned, time.process_time() - start))
        dots += [dot() for _ in range(5)]
    return times, dots


def summarise(times: dict[str, list[tuple[float, ...]]], flops: float) -> dict[str, dict[str, float]]:
    """Returns the numbers of each contender; ratios to hand-written, paired within a round for the spread."""
    result = {}
    base = [row[0] for row in times["hand-written"]]
    base_cpu = min(row[2] for row in times["hand-written"])
    for name, rows in times.items():
        total = [row[0] for row in rows]
        paired = sorted(a / b for a, b in zip(total, base, strict=True))
        result[name] = {
            "min_s": min(total),
            "median_s": statistics.median(total),
            "max_s": max(total),
            "host_min_s": min(row[1] for row in rows),
            "cpu_min_s": min(row[2] for row in rows),
            "cpu_ratio_of_mins": min(row[2] for row in rows) / base_cpu,
            "ratio_of_mins": min(total) / min(base),
            "ratio_of_medians": statistics.median(total) / statistics.median(base),
            "paired_ratio_median": statistics.median(paired),
            "paired_ratio_low": paired[len(paired) // 4],
            "paired_ratio_high": paired[-1 - len(paired) // 4],
            "best_flops_per_s": flops / min(total),
        }
    return result


def table(result: dict[str, Any]) -> str:
    """Returns the report as text."""
    head = (
        "step",
        "min ms",
        "median",
        "max",
        "ratio: mins",
        "medians",
        "CPU",
        "paired (quartiles)",
        "GFLOP/s",
        "host ms",
    )
    rows = [head]
    for name, row in result["steps"].items():
        spread = f"{row['paired_ratio_median']:.3f} ({row['paired_ratio_low']:.3f}-{row['paired_ratio_high']:.3f})"
        rows.append(
            (
                name,
                *(f"{1e3 * row[key]:.1f}" for key in ("min_s", "median_s", "max_s")),
                *(f"{row[key]:.3f}" for key in ("ratio_of_mins", "ratio_of_medians", "cpu_ratio_of_mins")),
                spread,
                f"{row['best_flops_per_s'] / 1e9:.1f}",
                "-" if name == "torch" else f"{1e3 * row['host_min_s']:.2f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    dot = result["bare_dot_flops_per_s"]
    lines.append(f"bare dot: best {dot['max'] / 1e9:.1f}, median {dot['median'] / 1e9:.1f} GFLOP/s")
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Returns what the numbers belong to."""
    found = {"python": platform.python_version(), "jax": jax.__version__, "optax": optax.__version__}
    with contextlib.suppress(ImportError):
        import torch

        found["torch"] = torch.__version__
    device = jax.devices()[0]
    return {**found, "device": device.device_kind, "cpus": str(os.cpu_count())}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--num-layers", type=int, default=6)
    add("--hidden-size", type=int, default=512)
    add("--num-attention-heads", type=int, default=8)
    add("--vocab-size", type=int, default=12288, help="the default model has 25 million parameters")
    add("--seq-length", type=int, default=256)
    add("--batch-size", type=int, default=2, help="sequences of a step")
    add("--steps", type=int, default=12, help="timed steps of each contender")
    add("--no-torch", action="store_true", help="leave the PyTorch twin out")
    add("--json", metavar="PATH", help="write the result there")
    return parser.parse_args(arguments)


def benchmark(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the result of one run; see `main`."""
    program = build(arguments)
    batches = random_batches(arguments.vocab_size, arguments.batch_size, arguments.seq_length, 4)
    runners: dict[str, Runner] = {}
    runners["jmegatron"], start = jmegatron_runner(program)
    parameters = hand_written_parameters(start)
    runners["hand-written"] = hand_written_runner(parameters, arguments.num_attention_heads, batches[0])
    if not arguments.no_torch:
        with contextlib.suppress(ImportError):
            runners["torch"] = torch_runner(parameters, arguments.num_attention_heads)
    losses = check_losses(runners, batches)
    tokens = arguments.batch_size * arguments.seq_length
    times, dots = measure(runners, batches, arguments.steps, bare_dot(tokens, arguments.hidden_size))
    shape = formula_shape(program.config)
    return {
        "versions": versions(),
        "options": {name: value for name, value in vars(arguments).items() if name != "json"},
        "num_parameters": formulas.parameters(shape).total,
        "tokens_per_step": tokens,
        "losses": losses,
        "steps": summarise(times, formulas.model_flops_per_step(shape, tokens)),
        "bare_dot_flops_per_s": {"max": max(dots), "median": statistics.median(dots)},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints the table, and writes the result where asked."""
    options = parse(arguments)
    result = benchmark(options)
    print(", ".join(f"{name} {value}" for name, value in result["versions"].items()))
    print(f"{result['num_parameters'] / 1e6:.1f} million parameters, {result['tokens_per_step']} tokens a step, fp32")
    print(table(result))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
