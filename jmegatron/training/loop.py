"""The training loop: data in, steps, evaluation, checkpoints, reports. Collectives happen inside the steps only.

Megatron-LM training/training.py (pretrain, train, evaluate). The host runs at most two steps ahead of the devices and
waits for a step's numbers only when it logs them.
"""

import collections
import dataclasses
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jmegatron import partition, random
from jmegatron.checkpoint.manager import CheckpointFolder
from jmegatron.config import Config, config_from_yaml, resolve, to_yaml, validate_for_devices
from jmegatron.data.build import build_gpt_datasets
from jmegatron.data.demo_corpus import ensure_demo_corpus
from jmegatron.data.loader import GlobalBatchLoader, build_global_batch
from jmegatron.data.tokenizers import build_tokenizer
from jmegatron.errors import ConfigError, UsageError
from jmegatron.mesh import build_mesh
from jmegatron.models.gpt import gpt_specs
from jmegatron.optimizer.adamw import adamw
from jmegatron.planner import cards, formulas
from jmegatron.training import startup
from jmegatron.training.build import formula_shape, learning_rate_schedule, step_settings
from jmegatron.training.report import Reporter, StepReport
from jmegatron.training.state import TrainState, init_state, train_state_shardings
from jmegatron.training.step import Batch, StepSettings, batch_shardings, make_eval_step, make_train_step

STEPS_AHEAD = 2
"""Steps that may be queued on the devices while the host goes on."""
Sources = tuple[Any, Any, Any]


# ---- what a run consists of ---------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Program:
    """Mesh, compiled steps and shardings of a run."""

    config: Config
    mesh: Mesh
    settings: StepSettings
    specs: Any
    optimizer: Any
    state_shardings: TrainState

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step."""
        training = self.config.training
        assert training.global_batch_size is not None
        data_ranks = self.mesh.shape["dp"] * self.mesh.shape["ep"]
        return training.global_batch_size // (training.micro_batch_size * data_ranks)

    def init(self) -> TrainState:
        """Returns the state before the first step, created where it lies."""
        key = random.parameter_key(jax.random.key(self.config.training.seed), "parameters")
        create = lambda key: init_state(self.specs, key, self.optimizer, self.settings.compute_dtype)  # noqa: E731
        return jax.jit(create, out_shardings=self.state_shardings)(key)

    def abstract_state(self) -> TrainState:
        """Returns shapes, dtypes and shardings of the state."""
        key = jax.random.key(0)
        shapes = jax.eval_shape(
            lambda key: init_state(self.specs, key, self.optimizer, self.settings.compute_dtype), key
        )
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, self.state_shardings
        )

    def dropout_key(self) -> Any:
        """Returns the run's dropout key, or None where nothing is dropped."""
        model = self.config.model
        if model.hidden_dropout == 0.0 and model.attention_dropout == 0.0:
            return None
        return random.parameter_key(jax.random.key(self.config.training.seed), "dropout")

    def train_step(self) -> Any:
        """Returns the jitted, donated training step."""
        step = make_train_step(self.settings, self.mesh, self.optimizer, learning_rate_schedule(self.config))
        return jax.jit(step, donate_argnums=0, out_shardings=(self.state_shardings, None))

    def abstract_batch(self) -> Batch:
        """Returns shapes, dtypes and shardings of a global batch."""
        training, seq = self.config.training, self.config.model.seq_length
        assert training.global_batch_size is not None
        lead = (self.num_microbatches, training.global_batch_size // self.num_microbatches)
        shapes = Batch(
            tokens=jax.ShapeDtypeStruct((*lead, seq), np.int32),
            labels=jax.ShapeDtypeStruct((*lead, seq), np.int32),
            loss_mask=jax.ShapeDtypeStruct((*lead, seq), np.float32),
            sample_ids=jax.ShapeDtypeStruct(lead, np.uint32),
        )
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, batch_shardings(self.mesh)
        )

    def put(self, arrays: dict[str, np.ndarray]) -> Batch:
        """Returns a global batch [global_batch, ...] on the devices, micro-batch major."""

        def leaf(array: np.ndarray, sharding: Any) -> jax.Array:
            cut = array.reshape(self.num_microbatches, -1, *array.shape[1:])
            return jax.make_array_from_callback(cut.shape, sharding, lambda index: cut[index])

        fields = {field.name: arrays[field.name] for field in dataclasses.fields(Batch)}
        return jax.tree.map(leaf, Batch(**fields), batch_shardings(self.mesh))


