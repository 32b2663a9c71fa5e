"""A dry run's report as text. No communication, no jax.

It shows a dict, see `training.dry_run`, and computes nothing but ratios of what stands side by side.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]
Number = int | float | None

PARTS = {
    "parameters": "parameters",
    "optimizer_state": "optimizer state",
    "gradients": "gradients",
    "gathered_parameters": "gathered parameters",
    "activations": "activations",
    "other_temporaries": "other temporaries",
}
"""Part of the memory -> its name."""
TIMES = {
    "matmul": "matmuls",
    "memory_bound": "memory-bound work",
    "tp": "exposed on tp",
    "ep": "exposed on ep",
    "cp": "exposed on cp",
    "pp": "exposed on pp",
    "data": "exposed on dp",
    "bubble": "bubble",
}
"""Part of the step's time -> its name."""
ONE_PROGRAM = (
    "all stages run one compiled program, so every GPU has the same memory: that of the worst stage; the table below is"
    " what the closed forms say each stage would need for itself"
)
LOG_NOTE = (
    "by XLA's scheduler and its model of the card, not measured; it gives a loop no time, so what runs beside whole"
    " layers counts as exposed"
)


# ---- numbers --------------------------------------------------------------------------------------------------------
def gigabytes(value: Number) -> str:
    """Returns bytes in GB (1e9), with as many digits as tell something."""
    if value is None:
        return "-"
    gb = value / 1e9
    return f"{gb:.2f} GB" if gb >= 0.1 else f"{value / 1e6:.2f} MB" if value >= 1e4 else f"{value:.0f} B"


