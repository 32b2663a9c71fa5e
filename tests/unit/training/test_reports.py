"""What a run reports: the log line, the metrics file, TensorBoard, the progress bar, and the figures in them."""

import math
import os
import pty
import re
import select
import subprocess
import termios
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from tensorboardX.proto import event_pb2
from training_runs import OPTIONS, command, quick_environment, read_metrics, train

from jmegatron.config import LoggingConfig, load_config
from jmegatron.errors import UsageError
from jmegatron.planner import cards
from jmegatron.training import loop
from jmegatron.training.build import attention_line
from jmegatron.training.program import build_program, resolve_for_run
from jmegatron.training.report import Reporter, StepReport, perplexity

TIMES = ["step_time_s", "tokens_per_s", "tflops_per_device", "mfu"]
KEYS = ["step", "loss", "grad_norm", "lr", "loss_scale", "skipped", "consumed_samples", "consumed_tokens", *TIMES]
NUMBER = r"[-+.\dE]+"
# Megatron-LM training.py training_log, in its order.
LOG_LINE = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}\] iteration +(?P<step>\d+)/ +6 \| consumed samples: +(?P<samples>\d+)"
    rf" \| elapsed time per iteration \(ms\): {NUMBER} \| throughput per GPU \(TFLOP/s/GPU\): {NUMBER}"
    rf" \| learning rate: (?P<lr>{NUMBER}) \| global batch size: +8 \| lm loss: (?P<loss>{NUMBER}) \| loss scale: 1\.0"
    rf" \| grad norm: {NUMBER} \| number of skipped iterations: +0 \| number of nan iterations: +0 \|"
)


def report(step: int = 1, **changes: Any) -> StepReport:
    values = dict(
        step=step, loss=2.0, grad_norm=1.0, lr=1e-3, loss_scale=1.0, skipped=0, consumed_samples=8, consumed_tokens=128,
        step_time_s=0.5, tokens_per_s=256.0, tflops_per_device=1.0, mfu=None,
    )  # fmt: skip
    return StepReport(**{**values, **changes})


def reporter(**settings: Any) -> Reporter:
    return Reporter(LoggingConfig(**settings), train_iters=6, global_batch_size=8)


