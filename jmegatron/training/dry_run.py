"""A dry run: what the training step of a config costs on GPUs that are not here, before anything runs.

No communication. The step that training would run (`build_program`, `Program.train_step`, the same XLA options) is
compiled by XLA's GPU compiler in a process of its own, whose log says what XLA's scheduler leaves exposed; its figures
stand beside those of the closed forms. `planner.report` and `planner.report_html` show the result, a dict that is also
report.json:

    target, model, layout, notes     what was compiled, and what had to be assumed
    compiled                         False: without the GPU compiler, figures of the closed forms alone
    memory                           bytes on a GPU, by part; `theory` and `stages` by the closed forms
    collectives, overlap, exposed    bytes a step, what stands beside each transfer, seconds that a GPU waits
    pipeline                         bubble by both definitions, text and boxes of the picture
    flops, time                      of a step, of all GPUs
    compile                          seconds, XLA options
    proposals                        changes that make it fit, where it does not

Exit status: 0 it fits, 3 it does not.
"""

import contextlib
import dataclasses
import datetime
import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from jmegatron.config import Config, config_from_yaml, resolve, to_yaml, validate_for_devices
from jmegatron.data.files import atomic_outputs
from jmegatron.data.tokenizers import build_tokenizer, tokenizer_settings
from jmegatron.errors import TrainingError, UsageError
from jmegatron.planner import cards, costs, formulas, hlo, hlo_schedule, memory, report, report_html, times
from jmegatron.planner.buffers import carried_bytes
from jmegatron.planner.topology import compile_only_devices, compile_traced, gpu_compiler_available
from jmegatron.training.build import (
    attention_backend,
    attention_line,
    formula_layout,
    formula_shape,
    layer_parallel,
    pipeline_settings,
)
from jmegatron.training.planning import auto_parallel, check_assumed_tflops
from jmegatron.training.program import Program, build_program
from jmegatron.training.proposals import candidates
from jmegatron.training.startup import check_writable_folder, versions
from jmegatron.training.xla_flags import check_environment, parse

DOES_NOT_FIT = 3
"""Exit status where the step needs more memory than the card has."""
USABLE_SHARE = 0.95
"""Part of the card's memory that a step may fill: CUDA's context, NCCL's buffers and gaps take the rest."""
ASSUMED_VOCABULARY = 50257
"""Of GPT-2; where the tokenizer's files are not here."""
MAX_BOXES = 3000
"""Boxes of the pipeline picture; the middle of longer schedules is left out."""
REPORT_FILES = ("report.json", "report.html")
_SAY_EVERY = 10.0
NUM_PROPOSALS = 3
_MAX_COMPILED_CANDIDATES = 8
_DATA_AXES = {"data": ("dp", "ep", "cp"), "expert data": ("dp", "cp")}


def run(config: Config, say: Callable[[str], None] = lambda text: print(text, flush=True)) -> int:
    """Prints the report of a config, writes it where asked, and returns the exit status.

    Args:
      config: as the options say, with `--dry-run`.
      say: prints a line.

    Raises:
      UsageError: the options do not fit together, nothing fits, or the report cannot be written.
      TrainingError: the compiler failed, or standard output cannot be written.
    """
    try:
        return _run(config, say)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # Files say so themselves. At exit Python would try to write the rest once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise TrainingError(f"standard output cannot be written ({error.strerror})") from error


def _run(config: Config, say: Callable[[str], None]) -> int:
    check_environment()
    parse(config.hardware.xla_flags or "", "--xla-flags")
    if config.hardware.report is not None:
        _check_report(config.hardware.report)
    config, notes = resolve_for_dry_run(config)
    result = formula_figures(config)
    result["notes"] = [*notes, *result["notes"]]
    say(f"{report.title(result)}: {report.layout_text(result)}")
    for note in result["notes"]:
        say(f"  {note}")
    found = compile_elsewhere(config, say)
    said = len(result["notes"])
    if "unavailable" in found:
        result["notes"].append(f"closed forms alone, nothing was compiled: {found['unavailable']}")
        if config.hardware.xla_flags:
            result["notes"].append("--xla-flags: whether XLA knows the options is not checked without the compiler")
    else:
        add_compiled(result, found)
    for note in result["notes"][said:]:
        say(note)
    judge(result)
    if not result["memory"]["fits"]:
        result["proposals"] = proposals(config, result["compiled"], say)
    for line in report.text_lines(result, shutil.get_terminal_size((120, 24)).columns):
        say(line)
    if config.hardware.report is not None:
        for path in write(result, Path(config.hardware.report)):
            say(f"wrote {path}")
    return 0 if result["memory"]["fits"] else DOES_NOT_FIT


