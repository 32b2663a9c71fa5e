"""The training loop: steps, evaluation, checkpoints, reports. Collectives happen inside the steps only.

Megatron-LM training/training.py (pretrain, train, evaluate). The host runs at most two steps ahead of the devices and
waits for a step's numbers only when it logs them.
"""

import collections
import dataclasses
import itertools
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jmegatron import partition
from jmegatron.checkpoint import steps
from jmegatron.checkpoint.peers import Peers
from jmegatron.checkpoint.writer import CheckpointWriter, Outcome, Retention
from jmegatron.config import Config
from jmegatron.data.gpt_dataset import Sources
from jmegatron.data.loader import GlobalBatchLoader
from jmegatron.errors import TrainingError
from jmegatron.mesh import rank_coordinates
from jmegatron.optimizer.schedules import START
from jmegatron.planner import cards, formulas
from jmegatron.training import startup
from jmegatron.training.agreement import agree, data_facts, program_digest
from jmegatron.training.batches import CompactBatch
from jmegatron.training.build import attention_backend, formula_shape
from jmegatron.training.evaluation import Evaluator
from jmegatron.training.job import SLOW_MINUTES, Job
from jmegatron.training.profile import Profile
from jmegatron.training.program import Program, build_program, resolve_for_run
from jmegatron.training.replicas import ReplicaCheck
from jmegatron.training.report import EXPERT_FIGURES, Reporter, StepReport
from jmegatron.training.resume import (
    check_same_model,
    check_save_folder,
    checkpoint_meta,
    clear_save_folder,
    dropout_key,
    find_checkpoint,
    keep_padding,
    keep_schedules,
    load_state,
    schedule_position,
)
from jmegatron.training.samples import build_data
from jmegatron.training.state import TrainState
from jmegatron.training.straggler import StragglerLog
from jmegatron.training.xla_flags import check_environment

STEPS_AHEAD = 2
"""Steps that may be queued on the devices while the host goes on."""


# ---- the run ------------------------------------------------------------------------------------------------------
def run(config: Config, devices: list[Any] | None = None, job: Job | None = None) -> None:
    """Trains as the options say on the devices (default: all that JAX finds); returns when done.

    Args:
      config: the options.
      devices: of all processes.
      job: the processes; default: this one alone.

    Raises:
      UsageError: something the user can put right (exit status 2).
    """
    job = job or Job()
    startup.check_outputs(config)
    check_environment()
    startup.configure_devices(config)
    job.watch("finding the devices")
    devices = devices or jax.devices()
    if job.count != jax.process_count():
        raise ValueError(f"run: the job has {job.count} processes, jax.distributed {jax.process_count()}; see `join`")
    if config.checkpoint.load:
        _say_first("checking the checkpoint ...")
    job.watch("checking the checkpoint", SLOW_MINUTES)
    peers = Peers(job.index, job.count, job.store, SLOW_MINUTES * 60)
    resume = find_checkpoint(config.checkpoint, _say_first, peers)
    config = keep_padding(config, resume) if resume else config
    config, tokenizer = resolve_for_run(config, len(devices), devices[0].device_kind, _say_first)
    if resume:
        check_same_model(config, resume)
        config = keep_schedules(config, resume, _say_first)
    check_save_folder(config.checkpoint.save, resume)
    attention_backend(config, devices[0].platform)  # refuses what cannot serve
    cache = startup.configure_compilation_cache(config)
    _say_first("preparing the data ...")
    job.watch("preparing the data", SLOW_MINUTES)
    sources = build_data(config, tokenizer, resume)
    if job.store is not None:
        agree(job, "data", data_facts(jax.local_devices(), sources, resume.identity if resume else None))
    program = build_program(config, devices, resume.position if resume else START)
    schedule = program.settings.pipeline.build(program.num_microbatches)
    lines = startup.startup_lines(config, program.mesh, program.specs, cache, program.xla_options.lines)
    for line in lines + startup.pipeline_lines(schedule):
        _say_first(line)
    if config.logging.log_ranks:
        for line in startup.rank_lines(program.mesh, job.hosts):
            _say_first(line)
    startup.check_memory(program.specs, config, program.mesh)
    job.watch("making the state", SLOW_MINUTES)
    state = load_state(program, resume, _say_first) if resume else program.init()
    if job.index == 0:
        clear_save_folder(config.checkpoint.save, resume, _say_first)
    key = dropout_key(program, resume)
    Trainer(program, state, resume.consumed_samples if resume else 0, sources, job, key, peers).run()


