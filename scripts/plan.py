"""Propose how to divide a model over a cluster: layouts that fit, the fastest first, and why the others lost.

    python scripts/plan.py --model configs/gpt_70b_512gpu.yaml --num-gpus 512 --global-batch-size 1024
    python scripts/plan.py --model configs/llama3_8b.yaml --num-gpus 64 --target-gpu a100 --compile-top 3 --json p.json
    python scripts/plan.py --model configs/llama3_8b.yaml --num-gpus 64 --tensor-model-parallel-size 4   # tp stays 4

Figures are those of the closed forms (`jmegatron/planner/README.md` states what they assume); --compile-top adds those
of XLA's compiler for these GPUs. Further options are those of train.py and stay as they are given; what the file says
of the options that `--auto-parallel` decides is left out.

Exit status: 0 done, 1 the compiler failed or standard output cannot be written, 2 an option or a file cannot be used,
3 no layout fits (it says what came nearest, and what would help), 130 Ctrl-C, 141 nobody reads what it prints.
"""

import argparse
import dataclasses
import errno
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jmegatron.config import Config, load_config, resolve
from jmegatron.config.sections import PLANNED
from jmegatron.data.files import atomic_output
from jmegatron.data.script import run_script
from jmegatron.errors import ConfigError, TrainingError, UsageError
from jmegatron.planner import formulas
from jmegatron.planner.cards import CARDS, card
from jmegatron.planner.costs import bubble
from jmegatron.planner.layouts import HEADROOM, Candidate, Plan, Rejected, describe, plan, ways_out