def _check_report(folder: str) -> None:
    """Checks that the files of the report can be written.

    Raises:
      UsageError: they cannot.
    """
    if not folder:
        raise UsageError("--report: got '', expected a folder; fix: give one, or leave --report out")
    check_writable_folder(folder, "report")
    for name in REPORT_FILES:
        if (Path(folder) / name).is_dir():
            raise UsageError(
                f"--report {folder}: {name} in it is a folder, expected a file or nothing; fix: give another folder"
            )


def write(result: dict[str, Any], folder: Path) -> list[Path]:
    """Writes report.json and report.html, both or none, and returns their paths.

    Raises:
      UsageError: that fails.
    """
    texts = (json.dumps(result, indent=1, allow_nan=False) + "\n", report_html.page(result))
    paths = [folder / name for name in REPORT_FILES]
    with atomic_outputs(*paths) as files:
        for file, text in zip(files, texts, strict=True):
            file.write(text.encode())
    return paths


# ---- what is compiled ---------------------------------------------------------------------------------------------
def num_gpus(config: Config) -> int:
    """Returns the GPUs of a dry run: those asked for, else those of one replica."""
    parallel = config.parallel
    replica = math.prod(
        (
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            parallel.context_parallel_size,
            parallel.expert_model_parallel_size,
        )
    )
    return config.hardware.num_gpus or replica


def resolve_for_dry_run(config: Config) -> tuple[Config, list[str]]:
    """Returns (the config with everything derived, what had to be assumed); reads no data and makes no folder.

    Raises:
      UsageError: the options do not fit together or the GPUs.
    """
    notes, vocab, hardware = [], config.model.vocab_size, config.hardware
    check_assumed_tflops(config, cards.card(hardware.target_gpu))
    if hardware.num_gpus is None:
        if config.parallel.auto_parallel:
            raise UsageError("--auto-parallel: a dry run needs to know for how many GPUs; fix: give --num-gpus")
        notes.append(f"--num-gpus is not given: {num_gpus(config)}, one replica of the model")
    if vocab is None:
        if config.model.padded_vocab_size is not None:
            vocab = config.model.padded_vocab_size
        else:
            try:
                vocab = build_tokenizer(**tokenizer_settings(config.data)).vocab_size
                why = f"of {config.data.tokenizer_type}, as training would take"
            except UsageError as error:
                wrong = re.split(r";? fix:", " ".join(str(error).split()))[0]
                vocab, why = ASSUMED_VOCABULARY, f"assumed, of GPT-2: {wrong}"
            notes.append(f"vocabulary: {vocab} ({why}); --vocab-size gives another")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab))
    config = resolve(config)
    if config.parallel.auto_parallel:
        config, lines = auto_parallel(config, num_gpus(config))
        notes += lines
    ranks = validate_for_devices(config, num_gpus(config)) * config.parallel.expert_model_parallel_size
    config = resolve(config, None, ranks)
    attention_backend(config, "gpu")  # refuses what cannot serve
    pipeline_settings(config).build(_layout(config).num_microbatches)
    if hardware.num_cpu_devices is not None:
        notes.append("--num-cpu-devices has no effect in a dry run")
    notes += [f"ignored: {flag} ({reason})" for flag, reason in config.ignored_flags]
    return config, notes


def _layout(config: Config) -> costs.Layout:
    dp = validate_for_devices(config, num_gpus(config))
    return formula_layout(config, dp, config.hardware.gpus_per_node)