# ---- a whole run ----------------------------------------------------------------------------------------------------
def test_a_run_logs_writes_metrics_and_tensorboard_alike(tmp_path: Path) -> None:
    options = ("--eval-iters", "1", "--eval-interval", "3", "--tensorboard-dir", str(tmp_path / "board"))
    run = train(tmp_path, *options)
    lines = [match for match in map(LOG_LINE.fullmatch, run.out.splitlines()) if match]
    assert [int(line["step"]) for line in lines] == [1, 2, 3, 4, 5, 6]
    steps = [line for line in run.metrics if "split" not in line]
    for line, record in zip(lines, steps, strict=True):
        assert list(record) == KEYS
        assert float(line["loss"]) == pytest.approx(record["loss"], rel=1e-6)
        assert float(line["lr"]) == pytest.approx(record["lr"], rel=1e-6)
        assert int(line["samples"]) == record["consumed_samples"] == 8 * record["step"]
        assert record["consumed_tokens"] == 16 * record["consumed_samples"]
        assert record["tokens_per_s"] == pytest.approx(8 * 16 / record["step_time_s"])
    evaluations = [line for line in run.metrics if "split" in line]
    assert [list(line) for line in evaluations] == [["step", "split", "loss", "ppl"]] * 3
    assert all(line["ppl"] == pytest.approx(math.exp(line["loss"])) for line in evaluations)
    last = evaluations[1]["loss"]
    assert (
        f" validation loss at iteration 6 | lm loss value: {last:.6E} | lm loss PPL: {math.exp(last):.6E} |" in run.out
    )
    scalars = tensorboard_scalars(tmp_path / "board")
    assert [value for _, value in scalars["train/loss"]] == pytest.approx([line["loss"] for line in steps], rel=1e-6)
    assert [step for step, _ in scalars["valid/loss"]] == [3, 6]
    assert "train/mfu" not in scalars  # not known on a CPU


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> [(step, value)] of the one event file: length, checksum, event, checksum."""
    (path,) = folder.glob("events.out.tfevents.*")
    data, scalars = path.read_bytes(), {}
    while data:
        size = int.from_bytes(data[:8], "little")
        event = event_pb2.Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]
        for value in event.summary.value:
            scalars.setdefault(value.tag, []).append((event.step, value.simple_value))
    return scalars


def test_a_mixture_of_experts_reports_losses_loads_and_dropped_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = dict(
        moe_aux_loss=1.25, moe_z_loss=0.5, expert_load_max=1.75, expert_load_min=0.25, dropped_tokens=3
    )  # fmt: skip
    with reporter(metrics_file=str(tmp_path / "m")) as writer:
        writer.step(report(**figures))
        writer.step(report(2))
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(
        " | load_balancing_loss: 1.250000E+00 | z_loss: 5.000000E-01 | expert load over mean: 0.250 to 1.750"
        " | dropped tokens:      3 |"
    )
    assert second.endswith("number of nan iterations:   0 |")
    records = read_metrics(tmp_path / "m")
    assert list(records[0]) == [*KEYS, *figures]
    assert records[0].items() >= figures.items()
    assert list(records[1]) == KEYS  # a dense model has no such figures


def test_the_log_interval_takes_the_mean_time_and_keeps_first_and_last(tmp_path: Path) -> None:
    assert list(train(tmp_path, "--log-interval", "100").steps) == [1, 6]
    assert list(train(tmp_path, "--log-interval", "4").steps) == [1, 4, 6]


# ---- throughput -----------------------------------------------------------------------------------------------------
def test_flops_and_mfu_equal_a_hand_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve_for_run(load_config(OPTIONS), 4)[0]
    monkeypatch.setattr(cards, "card_of_device_kind", lambda kind: cards.CARDS["h100"])
    program = build_program(config, jax.devices()[:4])
    got = loop.step_report(program, 1, {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0}, 8, 0.25)
    # h 32, ffn 128, s 16, padded vocabulary 64, 2 layers; 8 x 16 = 128 tokens; a multiply and an add are 2 FLOPs.
    layer = 2 * (32 * 3 * 32 + 32 * 32 + 2 * 32 * 128)
    attention = 2 * 2 * 16 * 32 / 2  # scores and values over s positions, causally half
    forward = 2 * (layer + attention) + 2 * 32 * 64
    assert got.tflops_per_device == pytest.approx(3 * forward * 128 / 0.25 / 4 / 1e12, rel=1e-12)
    assert got.mfu == pytest.approx(3 * forward * 128 / 0.25 / 4 / 989e12, rel=1e-12)
    assert got.tokens_per_s == 128 / 0.25


def test_the_start_up_log_states_the_convention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = train(tmp_path, "--train-iters", "1").out
    flops = 3 * (2 * (2 * (4096 + 8192) + 1024) + 4096) * 128
    assert f"FLOPs: {flops:.4g} a step (128 tokens): 3 x forward matmuls, causal attention counted as half" in out
    assert "MFU not reported: no peak known for cpu" in out
    for part in ("versions: ", "devices: 4 x cpu", "XLA_FLAGS: ", "mesh: pp 1, dp 4", "parameters: 28,032 (", "MiB"):
        assert part in out
    assert "attention: unfused (auto; not fused since the platform is cpu, not an NVIDIA GPU, " in out


@pytest.mark.parametrize(
    ("options", "platform", "line"),
    [
        ("--bf16 --attention-dropout 0", "cuda", "attention: fused (auto)"),
        ("--bf16", "cuda", "attention: unfused (auto; not fused since attention_dropout is 0.1, not 0)"),
        ("--bf16 --attention-backend unfused", "cuda", "attention: unfused (as asked for)"),
        ("--bf16 --attention-backend fused --attention-dropout 0", "cuda", "attention: fused (as asked for)"),
    ],
)
def test_the_log_says_which_attention_runs_and_why(options: str, platform: str, line: str) -> None:
    words = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16"
    words += " --micro-batch-size 1 --global-batch-size 4 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 64"
    config = resolve_for_run(load_config([*words.split(), *options.split()]), 1)[0]
    assert attention_line(config, platform) == line


def test_saving_and_evaluating_count_neither_as_step_time_nor_hide_queued_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = loop._Clock()
    for _ in range(4):
        now[0] += 2.0
        clock.tick()
    now[0] += 100.0
    clock.pause(100.0)
    assert clock.read() == 2.0


# ---- NaN, files, terminal -------------------------------------------------------------------------------------------
def test_nan_never_reaches_the_metrics_file_and_is_counted_in_the_log(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "new folder" / "metrics.jsonl"
    with reporter(metrics_file=str(path)) as reports:
        reports.step(report(loss=math.nan, grad_norm=math.inf), num_nan=1)
        reports.evaluation(1, "valid", math.nan)
    assert [(line["loss"], line.get("grad_norm")) for line in read_metrics(path)] == [(None, None), (None, None)]
    assert read_metrics(path)[1]["ppl"] is None
    assert "number of nan iterations:   1 |" in capsys.readouterr().out


def test_perplexity_is_bounded_and_keeps_nan() -> None:
    assert perplexity(30.0) == math.exp(20.0)
    assert math.isnan(perplexity(math.nan))


def test_the_metrics_file_of_a_resumed_run_is_appended_to(tmp_path: Path) -> None:
    for step in (1, 2):
        with reporter(metrics_file=str(tmp_path / "m")) as reports:
            reports.step(report(step))
    assert [line["step"] for line in read_metrics(tmp_path / "m")] == [1, 2]


def test_a_full_disk_under_the_metrics_file_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"--metrics-file /dev/full: cannot be written \(No space left on device\)"):  # noqa: SIM117
        with reporter(metrics_file="/dev/full") as reports:
            reports.step(report())


def test_a_process_that_does_not_report_writes_nothing(tmp_path: Path, capsys: Any) -> None:
    settings = LoggingConfig(metrics_file=str(tmp_path / "m"), tensorboard_dir=str(tmp_path / "board"))
    with Reporter(settings, train_iters=6, global_batch_size=8, active=False) as reports:
        reports.step(report())
        reports.evaluation(1, "valid", 1.0)
        reports.progress()
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


def test_the_progress_bar_shows_on_a_terminal_only_and_keeps_lines_whole(tmp_path: Path) -> None:
    """Standard output goes to a pipe here. Without a terminal stderr stays empty: faults/test_resume.py."""
    options = ("--num-cpu-devices", "2", "--train-iters", "6")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    with subprocess.Popen(
        command(*options), env=quick_environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs, text=True
    ) as process:
        os.close(theirs)
        bar = _read_terminal(ours)
        assert process.stdout is not None
        out = process.stdout.read()
    assert process.returncode == 0
    assert "6/6" in bar
    assert "tokens/s" in bar
    assert len([line for line in out.splitlines() if LOG_LINE.fullmatch(line)]) == 6
    assert "\r" not in out


def _read_terminal(descriptor: int) -> str:
    data, end = b"", time.monotonic() + 90
    while time.monotonic() < end:
        if not select.select([descriptor], [], [], 1.0)[0]:
            continue
        try:
            part = os.read(descriptor, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        data += part
    os.close(descriptor)
    return data.decode()


def test_nan_steps_between_two_log_lines_are_counted(tmp_path: Path) -> None:
    out = train(
        tmp_path,
        *["--train-iters", "9", "--lr", "1e38", "--weight-decay", "1e30", "--clip-grad", "0", "--log-interval", "8"],
        "--no-check-for-nan-in-loss-and-grad",
    ).out
    first, second = (int(n) for n in re.findall(r"number of nan iterations: +(\d+)", out)[-2:])
    assert second - first == 1
    assert first > 2