def build_program(config: Config, devices: list[Any]) -> Program:
    """Returns the program of a resolved config on the devices; compiles nothing.

    Raises:
      ConfigError: the options do not fit together or the devices.
    """
    dp = validate_for_devices(config, len(devices))
    parallel = config.parallel
    mesh = build_mesh(
        devices,
        pp=parallel.pipeline_model_parallel_size,
        dp=dp,
        ep=parallel.expert_model_parallel_size,
        cp=parallel.context_parallel_size,
        tp=parallel.tensor_model_parallel_size,
    )
    settings = step_settings(config, devices[0].platform)
    specs = gpt_specs(settings.model, settings.parallel)
    optimizer = adamw(settings.optimizer, learning_rate_schedule(config), partition.weight_decay_mask(specs))
    shardings = train_state_shardings(specs, optimizer, settings.compute_dtype, mesh)
    return Program(config, mesh, settings, specs, optimizer, shardings)


def resolve_for_run(config: Config, num_devices: int) -> tuple[Config, Any]:
    """Returns (the config with everything derived, the tokenizer).

    Raises:
      UsageError: the tokenizer cannot be read.
      ConfigError: the options do not fit the devices or the vocabulary.
    """
    dp = validate_for_devices(config, num_devices)
    data = config.data
    made_up = data.mock_data and config.model.vocab_size is not None
    tokenizer = None if made_up else build_tokenizer(data.tokenizer_type, data.tokenizer_model)
    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    return resolve(config, vocab_size, dp * config.parallel.expert_model_parallel_size), tokenizer


def build_data(config: Config, tokenizer: Any, resume: "Resume | None" = None) -> Sources:
    """Returns the training, validation and test samples (None where there are none).

    A resumed run's batches follow on the samples it consumed, also when the global batch size is another one now.

    Raises:
      UsageError: data are missing or damaged, or evaluation is asked for and there is nothing to evaluate on.
    """
    data, training = config.data, config.training
    assert training.global_batch_size is not None and config.model.vocab_size is not None and data.split
    prefix = ensure_demo_corpus(data.data_cache_path) if data.demo_data else None
    if data.data_path:
        (prefix,) = data.data_path
    size = training.global_batch_size
    steps_left = training.train_iters - (resume.step if resume else 0)
    evaluations = training.train_iters // training.eval_interval + 1
    train, valid, test = build_gpt_datasets(
        prefix,
        mock=data.mock_data,
        vocab_size=config.model.vocab_size,
        seq_len=config.model.seq_length,
        seed=training.seed,
        split=data.split,
        num_samples=(
            (resume.consumed_samples if resume else 0) + max(steps_left, 0) * size,
            evaluations * training.eval_iters * size,
            training.eval_iters * size,
        ),
        cache_dir=data.data_cache_path,
        eod_token=None if tokenizer is None else tokenizer.eod,
        eod_mask_loss=data.eod_mask_loss,
    )
    if train is None:
        raise UsageError(f"--split {data.split}: no documents to train on; fix: give training a weight above 0")
    if valid is None and training.eval_iters:
        raise UsageError(
            f"--split {data.split}: no documents to evaluate on, but --eval-iters is {training.eval_iters}; fix: give"
            " validation a weight above 0, or --eval-iters 0"
        )
    return train, valid, test