# ---- closed forms -------------------------------------------------------------------------------------------------
def formula_figures(config: Config) -> dict[str, Any]:
    """Returns the report of a resolved config as far as closed forms go."""
    hardware, training = config.hardware, config.training
    shape, layout = formula_shape(config), _layout(config)
    card = cards.card(hardware.target_gpu)
    tokens = layout.global_batch_size * shape.seq_len
    parts = formulas.parameters(shape)
    roofline = times.step_time(shape, layout, card)
    whole, causal = (formulas.model_flops_per_step(shape, tokens, skip) for skip in (False, True))
    executed = formulas.executed_flops_per_step(
        shape,
        tokens,
        causal_skip=True,
        recompute=layout.recompute or "none",
        recompute_mlp="mlp" in layout.recompute_modules,
    )
    budget = (training.train_iters or 0) * tokens
    limit = card.memory_bytes * USABLE_SHARE
    step_s = roofline.total
    if hardware.assumed_tflops is not None:
        step_s = whole / (layout.num_devices * hardware.assumed_tflops * 1e12)
    mfu = lambda flops: formulas.mfu(flops, step_s, layout.num_devices, card.peak_bf16_flops)  # noqa: E731
    return {
        "format": "jmegatron dry run 1",
        "compiled": False,
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "target": {
            "gpu": card.name,
            "num_gpus": layout.num_devices,
            "gpus_per_node": hardware.gpus_per_node,
            "memory_bytes": card.memory_bytes,
            "usable_bytes": int(limit),
            "peak_bf16_flops": card.peak_bf16_flops,
            "nvlink_bytes_per_s": card.nvlink_bytes_per_s,
            "network_bytes_per_s": card.network_bytes_per_s,
        },
        "model": {
            "parameters": parts.total,
            "parts": {name: count for name, count in vars(parts).items() if count},
            "num_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "ffn_hidden_size": shape.ffn_hidden_size,
            "num_attention_heads": shape.num_attention_heads,
            "num_query_groups": shape.num_query_groups,
            "vocab_size": config.model.vocab_size,
            "padded_vocab_size": shape.vocab_rows,
            "seq_length": shape.seq_len,
            **_expert_numbers(shape),
        },
        "layout": {
            **{name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "dp")},
            "chunks": layout.num_chunks,
            "schedule": layout.schedule_name if layout.pp > 1 else None,
            "micro_batch_size": layout.micro_batch_size,
            "num_microbatches": layout.num_microbatches,
            "global_batch_size": layout.global_batch_size,
            "sequence_parallel": layer_parallel(config).sequence_parallel,
            "distributed_optimizer": layout.distributed_optimizer,
            "overlap_grad_reduce": layout.overlap_grad_reduce,
            "overlap_param_gather": layout.overlap_param_gather,
            "recompute": layout.recompute,
        },
        "notes": [attention_line(config, "gpu"), *_expert_notes(shape, layout)],
        "memory": _formula_memory(shape, layout),
        "collectives": _formula_collectives(shape, layout, card),
        "overlap": [],
        "exposed": None,
        "pipeline": _pipeline(config, shape, layout),
        "flops": {
            "six_n_d": formulas.flops_6nd(float(formulas.parameters_of_token(shape)), tokens),
            "model": whole,
            "model_causal": causal,
            "with_recompute": executed,
            "executed": None,
        },
        "time": {
            "assumed_tflops": hardware.assumed_tflops,
            "parts": {
                name: getattr(roofline, name)
                for name in ("matmul", "memory_bound", "tp", "ep", "cp", "pp", "data", "bubble")
            },
            "roofline_s": roofline.total,
            "step_s": step_s,
            "tokens_per_step": tokens,
            "tokens_per_s": tokens / step_s,
            "tflops_per_gpu": whole / step_s / layout.num_devices / 1e12,
            "tflops_per_gpu_causal": causal / step_s / layout.num_devices / 1e12,
            "mfu": mfu(whole),
            "mfu_causal": mfu(causal),
            "token_budget": budget,
            "days": budget / tokens * step_s / 86400,
        },
        "compile": None,
        "proposals": [],
    }


def _expert_numbers(shape: formulas.GPTShape) -> dict[str, int]:
    experts = shape.experts
    if experts is None:
        return {}
    return {
        "num_experts": experts.num_experts,
        "experts_of_token": experts.top_k,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size,
        "num_moe_layers": experts.num_layers,
        "parameters_of_token": formulas.parameters_of_token(shape),
    }


