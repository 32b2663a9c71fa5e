"""What a run reports: log lines, metrics file, TensorBoard, Weights & Biases, progress bar. No communication.

Only the first process reports. The log line has the fields and the order that tools for Megatron-LM parse
(training.py training_log); the metrics file has one JSON object a line.
"""

import contextlib
import dataclasses
import datetime
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from jmegatron.config import LoggingConfig
from jmegatron.errors import ConfigError, UsageError


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One logged step. The fields of the metrics file, in its order."""

    step: int
    loss: float
    """Token-weighted mean over the global batch of this step, in nats."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """Of this step."""
    loss_scale: float
    skipped: int
    """Skipped steps since the run started."""
    consumed_samples: int
    consumed_tokens: int
    step_time_s: float
    """Mean over the steps since the last report, without evaluation and saving."""
    tokens_per_s: float
    tflops_per_device: float
    """Model FLOPs: 3 x forward matmuls, attention counted causally (half), output layer included."""
    mfu: float | None
    """tflops_per_device over the card's dense bf16 peak; None where the peak is not known (CPU)."""
    moe_aux_loss: float | None = None
    """Balancing loss of the routers without its coefficient, mean over layers, micro-batches and replicas of this step;
    None without such a loss. This and what follows: None in a dense model."""
    moe_z_loss: float | None = None
    """z-loss likewise; None without a coefficient."""
    expert_load_max: float | None = None
    """Tokens of the expert with most of them over its layer's mean, of all layers, in this step."""
    expert_load_min: float | None = None
    """Tokens of the expert with fewest of them likewise."""
    dropped_tokens: int | None = None
    """Choices of the routers since the last report that found no place: beyond a capacity, or the bound of received
    rows."""


EXPERT_FIGURES = ("moe_aux_loss", "moe_z_loss", "expert_load_max", "expert_load_min", "dropped_tokens")
"""Fields that only a mixture of experts has, by their names among a step's metrics."""


def log_line(report: StepReport, *, train_iters: int, global_batch_size: int, num_nan: int) -> str:
    """Returns the line of one step as Megatron-LM prints it."""
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    fields = [
        f"iteration {report.step:8d}/{train_iters:8d}",
        f"consumed samples: {report.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {report.step_time_s * 1000:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {report.tflops_per_device:.3f}",
        f"learning rate: {report.lr:.6E}",
        f"global batch size: {global_batch_size:5d}",
        f"lm loss: {report.loss:.6E}",
        f"loss scale: {report.loss_scale:.1f}",
        f"grad norm: {report.grad_norm:.3f}",
        f"number of skipped iterations: {report.skipped:3d}",
        f"number of nan iterations: {num_nan:3d}",
    ]
    if report.moe_aux_loss is not None:
        fields.append(f"load_balancing_loss: {report.moe_aux_loss:.6E}")
    if report.moe_z_loss is not None:
        fields.append(f"z_loss: {report.moe_z_loss:.6E}")
    if report.expert_load_max is not None:
        fields += [
            f"expert load over mean: {report.expert_load_min:.3f} to {report.expert_load_max:.3f}",
            f"dropped tokens: {report.dropped_tokens:6d}",
        ]
    return f" [{now}] " + " | ".join(fields) + " |"


def perplexity(loss: float) -> float:
    """Returns exp(min(20, loss)), the reference's bounded perplexity; NaN stays NaN."""
    return math.exp(min(loss, 20.0))