# ---- evaluation ---------------------------------------------------------------------------------------------------
class Evaluator:
    """Evaluates on the same first eval_iters global batches every time, so that losses of a run compare.

    (The reference walks on through the validation samples instead.) The training state is only read.
    """

    def __init__(self, program: Program, sources: Sources):
        self._program = program
        self._sources = {"valid": sources[1], "test": sources[2]}
        self._step = jax.jit(make_eval_step(program.settings, program.mesh))

    def has(self, split: str) -> bool:
        """Returns whether there is something to evaluate."""
        return self._sources[split] is not None and self._program.config.training.eval_iters > 0

    def __call__(self, parameters: Any, split: str) -> float:
        """Returns the loss: sum over all counted tokens divided by their number."""
        training = self._program.config.training
        size = training.global_batch_size
        assert size is not None
        sums = [
            self._step(parameters, self._program.put(build_global_batch(self._sources[split], i * size, size)))
            for i in range(training.eval_iters)
        ]
        loss = sum(float(s["loss_sum"]) for s in sums)
        return loss / max(sum(float(s["num_tokens"]) for s in sums), 1.0)


# ---- checkpoints --------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Resume:
    """The checkpoint that a run goes on from."""

    path: str
    step: int
    consumed_samples: int
    saved: Config
    """Resolved options of the run that saved it."""


def find_checkpoint(path: str | None, say: Any) -> Resume | None:
    """Returns the newest checkpoint in --load, or None if there is none yet; touches no device.

    Raises:
      UsageError: it cannot be read.
    """
    if not path:
        return None
    with CheckpointFolder(path, option="load", read_only=True) as folder:
        step = folder.latest_step()
        if step is None:
            say(f"--load {path}: no checkpoint there yet, starting from random weights")
            return None
        meta = folder.read_meta(step)
    saved = config_from_yaml(meta["config"], where=f"checkpoint {path}")
    return Resume(path, step, int(meta["consumed_samples"]), saved)


def load_state(program: Program, resume: Resume, say: Any) -> TrainState:
    """Returns the state of a checkpoint on the devices of this run.

    Raises:
      UsageError: it cannot be read.
    """
    with CheckpointFolder(resume.path, option="load", read_only=True) as folder:
        state = folder.restore(resume.step, program.abstract_state())
    say(f"resumed from {resume.path}, step {resume.step}, consumed samples {resume.consumed_samples}")
    for line in changed_options(program.config, resume.saved):
        say(line)
    return state


def check_save_folder(path: str | None, first: int) -> None:
    """Refuses a --save folder with steps beyond the run's first: they would not be replaced, and be resumed from.

    Raises:
      UsageError: it has some.
    """
    if not path:
        return
    with CheckpointFolder(path, option="save", read_only=True) as folder:
        newest = folder.latest_step()
    if newest is not None and newest > first:
        raise UsageError(
            f"--save {path}: holds a checkpoint of step {newest}, but this run starts at step {first}; expected a"
            f" folder without later steps; fix: go on from it with --load {path}, or give another folder"
        )


_NO_NUMBERS = ("exit_interval", "eval_interval", "eval_iters", "data_cache_path")
"""Options of the sections below that do not change what a step computes."""


def changed_options(config: Config, saved: Config) -> list[str]:
    """Returns a line for each option that decides a run's numbers and is another one than in the checkpoint."""
    lines = []
    for section in ("model", "optimizer", "training", "data"):
        now, then = (dataclasses.asdict(getattr(c, section)) for c in (config, saved))
        lines += [
            f"changed since the checkpoint: {section}.{name} {now[name]} applies (saved with {then[name]})"
            for name in now
            if now[name] != then[name] and name not in _NO_NUMBERS
        ]
    return lines


_STRUCTURE_OPTIONS = (
    "training.bf16",
    "model.num_layers",
    "model.hidden_size",
    "model.ffn_hidden_size",
    "model.num_attention_heads",
    "model.num_query_groups",
    "model.kv_channels",
    "model.max_position_embeddings",
    "model.position_embedding_type",
    "model.normalization",
    "model.apply_layernorm_1p",
    "model.activation",
    "model.disable_bias_linear",
    "model.add_qkv_bias",
    "model.untie_embeddings_and_output_weights",
    "model.qk_layernorm",
    "model.vocab_size",
    "model.padded_vocab_size",
)
"""What the tree of arrays follows from."""