def _expert_notes(shape: formulas.GPTShape, layout: costs.Layout) -> list[str]:
    """Returns what the figures of experts assume."""
    if shape.experts is None:
        return []
    rows = costs.expert_rows(shape, layout)
    return [
        f"experts: memory is that of the most rows that a GPU may receive, {rows.received} a layer and micro-batch"
        f" where an even load is {rows.sent}; traffic and time are those of even loads"
    ]


def _formula_memory(shape: formulas.GPTShape, layout: costs.Layout) -> dict[str, Any]:
    whole = memory.memory_of_step(shape, layout)
    state = dataclasses.asdict(whole.state)
    a_chunk = memory.chunk_activation_bytes(shape, layout)
    stages = []
    for stage in range(layout.pp):
        own = costs.parameters_of_rank(shape, layout, stage)
        in_flight = costs.chunks_in_flight(layout, stage)
        bytes_of = {"state": _rule_bytes(own.parts, layout), "activations": in_flight * a_chunk}
        stages.append(
            {
                "stage": stage,
                "parameters": own.total,
                "chunks_in_flight": in_flight,
                **bytes_of,
                "total": sum(bytes_of.values()),
            }
        )
    # By the rule of thumb, which leaves the overlaps' buffers out.
    plain = dataclasses.replace(layout, overlap_grad_reduce=False, overlap_param_gather=False)
    held = costs.parameters_of_rank(shape, layout)
    rule = _rule_bytes(held.parts, plain)
    theory = {
        "parameters": state["parameters"],
        "optimizer_state": state["master"] + state["moments"],
        "gradients": state["gradients"] + state["reduced_gradients"],
        "gathered_parameters": state["gathered_parameters"],
        "activations": whole.activations,
        "other_temporaries": whole.layer_work + whole.output_work + whole.messages,
    }
    return {
        "parts": theory,
        "theory": theory,
        "state": whole.state.total,
        "theory_state": whole.state.total,
        "state_rule": {
            "bytes_per_parameter": rule / held.parts.total,
            "bytes": rule / held.parts.total * held.held,
        },
        "textbook_activations_per_layer": None if shape.experts else memory.textbook_activation_bytes(shape, layout),
        "activations_per_layer": memory.activation_bytes(shape, layout),
        "chunks_kept": costs.chunks_kept(layout),
        "peak": whole.total,
        "theory_peak": whole.total,
        "stages": stages,
        "worst_stage": max(range(layout.pp), key=lambda stage: stages[stage]["total"]),
    }


def _rule_bytes(parts: formulas.Parameters, layout: costs.Layout) -> float:
    """Returns the state of parameters at 18 or 6 + 12/d bytes each; experts have data ranks of their own."""
    rest, of_expert = (
        memory.state_bytes_per_parameter(layout, 1 / ranks).total
        for ranks in (layout.data_ranks, layout.expert_data_ranks)
    )
    return rest * (parts.total - parts.experts) + of_expert * parts.experts


def _formula_collectives(shape: formulas.GPTShape, layout: costs.Layout, card: cards.Card) -> list[dict[str, Any]]:
    rows: dict[tuple[tuple[str, ...], str], dict[str, Any]] = {}
    for one in times.communication(shape, layout, card):
        axes = tuple(axis for axis in _DATA_AXES.get(one.axis, (one.axis,)) if getattr(layout, axis) > 1)
        kind = "collective-permute" if one.kind == "permute" else one.kind
        row = rows.setdefault((axes, kind), _collective_row(axes, kind, one.within_node))
        row["theory_bytes"] = (row["theory_bytes"] or 0.0) + one.bytes
        row["theory_executions"] = (row["theory_executions"] or 0.0) + one.executions
        row["theory_s"] = (row["theory_s"] or 0.0) + one.seconds
        row["what"] += [one.what]
    return list(rows.values())


def _collective_row(axes: Sequence[str] | None, kind: str, within_node: bool) -> dict[str, Any]:
    return {
        "axes": None if axes is None else list(axes),
        "kind": kind,
        "within_node": within_node,
        "what": [],
        "count": None,
        "executions": None,
        "bytes": None,
        "link_s": None,
        "theory_executions": None,
        "theory_bytes": None,
        "theory_s": None,
    }