def seconds(value: Number) -> str:
    """Returns seconds in s or ms."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 0.995 else f"{1e3 * value:.2f} ms" if value else "0 s"


def percent(value: Number) -> str:
    """Returns a share in per cent."""
    return "-" if value is None else f"{100 * value:.1f} %"


def number(value: Number) -> str:
    """Returns a count with separators, or with an exponent where it is long."""
    if value is None:
        return "-"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) < 1e13 else f"{value:.3e}"


def flops(value: Number) -> str:
    """Returns FLOPs with an exponent."""
    return "-" if value is None else f"{value:.3e}"


def ratio(value: Number, theory: Number) -> str:
    """Returns a figure over its theory."""
    return f"{value / theory:.3f}" if value is not None and theory else "-"


def six_n_d_name(report: Report) -> str:
    """Returns what the rule of thumb counts."""
    of_token = report["model"].get("parameters_of_token")
    return f"6 N D ({'parameters that a token needs' if of_token else 'all parameters'}, no attention)"


def axes_text(axes: Sequence[str] | None) -> str:
    """Returns the names of mesh axes."""
    return "mixed" if axes is None else " x ".join(axes) or "none"


_PROSE = "\0"
"""Begins a line that may be broken."""


# ---- text -----------------------------------------------------------------------------------------------------------
def title(report: Report) -> str:
    """Returns how large a model is compiled for what."""
    model, target = report["model"], report["target"]
    of_token = model.get("parameters_of_token")
    unit, name = (1e9, "billion") if model["parameters"] >= 1e8 else (1e6, "million")
    experts = f" ({of_token / unit:.2f} of them for each token)" if of_token else ""
    return (
        f"dry run: {model['parameters'] / unit:.2f} {name} parameters{experts} on {target['num_gpus']} x"
        f" {target['gpu']} ({target['gpus_per_node']} a node)"
    )


def layout_text(report: Report) -> str:
    """Returns how it is divided."""
    model, layout = report["model"], report["layout"]
    degrees = ", ".join(f"{name} {layout[name]}" for name in ("tp", "pp", "cp", "ep", "dp") if layout[name] > 1)
    chunks = f" x {layout['chunks']} chunks" if layout["chunks"] > 1 else ""
    flags = [
        name.replace("_", " ")
        for name in ("sequence_parallel", "distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
        if layout[name]
    ]
    recompute = f", {layout['recompute']} recompute" if layout["recompute"] else ""
    return (
        f"{degrees or 'one GPU'}{chunks}, {layout['num_microbatches']} micro-batches of {layout['micro_batch_size']} x"
        f" {model['seq_length']} tokens{recompute}" + (f", {', '.join(flags)}" if flags else "")
    )


def text_lines(report: Report, width: int = 120) -> Iterator[str]:
    """Yields the lines of the report.

    Args:
        report: the figures.
        width: of prose; tables are as wide as they are.
    """
    width = max(width, 60)
    for section in (_memory, _collectives, _overlap, _pipeline, _flops, _time, _compile, _verdict):
        for line in section(report):
            if line.startswith(_PROSE):
                yield from textwrap.wrap(line.removeprefix(_PROSE), width, initial_indent="  ", subsequent_indent="  ")
            else:
                yield line


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns an indented table; the first column is left-aligned, others right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return lines


def _memory(report: Report) -> Iterator[str]:
    memory, target = report["memory"], report["target"]
    yield ""
    yield "MEMORY PER GPU" + ("" if report["compiled"] else " (closed forms)")
    rows = [
        [name, gigabytes(memory["parts"][key]), gigabytes(memory["theory"][key])]
        for key, name in PARTS.items()
        if memory["parts"][key] or memory["theory"][key]
    ]
    rows.append(["peak", gigabytes(memory["peak"]), gigabytes(memory["theory_peak"])])
    if report["compiled"]:
        yield from table(["", "compiled", "closed form"], rows)
        yield (
            f"{_PROSE}arguments {gigabytes(memory['arguments'])}, outputs {gigabytes(memory['outputs'])} of which"
            f" {gigabytes(memory['aliased'])} reuse them, temporaries {gigabytes(memory['temporaries'])}"
        )
    else:
        yield from table(["", "closed form"], [[name, theory] for name, _, theory in rows])
    rule, experts = memory["state_rule"], "num_experts" in report["model"]
    textbook = memory["textbook_activations_per_layer"]
    textbook = "the textbook knows none" if textbook is None else f"textbook {gigabytes(textbook)}"
    yield (
        f"{_PROSE}state {gigabytes(memory['state'])} (parameters, optimizer state, gradients); rule of"
        f" {rule['bytes_per_parameter']:.4g} bytes a parameter: {gigabytes(rule['bytes'])}"
    )
    yield (
        f"{_PROSE}activations of a layer{' with experts' if experts else ''} and micro-batch:"
        f" {gigabytes(memory['activations_per_layer'])} ({textbook}); room for {memory['chunks_kept']} chunks"
    )
    yield (
        f"  {'fits' if memory['fits'] else 'DOES NOT FIT'}: {percent(memory['share'])} of the card's"
        f" {gigabytes(target['memory_bytes'])}; {gigabytes(target['usable_bytes'])} may be used"
    )
    if len(memory["stages"]) > 1:
        yield f"{_PROSE}Stages: {ONE_PROGRAM}."
        yield from table(
            ["stage", "parameters", "chunks in flight", "state", "activations", "sum"],
            [
                [
                    f"{row['stage']}" + (" (worst)" if row["stage"] == memory["worst_stage"] else ""),
                    number(row["parameters"]),
                    str(row["chunks_in_flight"]),
                    gigabytes(row["state"]),
                    gigabytes(row["activations"]),
                    gigabytes(row["total"]),
                ]
                for row in memory["stages"]
            ],
        )


def _collectives(report: Report) -> Iterator[str]:
    rows = report["collectives"]
    if not rows:
        return
    yield ""
    yield "COLLECTIVES A STEP, BYTES THAT ONE GPU SENDS"
    yield from table(
        ["axes", "kind", "link", "runs", "bytes", "theory", "ratio", "at link speed"],
        [
            [
                axes_text(row["axes"]),
                row["kind"],
                "in a node" if row["within_node"] else "between nodes",
                number(row["executions"]),
                gigabytes(row["bytes"]),
                gigabytes(row["theory_bytes"]),
                ratio(row["bytes"], row["theory_bytes"]),
                seconds(row["link_s"]),
            ]
            for row in rows
        ],
    )


def _overlap(report: Report) -> Iterator[str]:
    if not report["overlap"]:
        return
    yield ""
    yield "WHAT RUNS BESIDE THE TRANSFERS"
    shown = [row for row in report["overlap"] if row["link_s"] >= 1e-5 or row["hidden"]]
    yield from table(
        ["axes", "kind", "beside", "places", "runs", "bytes", "at link speed"],
        [
            [
                axes_text(row["axes"]),
                row["kind"],
                row["beside"],
                number(row["count"]),
                number(row["executions"]),
                gigabytes(row["bytes"]),
                seconds(row["link_s"]),
            ]
            for row in shown
        ],
    )
    if short := len(report["overlap"]) - len(shown):
        yield f"  {short} more below 0.01 ms: report.json"
    exposed = report["exposed"]
    if exposed is not None:
        kinds = ", ".join(f"{kind} {seconds(value)}" for kind, value in exposed["by_kind_s"].items() if value >= 5e-5)
        yield f"{_PROSE}Exposed {LOG_NOTE}: {seconds(exposed['total_s'])} a step ({kinds or 'nothing of note'})."
        yield (
            f"{_PROSE}Transfers with no matmul beside them, each at its whole length at link speed:"
            f" {seconds(exposed['no_matmul_beside_s'])}."
        )


def _pipeline(report: Report) -> Iterator[str]:
    pipeline = report["pipeline"]
    if pipeline is None:
        return
    chunks = f" x {pipeline['chunks']} chunks" if pipeline["chunks"] > 1 else ""
    yield ""
    yield f"PIPELINE: {pipeline['stages']} STAGES{chunks.upper()}, {pipeline['schedule']}"
    one = pipeline["bubble_with_one_chunk"]
    yield (
        f"{_PROSE}bubble {percent(pipeline['bubble'])} of the ideal time, {percent(pipeline['bubble_of_total'])} of the"
        " total" + (f"; with one chunk a stage {percent(one)} of the ideal time" if pipeline["chunks"] > 1 else "")
    )
    yield f"  chunks in flight by stage: {', '.join(map(str, pipeline['in_flight']))}"
    for line in pipeline["text"]:
        yield f"  {line.rstrip()}" if line.strip() else ""


def _flops(report: Report) -> Iterator[str]:
    found = report["flops"]
    yield ""
    yield "MATMUL FLOPS A STEP, ALL GPUS"
    rows = [
        [six_n_d_name(report), flops(found["six_n_d"])],
        ["model, attention over the whole rectangle", flops(found["model"])],
        ["model, causal half (as Megatron-LM counts)", flops(found["model_causal"])],
        ["the same with what is recomputed", flops(found["with_recompute"])],
    ]
    if found["executed"] is not None:
        rows.append(["executed, masked halves of cuDNN's attention left out", flops(found["executed"])])
    yield from table(["", "FLOP"], rows)
    if found["executed"] is not None:
        yield (
            f"{_PROSE}executed / theory {ratio(found['executed'], found['with_recompute'])}: idle slots of a pipeline"
            " compute too, attention in blocks computes whole blocks and its scores again"
        )
        if found["uncounted"]:
            yield f"{_PROSE}not counted, since they do not say how much they multiply: {', '.join(found['uncounted'])}"


def _time(report: Report) -> Iterator[str]:
    time = report["time"]
    yield ""
    yield "EXPECTED TIME OF A STEP"
    if time["assumed_tflops"] is not None:
        yield (
            f"{_PROSE}at {time['assumed_tflops']:g} TFLOP/s a GPU end to end, attention over the whole rectangle:"
            f" {seconds(time['step_s'])}"
        )
    parts = ", ".join(f"{name} {seconds(time['parts'][key])}" for key, name in TIMES.items() if time["parts"][key])
    yield f"  by a roofline of the card and its links: {seconds(time['roofline_s'])}"
    yield f"{_PROSE}{parts}"
    yield (
        f"{_PROSE}{seconds(time['step_s'])} are {number(round(time['tokens_per_s']))} tokens/s; attention over the"
        f" whole rectangle: {time['tflops_per_gpu']:.0f} TFLOP/s a GPU, MFU {percent(time['mfu'])}; causal half:"
        f" {time['tflops_per_gpu_causal']:.0f}, {percent(time['mfu_causal'])}"
    )
    if time["token_budget"]:
        yield f"  {number(time['token_budget'])} tokens (train_iters x batch x sequence): {time['days']:.1f} days"


def _compile(report: Report) -> Iterator[str]:
    if report["compile"] is None:
        return
    found = report["compile"]
    yield ""
    parts = ", ".join(f"{name} {value:.1f}" for name, value in found["seconds"].items())
    yield f"COMPILED IN {found['total_s']:.1f} s ({parts}; {number(found['num_instructions'])} HLO instructions)"
    for line in found["xla_options"]:
        yield f"{_PROSE}{line}"


def _verdict(report: Report) -> Iterator[str]:
    yield ""
    if not report["compiled"]:
        yield "CLOSED FORMS ALONE: nothing was compiled (see above for how to install the compiler)."
    memory = report["memory"]
    if memory["fits"]:
        yield f"It fits: {gigabytes(memory['peak'])} of {gigabytes(report['target']['memory_bytes'])}."
        return
    usable = gigabytes(report["target"]["usable_bytes"])
    yield f"It does not fit: {gigabytes(memory['peak'])}, and {usable} may be used."
    if not report["proposals"]:
        yield "No layout on these GPUs was found that fits: take more GPUs, another card, or a smaller model."
        return
    yield "Changes with which it fits, the fastest first:"
    for i, row in enumerate(report["proposals"]):
        yield f"  {i + 1}. {row['flags']}" + (f" ({row['note']})" if row["note"] else "")
        how = "compiled" if row["compiled"] else "closed form"
        more = ""
        if row["compiled"]:
            more = f", arguments {gigabytes(row['arguments'])}, temporaries {gigabytes(row['temporaries'])}"
        yield f"     peak {gigabytes(row['peak'])} ({how}{more}); step {seconds(row['step_s'])} (estimated)"