def _say_first(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


def _compile(program: Program, state: TrainState, batch: CompactBatch, key: Any, job: Job) -> Any:
    _say_first("compiling the training step ...")
    start = time.perf_counter()
    lowered = program.train_step().lower(state, batch, key)
    if job.store is not None:
        digest = program_digest(lowered.as_text())
        agree(job, "program", {"digest of the training step": digest}, TrainingError)
    job.watch("compiling the training step", SLOW_MINUTES)
    compiled = lowered.compile()
    _say_first(startup.compiled_line(compiled, time.perf_counter() - start))
    job.meet("compiled", SLOW_MINUTES)  # so that the first step's time is that of a step
    return compiled


class _Clock:
    """Mean seconds of a training step since the last report, evaluation and saving left out."""

    def __init__(self) -> None:
        self._start, self._steps, self._paused = time.perf_counter(), 0, 0.0

    def tick(self) -> None:
        self._steps += 1

    def pause(self, seconds: float) -> None:
        self._paused += seconds

    def read(self) -> float:
        now = time.perf_counter()
        mean = (now - self._start - self._paused) / max(self._steps, 1)
        self._start, self._steps, self._paused = now, 0, 0.0
        return mean


class Trainer:
    """A run under way: its program, its state, and everything that watches or keeps it.

    Args:
      program: mesh, steps and shardings.
      state: where training starts.
      consumed_samples: samples used up before.
      sources: training, validation and test samples.
      job: the processes.
      dropout_key: None where nothing is dropped.
      peers: the processes, as checkpoints see them.
    """

    def __init__(
        self,
        program: Program,
        state: TrainState,
        consumed_samples: int,
        sources: Sources,
        job: Job,
        dropout_key: Any,
        peers: Peers,
    ):
        config = program.config
        assert config.training.global_batch_size is not None and config.training.train_iters is not None
        self.program, self.state, self.consumed_samples = program, state, consumed_samples
        assert sources[0] is not None
        self._source = sources[0]
        self._first, self._last = int(state.step), config.training.train_iters
        self._batch_size = config.training.global_batch_size
        self._reporter = Reporter(
            config.logging,
            train_iters=self._last,
            global_batch_size=self._batch_size,
            first_step=self._first,
            run_config=dataclasses.asdict(config),
            active=jax.process_index() == 0,
        )
        self._writer = None
        if config.checkpoint.save:
            self._writer = CheckpointWriter(
                config.checkpoint.save,
                peers,
                in_background=config.checkpoint.async_save,
                retention=Retention(config.checkpoint.keep_latest, config.checkpoint.keep_every),
            )
        self._unsaved: Outcome | None = None
        self._key = dropout_key
        self._job = job
        self._evaluate = Evaluator(program, sources, job)
        self._straggler = StragglerLog(job, wanted=config.logging.log_straggler)
        self._check_replicas = ReplicaCheck(program.mesh, program.state_shardings)
        self._profile = Profile(config)
        self._clock = _Clock()
        self._in_flight: collections.deque[Any] = collections.deque()
        self._num_nan = 0
        self._dropped = 0  # tokens, since the last report

    def run(self) -> None:
        """Trains to the last step, or to where the options or a signal say."""
        try:
            with self._reporter:
                if self._first >= self._last:
                    self._say(f"nothing to do: step {self._first} of {self._last} is already reached")
                elif self._profile.misses(self._first + 1, self._last):
                    self._say(f"--profile: its steps are not among {self._first + 1} .. {self._last}: no trace")
                if self._first < self._last and self._steps() == self._last and self._evaluate.has("test"):
                    self._report_evaluation(self._last, "test")
        except BaseException:
            if self._job.count == 1:  # others may never come to where a save is finished
                self._close()
            raise
        self._close()
        self._check_last_save()

    def _close(self) -> None:
        self._profile.stop()
        if self._writer is not None:
            self._job.watch("finishing the last checkpoint", SLOW_MINUTES)
            self._writer.wait()
            self._look_at_saves(self._writer)
        self._job.watch(None)

    def _say(self, text: str) -> None:
        self._reporter.say(text)

    def _steps(self) -> int:
        """Runs the steps and returns the last one done."""
        key = self._key
        with self._loader() as loader:
            first = next(loader)
            train_step = _compile(self.program, self.state, first, key, self._job)
            batches = itertools.chain([first], loader)
            del first
            self._job.train(
                self._first,
                self.program.config.training.exit_duration_in_mins,
                self.program.config.checkpoint.save_interval_minutes if self._writer else None,
            )
            self._clock.read()
            self._straggler.reset()
            for step in range(self._first + 1, self._last + 1):
                self._job.watch(f"step {step}")
                self._profile.before(step)
                batch = next(batches)
                with self._straggler.waiting(1):
                    self.state, metrics = train_step(self.state, batch, key)
                del batch
                self.consumed_samples += self._batch_size
                self._profile.after(step, metrics)
                self._in_flight.append((step, metrics))
                self._wait(STEPS_AHEAD)
                if self._after_step(step, metrics):
                    return step
        return self._last

    def _wait(self, may_run: int) -> None:
        """Waits until at most `may_run` steps are unfinished, and looks at the numbers of each that finished.

        Raises:
          TrainingError: one is not finite, and --check-for-nan-in-loss-and-grad is on.
        """
        while len(self._in_flight) > may_run:
            step, metrics = self._in_flight.popleft()
            with self._straggler.waiting():
                loss = float(metrics["loss"])
            self._num_nan += not math.isfinite(loss)
            if self.program.config.training.check_for_nan_in_loss_and_grad:
                check_finite(self.program, step, loss, metrics)
            self._dropped += int(metrics.get("dropped_tokens", 0))

    def _loader(self) -> GlobalBatchLoader:
        """Returns the training batches from here on; threads put them onto the devices ahead of the steps."""
        return GlobalBatchLoader(
            self._source,
            self._batch_size,
            self.consumed_samples,
            order=self.program.sample_order(len(self._source)),
            rows=self.program.placer.rows,
            place=self.program.put,
            num_workers=self.program.config.data.num_workers,
        )

    def _after_step(self, step: int, metrics: Any) -> bool:
        """Logs, evaluates and saves where due; returns whether to stop."""
        config, last = self.program.config, step == self._last
        self._clock.tick()
        self._reporter.progress()
        if last or step == self._first + 1 or _is_due(step, config.logging.log_interval):
            self._wait(0)
            report = step_report(
                self.program, step, metrics, self.consumed_samples, self._clock.read(), dropped_tokens=self._dropped
            )
            self._dropped = 0
            self._reporter.step(report, self._num_nan)
            slow = self._straggler.report(step, report.step_time_s)
            if slow is not None:
                self._say(slow)
        reason = self._job.stops_after(step)
        if _is_due(step, config.training.exit_interval):
            reason = f"--exit-interval {config.training.exit_interval}"
        leave = reason is not None
        evaluating = self._evaluate.has("valid") and (last or _is_due(step, config.training.eval_interval))
        saving = leave or last or _is_due(step, config.checkpoint.save_interval)
        saving = self._job.saves_after(step, saving) or saving
        comparing = _is_due(step, config.training.check_weight_hash_across_dp_replicas_interval)
        if evaluating or saving or comparing:
            self._wait(0)  # queued steps are no pause
        start = time.perf_counter()
        with self._straggler.waiting():
            if comparing:
                self._check_replicas(step, self.state)
            if evaluating:
                self._report_evaluation(step, "valid")
            if saving and self._writer is not None:
                self._save(self._writer, step)
        self._clock.pause(time.perf_counter() - start)
        if self._writer is not None:
            self._look_at_saves(self._writer)
        if leave:
            self._say(f"exiting at iteration {step} ({reason})")
        return leave

    def _save(self, writer: CheckpointWriter, step: int) -> None:
        self._job.watch(f"saving step {step}", SLOW_MINUTES)
        self._say(f"saving checkpoint at iteration {step} to {self.program.config.checkpoint.save}")
        position = schedule_position(self.program, self.state)
        meta = checkpoint_meta(self.program.config, step, self.consumed_samples, position, self._key)
        writer.save(step, self.program.saved_arrays(self.state), meta)

    def _look_at_saves(self, writer: CheckpointWriter) -> None:
        """Says how saves have ended that have since the last look."""
        for outcome in writer.outcomes():
            self._unsaved = outcome if outcome.problem else None
            if outcome.problem:
                self._say(
                    f"WARNING: --save {self.program.config.checkpoint.save}: the checkpoint of iteration {outcome.step}"
                    f" could not be written: {outcome.problem}; training goes on, and the next save tries again"
                )
            else:
                removed = f"; removed step {', '.join(map(str, outcome.removed))}" if outcome.removed else ""
                self._say(f"saved checkpoint of iteration {outcome.step} in {outcome.seconds:.1f} s{removed}")

    def _check_last_save(self) -> None:
        """Raises TrainingError if the newest state is not on the disk."""
        if self._unsaved is None:
            return
        path = self.program.config.checkpoint.save
        assert path is not None
        try:
            newest = steps.complete_steps(Path(path))[-1:]
        except OSError:
            newest = []
        there = f"the last complete one is step {newest[0]}" if newest else "there is no complete one"
        raise TrainingError(
            f"--save {path}: the last checkpoint, of iteration {self._unsaved.step}, could not be written:"
            f" {self._unsaved.problem}; {there}; fix: make room, or give another folder, and --load {path} to go on"
        )

    def _report_evaluation(self, step: int, split: str) -> None:
        self._reporter.evaluation(step, split, self._evaluate(self.state.parameters, split))


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0


def check_finite(program: Program, step: int, loss: float, metrics: Any) -> None:
    """Checks the loss and every gradient of a step.

    Raises:
      TrainingError: one is not finite; the message names the step, the data-parallel ranks whose loss is not, the first
        such gradient, and the first rank whose own is not.
    """
    if math.isfinite(loss) and np.isfinite(float(metrics["grad_norm"])):
        return
    found = []
    if not math.isfinite(loss):
        ranks = np.flatnonzero(~np.isfinite(_of_all_ranks(metrics["rank_loss_sums"])))
        found.append(f"loss {loss} (data-parallel ranks {', '.join(map(str, ranks))})")
    leaves = np.flatnonzero(~np.isfinite(np.asarray(metrics["leaf_norms"])))
    if len(leaves):
        path, _ = partition.named_specs(program.specs)[leaves[0]]
        found.append(f"gradient of {path}{_and_more(len(leaves))}")
        found[-1] += _origin(program.mesh, ~_of_all_ranks(metrics["finite_gradients"])[:, leaves[0]])
    raise TrainingError(
        f"step {step}: not finite: {', '.join(found) or 'the gradient norm'}; fix: a lower --lr or a longer warm-up,"
        " --bf16 instead of --fp16, or look at the data of this step; --no-check-for-nan-in-loss-and-grad goes on"
        " regardless"
    )


def _of_all_ranks(values: Any) -> np.ndarray:
    """Returns values that lie on the ranks; every process must ask, and does, since all see the same loss and norm."""
    return np.asarray(values if jax.process_count() == 1 else multihost_utils.process_allgather(values, tiled=True))


def _and_more(count: int) -> str:
    return f" and {count - 1} more" if count > 1 else ""


def _origin(mesh: Any, bad: np.ndarray) -> str:
    """Returns where a gradient that is bad on the marked ranks comes from."""
    ranks = np.flatnonzero(bad).tolist()
    if not ranks:
        return ", finite on every rank: their sum or its norm is not"
    where = ", ".join(f"{axis} {rank}" for axis, rank in rank_coordinates(mesh, ranks[0]).items())
    return f", on rank {ranks[0]} ({where}){_and_more(len(ranks))}"


def step_report(
    program: Program, step: int, metrics: Any, consumed_samples: int, seconds: float, *, dropped_tokens: int = 0
) -> StepReport:
    """Returns what is reported of one step; waits for its numbers.

    Args:
      program: the run's.
      step: number of the step, from 1.
      metrics: of the step, on the devices.
      consumed_samples: after the step.
      seconds: mean time of a step since the last report.
      dropped_tokens: of the steps since the last report.
    """
    config = program.config
    seq, size = config.model.seq_length, config.training.global_batch_size
    assert size is not None
    num_devices = program.mesh.devices.size
    flops = formulas.model_flops_per_step(formula_shape(config), size * seq, causal_skip=True)
    card = cards.card_of_device_kind(program.mesh.devices.flat[0].device_kind)
    experts: dict[str, Any] = {name: float(metrics[name]) for name in EXPERT_FIGURES if name in metrics}
    if experts:
        experts["dropped_tokens"] = dropped_tokens
    return StepReport(
        step=step,
        loss=float(metrics["loss"]),
        grad_norm=float(metrics["grad_norm"]),
        lr=float(metrics["lr"]),
        loss_scale=float(metrics.get("loss_scale", 1.0)),
        skipped=int(metrics.get("skipped", 0)),
        consumed_samples=consumed_samples,
        consumed_tokens=consumed_samples * seq,
        step_time_s=seconds,
        tokens_per_s=size * seq / seconds,
        tflops_per_device=flops / seconds / num_devices / 1e12,
        mfu=None if card is None else formulas.mfu(flops, seconds, num_devices, card.peak_bf16_flops),
        **experts,
    )