class Reporter:
    """Writes everything that is reported; a context manager.

    Args:
      settings: the logging options.
      train_iters: steps of the run.
      global_batch_size: in sequences.
      first_step: steps done before.
      run_config: resolved options, for Weights & Biases.
      active: whether this process reports.

    Raises:
      UsageError: a file or folder cannot be written.
    """

    def __init__(
        self,
        settings: LoggingConfig,
        *,
        train_iters: int,
        global_batch_size: int,
        first_step: int = 0,
        run_config: dict[str, Any] | None = None,
        active: bool = True,
    ):
        self._train_iters, self._global_batch_size = train_iters, global_batch_size
        self._active = active
        self._file: IO[str] | None = None
        self._bar: Any = None
        self._writer: Any = None
        self._wandb: Any = None
        if not active:
            return
        if settings.metrics_file:
            self._file = open_for_append(settings.metrics_file)
        if settings.tensorboard_dir:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(settings.tensorboard_dir)
        if settings.wandb_project:
            wandb = import_wandb()
            self._wandb = wandb.init(
                project=settings.wandb_project, name=settings.wandb_exp_name, config=run_config or {}
            )
        if settings.progress_bar and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=train_iters, initial=first_step, unit="step", dynamic_ncols=True)

    def __enter__(self) -> "Reporter":
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes every sink."""
        for close in self._closers():
            close()

    def _closers(self) -> list[Callable[[], Any]]:
        sinks = [(self._bar, "close"), (self._file, "close"), (self._writer, "close"), (self._wandb, "finish")]
        return [getattr(sink, name) for sink, name in sinks if sink is not None]

    def say(self, text: str) -> None:
        """Prints a line on standard output without breaking the progress bar."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def progress(self, steps: int = 1) -> None:
        """Moves the progress bar."""
        if self._bar is not None:
            self._bar.update(steps)

    def step(self, report: StepReport, num_nan: int = 0) -> None:
        """Reports one training step; `num_nan`: steps of this run, logged or not, whose loss was not finite."""
        if not self._active:
            return
        self.say(
            log_line(
                report,
                train_iters=self._train_iters,
                global_batch_size=self._global_batch_size,
                num_nan=num_nan,
            )
        )
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {report.loss:.4f}, {report.tokens_per_s:,.0f} tokens/s")
        values = dataclasses.asdict(report)
        if report.moe_aux_loss is None:
            values = {name: value for name, value in values.items() if name not in EXPERT_FIGURES}
        self._record(values, report.step, {f"train/{k}": v for k, v in values.items() if k != "step"})

    def evaluation(self, step: int, split: str, loss: float) -> None:
        """Reports one evaluation: token-weighted mean loss and perplexity of `split` ("valid" or "test")."""
        ppl = perplexity(loss)
        name = {"valid": "validation", "test": "test"}[split]
        self.say(f" {name} loss at iteration {step} | lm loss value: {loss:.6E} | lm loss PPL: {ppl:.6E} |")
        record = {"step": step, "split": split, "loss": loss, "ppl": ppl}
        self._record(record, step, {f"{split}/loss": loss, f"{split}/ppl": ppl})

    def _record(self, line: dict[str, Any], step: int, scalars: dict[str, float | None]) -> None:
        known = {name: value for name, value in scalars.items() if value is not None}
        if self._file is not None:
            # NaN is no JSON: a reader must not fail on the very step it looks for.
            clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
            self._write(json.dumps(clean) + "\n")
        if self._writer is not None:
            for name, value in known.items():
                self._writer.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(known, step=step)

    def _write(self, text: str) -> None:
        assert self._file is not None
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            # Closing would try to write the rest once more and fail again.
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()
            raise unwritable("metrics_file", file.name, error) from error


def unwritable(option: str, path: str, error: OSError) -> UsageError:
    """Returns the error for a file or folder of an option that cannot be written."""
    return UsageError(
        f"--{option.replace('_', '-')} {path}: cannot be written ({error.strerror or error}); fix: give a place that"
        " you may write to and that has room"
    )


def import_wandb() -> Any:
    """Returns the wandb module.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            "logging.wandb_project is set but the package wandb is not installed; fix: pip install 'jmegatron[wandb]',"
            " or leave --wandb-project out"
        ) from error
    return wandb


def open_for_append(path: str) -> IO[str]:
    """Returns the metrics file, created with its folder if it is not there.

    Raises:
      UsageError: that fails.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise unwritable("metrics_file", path, error) from error