def check_same_model(config: Config, resume: Resume) -> None:
    """Compares everything that the arrays' shapes follow from.

    Raises:
      ConfigError: something differs.
    """
    for name in _STRUCTURE_OPTIONS:
        section, option = name.split(".")
        now, then = (getattr(getattr(c, section), option) for c in (config, resume.saved))
        if now != then:
            flag = f"--{option.replace('_', '-')} {then}"
            if isinstance(then, bool):
                flag = f"--{'' if then else 'no-'}{option.replace('_', '-')}"
            raise ConfigError(
                f"--load {resume.path}: {name} is {now}, but the checkpoint was saved with {then}; fix: give {flag}, or"
                " another --load folder"
            )


def _meta(config: Config, step: int, consumed: int) -> dict[str, Any]:
    return {
        "step": step,
        "consumed_samples": consumed,
        "config": to_yaml(config),
        "versions": startup.versions(),
    }


# ---- profile ------------------------------------------------------------------------------------------------------
class Profile:
    """Records a JAX trace of the steps [profile_step_start, profile_step_end)."""

    def __init__(self, config: Config):
        logging = config.logging
        self._folder = startup.profile_dir(config)
        self._first, self._end = logging.profile_step_start, logging.profile_step_end
        self._wanted, self._running = logging.profile, False

    def misses(self, first: int, last: int) -> bool:
        """Returns whether a trace is wanted of which no step lies in first .. last."""
        return self._wanted and (self._first > last or self._end <= first)

    def before(self, step: int) -> None:
        """Starts the trace if `step` is the first one to record."""
        if self._wanted and not self._running and self._first <= step < self._end:
            jax.profiler.start_trace(self._folder)
            self._running = True

    def after(self, step: int, results: Any) -> None:
        """Stops the trace after the last step to record."""
        if self._running and step + 1 >= self._end:
            jax.block_until_ready(results)
            self.stop()

    def stop(self) -> None:
        """Ends a running trace."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = self._wanted = False


# ---- the run ------------------------------------------------------------------------------------------------------
def run(config: Config, devices: list[Any] | None = None) -> None:
    """Trains as the options say on the devices (default: all that JAX finds); returns when done.

    Raises:
      UsageError: something the user can put right (exit status 2).
    """
    startup.check_outputs(config)
    startup.configure_devices(config)
    devices = devices or jax.devices()
    config, tokenizer = resolve_for_run(config, len(devices))
    resume = find_checkpoint(config.checkpoint.load, _say_first)
    if resume:
        check_same_model(config, resume)
    check_save_folder(config.checkpoint.save, resume.step if resume else 0)
    sources = build_data(config, tokenizer, resume)
    cache = startup.configure_compilation_cache(config)
    program = build_program(config, devices)
    for line in startup.startup_lines(config, program.mesh, program.specs, cache):
        _say_first(line)
    state = load_state(program, resume, _say_first) if resume else program.init()
    _train(program, state, resume.consumed_samples if resume else 0, sources)


def _say_first(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


def _compile(program: Program, state: TrainState, key: Any) -> Any:
    _say_first("compiling the training step ...")
    start = time.perf_counter()
    compiled = program.train_step().lower(state, program.abstract_batch(), key).compile()
    _say_first(startup.compiled_line(compiled, time.perf_counter() - start))
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


def _train(program: Program, state: TrainState, consumed: int, sources: Sources) -> None:
    config, training = program.config, program.config.training
    assert training.global_batch_size is not None
    first = int(state.step)
    reporter = Reporter(
        config.logging,
        train_iters=training.train_iters,
        global_batch_size=training.global_batch_size,
        first_step=first,
        run_config=dataclasses.asdict(config),
        active=jax.process_index() == 0,
    )
    folder = CheckpointFolder(config.checkpoint.save, option="save") if config.checkpoint.save else None
    evaluate = Evaluator(program, sources)
    profile = Profile(config)
    try:
        with reporter:
            if first >= training.train_iters:
                reporter.say(f"nothing to do: step {first} of {training.train_iters} is already reached")
                return
            if profile.misses(first + 1, training.train_iters):
                reporter.say(f"--profile: its steps are not among {first + 1} .. {training.train_iters}: no trace")
            state = _steps(program, state, consumed, sources[0], reporter, folder, evaluate, profile)
            if evaluate.has("test") and int(state.step) == training.train_iters:
                reporter.evaluation(int(state.step), "test", evaluate(state.parameters, "test"))
    finally:
        profile.stop()
        if folder is not None:
            folder.close()


def _steps(
    program: Program,
    state: TrainState,
    consumed: int,
    train_source: Any,
    reporter: Reporter,
    folder: CheckpointFolder | None,
    evaluate: Evaluator,
    profile: Profile,
) -> TrainState:
    config, training = program.config, program.config.training
    size = training.global_batch_size
    assert size is not None
    key = program.dropout_key()
    train_step = _compile(program, state, key)
    report = _make_report_function(program)
    in_flight: collections.deque[Any] = collections.deque()
    first, last = int(state.step), training.train_iters
    with GlobalBatchLoader(train_source, size, consumed) as loader:
        clock = _Clock()
        for step in range(first + 1, last + 1):
            profile.before(step)
            state, metrics = train_step(state, program.put(next(loader)), key)
            consumed += size
            profile.after(step, metrics)
            in_flight.append(metrics)
            if len(in_flight) > STEPS_AHEAD:
                jax.block_until_ready(in_flight.popleft())
            clock.tick()
            reporter.progress()
            if step % config.logging.log_interval == 0 or step in (first + 1, last):
                jax.block_until_ready(metrics)
                reporter.step(report(step, metrics, consumed, clock.read()))
            leave = training.exit_interval is not None and step % training.exit_interval == 0
            evaluating = evaluate.has("valid") and (step == last or _is_due(step, training.eval_interval))
            saving = folder is not None and (leave or step == last or _is_due(step, config.checkpoint.save_interval))
            if evaluating or saving:
                jax.block_until_ready(metrics)  # queued steps are no pause
            start = time.perf_counter()
            if evaluating:
                reporter.evaluation(step, "valid", evaluate(state.parameters, "valid"))
            if saving:
                assert folder is not None
                folder.save(step, state, _meta(config, step, consumed))
                reporter.say(f"saving checkpoint at iteration {step} to {config.checkpoint.save}")
            clock.pause(time.perf_counter() - start)
            if leave:
                reporter.say(f"exiting at iteration {step} (--exit-interval {training.exit_interval})")
                break
    return state


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0


def _make_report_function(program: Program) -> Any:
    config = program.config
    size, seq = config.training.global_batch_size, config.model.seq_length
    assert size is not None
    num_devices = program.mesh.devices.size
    flops = formulas.model_flops_per_step(formula_shape(config), size * seq, causal_skip=True)
    card = cards.card_of_device_kind(program.mesh.devices.flat[0].device_kind)

    def report(step: int, metrics: Any, consumed: int, seconds: float) -> StepReport:
        return StepReport(
            step=step,
            loss=float(metrics["loss"]),
            grad_norm=float(metrics["grad_norm"]),
            lr=float(metrics["lr"]),
            loss_scale=1.0,
            skipped=0,
            consumed_samples=consumed,
            consumed_tokens=consumed * seq,
            step_time_s=seconds,
            tokens_per_s=size * seq / seconds,
            tflops_per_device=flops / seconds / num_devices / 1e12,
            mfu=None if card is None else formulas.mfu(flops, seconds, num_devices, card.peak_bf16_flops),
        )

    return report