def _pipeline(config: Config, shape: formulas.GPTShape, layout: costs.Layout) -> dict[str, Any] | None:
    if layout.pp == 1:
        return None
    from jmegatron.pipeline.picture import boxes, text_lines
    from jmegatron.pipeline.schedule import simulate

    schedule = pipeline_settings(config).build(layout.num_microbatches)
    backward = 3.0 if layout.recompute == "full" else 2.0
    costs_of = simulate(schedule, 1.0, backward)
    work = boxes(schedule, 1.0, backward)
    rows = [[int(s), int(b), int(i), int(c), float(t), float(w)] for s, b, i, c, t, w in zip(*work, strict=True)]
    rows.sort(key=lambda row: (row[4], row[0]))
    left_out = None
    if len(rows) > MAX_BOXES:
        begin, end = rows[MAX_BOXES // 2][4], rows[-MAX_BOXES // 2][4]
        rows = [row for row in rows if row[4] < begin or row[4] >= end]
        left_out = [begin, end]
    one = dataclasses.replace(layout, num_chunks=1, chunk_lengths=(), schedule="1f1b")
    return {
        "stages": schedule.num_stages,
        "chunks": schedule.num_chunks,
        "schedule": schedule.name,
        "num_microbatches": schedule.num_microbatches,
        "bubble": costs_of.bubble,
        "bubble_of_total": costs_of.bubble_of_total,
        "bubble_with_one_chunk": costs.bubble(one, 1.0, backward),
        "ticks": costs_of.num_ticks,
        "time": costs_of.total,
        "backward_cost": backward,
        "in_flight": costs_of.in_flight.tolist(),
        "text": list(text_lines(schedule, 100, max_blocks=3)),
        "left_out": left_out,
        "boxes": rows,
    }


# ---- the compiled step --------------------------------------------------------------------------------------------
def compiled_figures(config: Config, progress: Callable[[str], None] = lambda phase: None) -> dict[str, Any]:
    """Returns what the compiled step of a resolved config says, for one GPU and one step.

    Args:
      config: resolved.
      progress: is told what begins.

    Raises:
      UsageError: the options do not fit, or the GPU compiler is not installed.
    """
    hardware = config.hardware
    progress("building")
    program = build_program(config, compile_only_devices(hardware.target_gpu, num_gpus(config), hardware.gpus_per_node))
    args = (program.abstract_state(), program.abstract_batch(), program.dropout_key())
    options = program.xla_options
    seconds = {}
    last, start = "tracing", time.perf_counter()

    def begin(phase: str) -> None:
        nonlocal last, start
        now = time.perf_counter()
        seconds[last] = now - start
        last, start = phase, now
        progress(phase)

    progress("tracing")
    traced = program.train_step().trace(*args)
    compiled = compile_traced(traced, args, options.values, begin)
    begin("reading")
    module = hlo.load(compiled)
    mesh_shape = dict(program.mesh.shape)
    known = _trip_counts(module, program)
    records = hlo.collectives(module, mesh_shape, known)
    pairs = hlo.async_pairs(module, mesh_shape, known)
    flops = hlo.matmul_flops(module, known)
    above_even = _above_even_loads(module, flops, known) if config.model.num_experts is not None else 0
    found = {
        "memory": _compiled_memory(compiled, program, carried_bytes(traced.jaxpr)),
        "collectives": _compiled_collectives(records, hardware.gpus_per_node, cards.card(hardware.target_gpu)),
        "overlap": _overlap(records, pairs, hardware.gpus_per_node, cards.card(hardware.target_gpu)),
        "flops": {
            "dot": flops.dot - above_even,
            "dot_above_even_loads": above_even,
            "attention": flops.attention,
            "attention_visible": flops.attention_visible,
            "uncounted": list(flops.uncounted),
        },
        "loops": {} if known else hlo_schedule.executions(module),
        "bound": bool(known),
        "xla_options": list(options.lines),
        "num_instructions": sum(len(each.instructions) for each in module.computations.values()),
    }
    begin("done")
    return {**found, "seconds": seconds}


def _above_even_loads(module: hlo.Module, flops: hlo.MatmulFlops, known: Mapping[str, int]) -> int:
    """Returns by how much the largest sizes of experts' products, which are counted, exceed those of even loads."""
    found = 0
    for instruction, site in hlo.walk(module, known):
        sizes = flops.branches.get(instruction.name, ()) if instruction.opcode == "conditional" else ()
        if len(sizes) > 1 and min(sizes) > 0:  # a branch without products is one of an idle slot
            found += (site.executions or 0) * (max(sizes) - min(sizes))
    return found


def _trip_counts(module: hlo.Module, program: Program) -> dict[str, int]:
    """Returns a trip count for the loops that run or not as the stage's turn is (1f1b-low-memory): all layers."""
    unknown = [loop for loop in hlo.loops(module) if loop.trip_count is None]
    if not unknown:
        return {}
    layers = _layout(program.config).places_of_chunk(program.config.model.num_layers)
    return {loop.name: layers for loop in unknown}


def _compiled_memory(compiled: Any, program: Program, carried: dict[str, int]) -> dict[str, Any]:
    import jax

    sizes = hlo.memory(compiled)
    state = program.abstract_state()
    local = lambda tree: sum(  # noqa: E731
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )
    parts = {
        "parameters": local(state.parameters),
        "optimizer_state": local((state.master, state.optimizer)),
        "gradients": carried.get("gradients", 0) + carried.get("reduced", 0),
        "gathered_parameters": carried.get("layers", 0),
        "activations": carried.get("residuals", 0),
    }
    peak = sizes.total_bytes
    parts["other_temporaries"] = max(0, peak - sum(parts.values()))
    return {
        "parts": parts,
        "arguments": sizes.argument_bytes,
        "outputs": sizes.output_bytes,
        "aliased": sizes.alias_bytes,
        "temporaries": sizes.temp_bytes,
        "state": sum(parts[name] for name in ("parameters", "optimizer_state", "gradients", "gathered_parameters")),
        "peak": peak,
    }


def _within_node(record: hlo.Collective, gpus_per_node: int) -> bool:
    groups: Iterable[Sequence[int]] = record.pairs or record.groups
    return all(len({device // gpus_per_node for device in group}) == 1 for group in groups)


def _rate(within_node: bool, card: cards.Card) -> float:
    return card.nvlink_bytes_per_s if within_node else card.network_bytes_per_s


def _compiled_collectives(
    records: Sequence[hlo.Collective], gpus_per_node: int, card: cards.Card
) -> list[dict[str, Any]]:
    rows: dict[tuple[Any, str], dict[str, Any]] = {}
    for one in records:
        within = _within_node(one, gpus_per_node)
        row = rows.setdefault((one.axes, one.kind), _collective_row(one.axes, one.kind, within))
        row["within_node"] = row["within_node"] and within
        executions = one.executions or 0
        row["count"] = (row["count"] or 0) + 1
        row["executions"] = (row["executions"] or 0) + executions
        row["bytes"] = (row["bytes"] or 0.0) + one.wire_bytes * executions
    for row in rows.values():
        row["link_s"] = row["bytes"] / _rate(row["within_node"], card)
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def _overlap(
    records: Sequence[hlo.Collective], pairs: Sequence[hlo.AsyncPair], gpus_per_node: int, card: cards.Card
) -> list[dict[str, Any]]:
    """Returns transfers grouped by what is scheduled between their start and their end."""
    of = {pair.operation: pair for pair in pairs}
    rows: dict[Any, dict[str, Any]] = {}
    for one in records:
        beside = _beside(of.get(one.name) if one.is_async else None)
        within = _within_node(one, gpus_per_node)
        row = rows.setdefault(
            (one.axes, one.kind, beside),
            {
                "axes": None if one.axes is None else list(one.axes),
                "kind": one.kind,
                "beside": beside,
                "hidden": beside in ("layers", "matmuls"),
                "count": 0,
                "executions": 0,
                "bytes": 0.0,
                "link_s": 0.0,
            },
        )
        executions = one.executions or 0
        row["count"] += 1
        row["executions"] += executions
        row["bytes"] += one.wire_bytes * executions
        row["link_s"] += one.wire_bytes * executions / _rate(within, card)
    return sorted(rows.values(), key=lambda row: -row["link_s"])


def _beside(pair: hlo.AsyncPair | None) -> str:
    """Returns in a word what a transfer runs beside."""
    if pair is None or not pair.between:
        return "nothing"
    if any(work.opcode == "while" and work.flops != 0 for work in pair.between):
        return "layers"
    return "matmuls" if pair.is_hidden else "other work"


def add_compiled(result: dict[str, Any], found: dict[str, Any]) -> None:
    """Puts the figures of the compiled step into the report, beside those of the closed forms."""
    result["compiled"] = True
    result["memory"] = {**result["memory"], **found["memory"]}
    theory = {(tuple(row["axes"]), row["kind"]): row for row in result["collectives"]}
    rows = []
    for row in found["collectives"]:
        other = theory.pop((tuple(row["axes"]), row["kind"]), None) if row["axes"] is not None else None
        kept = ("what", "theory_executions", "theory_bytes", "theory_s")
        rows.append({**row, **({name: other[name] for name in kept} if other else {})})
    result["collectives"] = rows + list(theory.values())
    result["overlap"] = found["overlap"]
    if found.get("exposed") is not None:
        bare = [row for row in found["overlap"] if not row["hidden"]]
        result["exposed"] = {
            "by_kind_s": found["exposed"],
            "total_s": sum(found["exposed"].values()),
            "no_matmul_beside_s": sum(row["link_s"] for row in bare),
        }
    gpus, flops = result["target"]["num_gpus"], found["flops"]
    executed = (flops["dot"] + flops["attention_visible"]) * gpus
    result["flops"] |= {
        "executed": executed,
        "executed_whole_rectangle": (flops["dot"] + flops["attention"]) * gpus,
        "executed_seconds_at_peak": executed / gpus / result["target"]["peak_bf16_flops"],
        "uncounted": flops["uncounted"],
    }
    result["compile"] = {
        "seconds": found["seconds"],
        "total_s": sum(found["seconds"].values()),
        "xla_options": found["xla_options"],
        "num_instructions": found["num_instructions"],
    }
    if above_even := flops.get("dot_above_even_loads"):
        most = executed + above_even * gpus
        result["notes"].append(
            "experts: executed FLOPs are those of even loads; if one expert of each GPU got all rows that it may get,"
            f" they would be {most:.3e}"
        )
    if found["bound"]:
        result["notes"].append(
            "1f1b-low-memory: loops over layers run in every second half tick of a stage; FLOPs and traffic are counted"
            " as if they ran in each, and XLA's exposed times are left out"
        )


def judge(result: dict[str, Any]) -> None:
    """Says in the report whether the step fits the card, and how much of it it takes."""
    peak, usable = result["memory"]["peak"], result["target"]["usable_bytes"]
    result["memory"]["fits"] = peak <= usable
    result["memory"]["share"] = peak / result["target"]["memory_bytes"]


# ---- a process of its own -----------------------------------------------------------------------------------------
def compile_elsewhere(config: Config, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns `compiled_figures` and what XLA's scheduler leaves exposed, from a process of its own.

    Its log is read line by line and not kept. Says what is being done, and every ten seconds for how long. Without the
    GPU compiler: {"unavailable": reason}.

    Raises:
      UsageError: the options do not fit.
      TrainingError: the compiler failed; the message has its last words.
    """
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **hlo_schedule.SCHEDULER_LOG, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [sys.executable, "-m", "jmegatron.training.dry_run"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        log = _Log(process.stderr)
        progress = _Progress(say)
        try:
            with contextlib.suppress(BrokenPipeError):  # it has died already; its log says why
                process.stdin.write(json.dumps(to_yaml(config)).encode() + b"\n")
                process.stdin.flush()  # and left open: its end tells the child that nobody waits any more
            found = _read_answers(process.stdout, progress)
            process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            progress.stop()
            log.join()
    if found is None:
        raise TrainingError(
            f"the compiler ended with {_status(process.returncode)} while {progress.phase}: {log.last_words()}"
        )
    if "usage" in found:
        raise UsageError(found["usage"])
    if found.get("loops"):
        found["exposed"] = hlo_schedule.exposed_seconds(log.statistics.after, found["loops"])
    return found


def _status(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"status {code}"


def _read_answers(lines: IO[bytes], progress: "_Progress") -> dict[str, Any] | None:
    found = None
    for line in lines:
        try:
            answer = json.loads(line)
        except ValueError:
            continue  # a library's own words
        if "phase" in answer:
            progress.begin(answer["phase"])
        else:
            found = answer
    return found


class _Progress:
    """Says what is being done when it begins, and every few seconds for how long."""

    def __init__(self, say: Callable[[str], None]):
        self.phase = "starting"
        self._say, self._start, self._done = say, time.perf_counter(), threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def begin(self, phase: str) -> None:
        """Says that a phase begins, and how long the last one took."""
        now = time.perf_counter()
        if now - self._start > 1.0 and self.phase != "starting":
            self._say(f"{self.phase}: done in {now - self._start:.1f} s")
        self.phase, self._start = phase, now
        if phase != "done":
            self._say(f"{phase} ...")

    def stop(self) -> None:
        """Says no more."""
        self._done.set()
        self._thread.join()

    def _repeat(self) -> None:
        with contextlib.suppress(OSError):  # nobody reads, or the disk is full: the main thread's next line says so
            while not self._done.wait(_SAY_EVERY):
                self._say(f"{self.phase}: {time.perf_counter() - self._start:.0f} s ...")


class _Log:
    """Reads a process's standard error: the scheduler's statistics, and the last lines of anything else."""

    def __init__(self, lines: IO[bytes]):
        self.statistics = hlo_schedule.SchedulerLog()
        self._last: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._thread.start()

    def _read(self, lines: IO[bytes]) -> None:
        for line in lines:
            if not self.statistics.read(line) and line[:1] not in (b"I", b" ") and line.strip():
                self._last = [*self._last[-19:], line.decode(errors="replace").rstrip()[:300]]

    def join(self) -> None:
        """Waits for the end of the log."""
        self._thread.join(10)

    def last_words(self) -> str:
        """Returns the last lines that say what went wrong."""
        wrong = [line for line in self._last if line[:1] in "EF" or "rror" in line]
        return " | ".join((wrong or self._last)[-3:]) or "it said nothing"


def main() -> int:
    """Reads a config from standard input and answers with JSON lines on standard output."""
    text = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer = lambda value: print(json.dumps(value), flush=True)  # noqa: E731
    available, reason = gpu_compiler_available()
    if not available:
        answer({"unavailable": reason})
        return 0
    try:
        answer(compiled_figures(config_from_yaml(text), lambda phase: answer({"phase": phase})))
    except UsageError as error:
        answer({"usage": str(error)})
    return 0


def _end_with_parent() -> None:
    sys.stdin.read()
    time.sleep(1)  # a parent that has its answer closes the pipe as well
    os._exit(1)


# ---- where it does not fit ----------------------------------------------------------------------------------------
def proposals(config: Config, compile_them: bool, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Returns up to `NUM_PROPOSALS` changes with which the step fits, the one with the shortest estimated step first.

    Args:
      config: resolved.
      compile_them: whether each is compiled, so that one that does not fit is left out.
      say: prints a line.
    """
    found: list[dict[str, Any]] = []
    usable = cards.card(config.hardware.target_gpu).memory_bytes * USABLE_SHARE
    gpus, tried = num_gpus(config), 0
    for candidate in candidates(config, gpus, validate_for_devices(config, gpus)):
        if len(found) == NUM_PROPOSALS or tried == _MAX_COMPILED_CANDIDATES:
            break
        tried += 1
        row: dict[str, Any] = {
            "flags": candidate.flags,
            "note": candidate.note,
            "changes": list(candidate.changes),
            "step_s": candidate.step_s,
            "theory_peak": candidate.peak,
            "compiled": False,
            "peak": candidate.peak,
        }
        if compile_them:
            say(f"trying {candidate.flags} (estimated {candidate.step_s:.3g} s a step)")
            try:
                figures = compile_elsewhere(candidate.config, say)
            except (TrainingError, UsageError) as error:
                say(f"  left out: {' '.join(str(error).split())}")
                continue
            if "unavailable" in figures:
                say(f"  left out: {figures['unavailable']}")
                continue
            row |= {
                "compiled": True,
                "peak": figures["memory"]["peak"],
                "parts": figures["memory"]["parts"],
                "arguments": figures["memory"]["arguments"],
                "temporaries": figures["memory"]["temporaries"],
                "exposed_s": sum(figures["exposed"].values()) if figures.get("exposed") else None,
            }
            if row["peak"] > usable:
                say(f"  needs {row['peak'] / 1e9:.1f} GB: does not fit")
                continue
        found.append(row)
    return sorted(found, key=lambda row: float(row["step_s"]))


if __name__ == "__main__":
    sys.exit(main())