NOTHING_FITS = 3
_EXAMPLES = 3
"""Losers that are named of each reason."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    given, rest = _parser().parse_known_args(arguments)
    found: list[int] = []
    try:
        return run_script(lambda: found.append(run(given, rest))) or found[0]
    except TrainingError as error:
        wrong = str(error)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # Files say so themselves. At exit Python would try to write the rest once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        wrong = f"standard output cannot be written ({error.strerror})"
    print(f"error: {wrong}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Propose how to divide a model over a cluster.",
        epilog="Further options are those of train.py; of those that a plan decides, the ones given stay as they are.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", metavar="FILE", help="YAML file of a run; its layout is not used")
    parser.add_argument("--num-gpus", type=int, required=True, help="GPUs in all")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs that NVLink joins (default: 8)")
    parser.add_argument("--target-gpu", default="h100", help=f"{', '.join(sorted(CARDS))} (default: h100)")
    parser.add_argument("--global-batch-size", type=int, help="sequences of a step (default: the file's)")
    parser.add_argument("--seq-length", type=int, help="tokens of a sequence (default: the file's)")
    parser.add_argument("--assumed-tflops", type=float, help="TFLOP/s of a GPU (default: a roofline of the card)")
    parser.add_argument(
        "--headroom", type=float, default=HEADROOM, help=f"part of the memory that stays free (default: {HEADROOM})"
    )
    parser.add_argument("--top", type=int, default=10, help="layouts that are shown (default: 10)")
    parser.add_argument("--compile-top", type=int, default=0, help="layouts that are compiled (default: 0)")
    parser.add_argument("--json", metavar="FILE", help="write the plan")
    return parser


def run(given: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the plan, writes it where asked, and returns the exit status.

    Raises:
        UsageError: an option or a file cannot be used.
        TrainingError: the compiler failed.
    """
    for name in ("top", "compile_top"):
        if getattr(given, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')}: got {getattr(given, name)}, expected at least 0")
    if not 0 <= given.headroom < 1:
        raise ConfigError(f"--headroom: got {given.headroom}, expected at least 0 and less than 1")
    target = card(given.target_gpu)
    if given.json is not None:
        check_place(given.json)
    # Before jax is imported: its CUDA plugin, which is the compiler, fails its own checks without a GPU.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jmegatron.training.planning import expert_note, request_of
    from jmegatron.training.xla_flags import check_environment

    if given.compile_top:
        check_environment()
    own = ["--config", given.model] if given.model is not None else []
    for name in ("global_batch_size", "seq_length"):
        if getattr(given, name) is not None:
            own += [f"--{name.replace('_', '-')}={getattr(given, name)}"]
    config = _config(given, [*own, *rest])
    found = plan(request_of(config, given.num_gpus, target, headroom=given.headroom))
    for line in [*expert_note(config), *head_lines(found)]:
        print(line)
    if found.best is None:
        lines = [*reason_lines(found.rejected), *miss_lines(found)]
    else:
        lines = [*table_lines(found, given.top), "", *reason_lines((*found.losers, *found.rejected))]
        lines += ["", "the first, behind train.py:", "  " + " ".join(winner_words(found.best, own, rest))]
    print("\n".join(lines), flush=True)
    compiled = compile_first(config, found.ranked[: given.compile_top])
    if given.json is not None:
        write(given.json, found, given.top, compiled)
    return 0 if found.best else NOTHING_FITS


def _config(given: argparse.Namespace, words: Sequence[str]) -> Config:
    """Returns the config to plan for, its vocabulary known."""
    from jmegatron.data.tokenizers import build_tokenizer, tokenizer_settings

    words = [*words, "--auto-parallel", "--dry-run", f"--num-gpus={given.num_gpus}", f"--target-gpu={given.target_gpu}"]
    words += [f"--gpus-per-node={given.gpus_per_node}"]
    if given.assumed_tflops is not None:
        words += [f"--assumed-tflops={given.assumed_tflops}"]
    config = load_config(words)
    if config.model.vocab_size is not None:
        return config
    return resolve(config, build_tokenizer(**tokenizer_settings(config.data)).vocab_size)


def winner_words(best: Candidate, own: Sequence[str], rest: Sequence[str]) -> list[str]:
    """Returns the words that make train.py run a layout."""
    from jmegatron.training.planning import option_words

    try:
        as_it_stands = load_config([*own, *rest])
    except ConfigError:
        as_it_stands = None  # the file's layout does not fit what is asked for
    return [*own, *rest, *option_words(best, as_it_stands)]


# ---- text -----------------------------------------------------------------------------------------------------------
def head_lines(found: Plan) -> list[str]:
    """Returns what was planned and how much was tried."""
    request = found.request
    shape, tokens = request.shape, request.global_batch_size * request.shape.seq_len
    parameters, of_token = formulas.parameters(shape).total, formulas.parameters_of_token(shape)
    experts = f" ({of_token / 1e9:.2f} of them for each token)" if shape.experts else ""
    rate = "roofline" if request.assumed_tflops is None else f"{request.assumed_tflops:g} TFLOP/s a GPU"
    usable, memory = request.usable_bytes / 1e9, request.card.memory_bytes / 1e9
    return [
        f"{parameters / 1e9:.2f} billion parameters{experts}, {request.global_batch_size} x {shape.seq_len} tokens a "
        f"step, {formulas.flops_6nd(of_token, tokens):.3g} FLOP by 6ND",
        f"{request.num_gpus} x {request.card.name}, {request.gpus_per_node} a node; {usable:.1f} of {memory:.1f} GB "
        f"are to be used; times by the formulas ({rate})",
        f"{len(found.ranked)} layouts fit, {len(found.rejected)} do not or cannot be",
        "",
    ]


_COLUMNS = ("tp", "pp", "chunks", "cp", "ep", "dp", "micro", "m", "recompute", "optimizer", "schedule")


def table_lines(found: Plan, top: int) -> list[str]:
    """Returns the first layouts as a table."""
    rows = [["", *_COLUMNS, "bubble", "GB", "s a step", "tokens/s", "MFU"]]
    for place, one in enumerate(found.ranked[:top], 1):
        layout = one.layout
        sharding = "sharded" if layout.distributed_optimizer else "whole"
        rows.append(
            [
                str(place),
                *(str(n) for n in (layout.tp, layout.pp, layout.num_chunks, layout.cp, layout.ep, layout.dp)),
                *(str(n) for n in (layout.micro_batch_size, layout.num_microbatches)),
                layout.recompute or "-",
                sharding + (", overlap" if layout.overlap_grad_reduce else ""),
                layout.schedule_name if layout.pp > 1 else "-",
                f"{100 * _bubble(one):.1f} %",
                f"{one.memory.total / 1e9:.1f}",
                f"{one.time.total:.4g}",
                f"{one.time.tokens_per_s:,.0f}",
                f"{100 * one.time.mfu:.1f} %",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _bubble(one: Candidate) -> float:
    return bubble(one.layout, 1.0, 3.0 if one.layout.recompute == "full" else 2.0)


_TITLES = {
    "slower": "slower for",
    "memory": "do not fit the card",
    "devices": "GPUs not divisible",
    "heads": "heads or widths not divisible",
    "vocabulary": "vocabulary not divisible",
    "sequence": "sequence not divisible, or too short",
    "layers": "layers not divisible",
    "batch": "batch not divisible",
}


def reason_lines(losers: Iterable[Rejected]) -> list[str]:
    """Returns why layouts lost: for each reason how many, and the first few."""
    groups: dict[str, list[Rejected]] = {}
    for one in losers:
        title = _TITLES[one.kind] + (f" {one.what}" if one.kind == "slower" else "")
        groups.setdefault(title, []).append(one)
    lines = ["why the others lost:"] if groups else []
    for title, members in groups.items():
        lines.append(f"  {title} ({len(members)})")
        for one in members[:_EXAMPLES]:
            if one.kind == "slower" and one.candidate is not None:
                lines.append(f"    {describe(one.candidate.layout)}: {one.candidate.time.total:.4g} s; {one.reason}")
            else:
                lines.append(f"    {one.what}: {one.reason}")
    return lines


def miss_lines(found: Plan) -> list[str]:
    """Returns what came nearest, and what would help, of a plan in which nothing fits."""
    from jmegatron.training.planning import NAMES

    lines = ["", f"nothing fits {found.request.num_gpus} x {found.request.card.name}"]
    if miss := found.nearest_miss:
        usable = found.request.usable_bytes
        lines.append(
            f"nearest: {describe(miss.layout)}: {miss.memory.total / 1e9:.1f} GB, "
            f"{(miss.memory.total - usable) / 1e9:.1f} more than there are (model state "
            f"{miss.memory.state.total / 1e9:.1f}, activations {miss.memory.activations / 1e9:.1f})"
        )
    ways = ways_out(found.request, NAMES)
    return [
        *lines,
        "what would help:" if ways else "up to 64 times as many GPUs would not help",
        *(f"  {way}" for way in ways),
    ]


# ---- compiling ------------------------------------------------------------------------------------------------------
def compile_first(config: Config, candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Compiles layouts for the GPUs and prints their memory beside the estimate; returns a record of each.

    Raises:
        TrainingError: the compiler failed.
    """
    from jmegatron.planner.topology import gpu_compiler_available
    from jmegatron.training.dry_run import USABLE_SHARE, compile_elsewhere
    from jmegatron.training.planning import with_layout

    records: list[dict[str, Any]] = []
    available, reason = gpu_compiler_available() if candidates else (False, "")
    if reason:
        print(f"nothing is compiled: {reason}")
    for place, one in enumerate(candidates if available else (), 1):
        resolved = resolve(with_layout(config, one), None, one.layout.dp * one.layout.ep)
        print(f"compiling {place}: {describe(one.layout)}", flush=True)
        figures = compile_elsewhere(resolved, lambda text: print(f"  {text}", flush=True))
        if "unavailable" in figures:
            print(f"nothing is compiled: {figures['unavailable']}")
            break
        peak = figures["memory"]["peak"]
        fits = peak <= USABLE_SHARE * card(config.hardware.target_gpu).memory_bytes
        print(
            f"  {peak / 1e9:.2f} GB compiled, {one.memory.total / 1e9:.2f} estimated "
            f"({100 * (one.memory.total / peak - 1):+.1f} %): {'fits' if fits else 'does not fit'}",
            flush=True,
        )
        records.append({"place": place, "peak": peak, "estimate": one.memory.total, "fits": fits})
    return records


# ---- JSON -----------------------------------------------------------------------------------------------------------
def check_place(path: str) -> None:
    """Checks that a plan can be written there.

    Raises:
        UsageError: it cannot.
    """
    file = Path(path)
    if not path or file.is_dir():
        raise UsageError(f"--json: got {path!r}, expected a file, no folder; fix: give the name of a file")
    if not os.access(file.parent, os.W_OK):
        raise UsageError(
            f"--json {path}: cannot be written, there is no folder {file.parent} that may be written to; fix: make it,"
            " or give another place"
        )


def write(path: str, found: Plan, top: int, compiled: list[dict[str, Any]]) -> None:
    """Writes the plan.

    Raises:
        UsageError: the file cannot be written.
    """
    request = found.request
    content = {
        "format": "jmegatron plan 1",
        "request": {
            "num_gpus": request.num_gpus,
            "gpus_per_node": request.gpus_per_node,
            "target_gpu": request.card.name,
            "global_batch_size": request.global_batch_size,
            "seq_length": request.shape.seq_len,
            "usable_bytes": request.usable_bytes,
            "assumed_tflops": request.assumed_tflops,
            "fixed": dict(request.fixed),
        },
        "num_fitting": len(found.ranked),
        "num_rejected": len(found.rejected),
        "ranked": [_record(one) for one in found.ranked[:top]],
        "losers": [_loser(one) for one in found.losers[: max(0, top - 1)]],
        "rejected": _first_of_each(found.rejected),
        "compiled": compiled,
    }
    text = (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
        # What a pipe or a link leads to must stay what it is.
        try:
            Path(path).write_bytes(text)
        except OSError as error:
            raise UsageError(f"--json {path}: cannot be written ({error.strerror or error})") from None
        return
    with atomic_output(path) as file:
        file.write(text)


def _record(one: Candidate) -> dict[str, Any]:
    from jmegatron.training.planning import planned_options

    return {
        "options": {name: value for name, value in planned_options(one).items() if name in PLANNED},
        "ep": one.layout.ep,
        "dp": one.layout.dp,
        "num_microbatches": one.layout.num_microbatches,
        "padded_vocab_size": one.vocab_rows,
        "bubble": _bubble(one),
        "memory": {**dataclasses.asdict(one.memory), "total": one.memory.total},
        "time": {**dataclasses.asdict(one.time), "total": one.time.total, "mfu": one.time.mfu},
    }


def _loser(one: Rejected) -> dict[str, Any]:
    what = describe(one.candidate.layout) if one.candidate else one.what
    return {"kind": one.kind, "layout": what, "reason": one.reason}


def _first_of_each(rejected: Iterable[Rejected]) -> dict[str, Any]:
    groups: dict[str, list[Rejected]] = {}
    for one in rejected:
        groups.setdefault(one.kind, []).append(one)
    return {
        kind: {"count": len(members), "first": [_loser(one) for one in members[:_EXAMPLES]]}
        for kind, members in groups.items()
    }


if __name__ == "__main__":
    sys.exit(main())
