"""Which checkpoint a run goes on from, whether it fits, and what has changed since. No communication on a mesh axis.

Everything but the arrays is read and compared before any device work.
"""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmegatron.checkpoint import reader, steps
from jmegatron.checkpoint.peers import Peers
from jmegatron.checkpoint.reader import Checkpoint
from jmegatron.config import (
    CheckpointConfig,
    Config,
    ModelConfig,
    config_from_yaml,
    moe_layers,
    padded_vocab_size,
    to_yaml,
    validate,
)
from jmegatron.errors import ConfigError, TrainingError, UsageError
from jmegatron.optimizer.optimizers import num_updates
from jmegatron.optimizer.schedules import START, Position
from jmegatron.training import startup
from jmegatron.training.program import Program
from jmegatron.training.state import TrainState

Say = Callable[[str], None]
"""Prints one line of the log."""


@dataclasses.dataclass(frozen=True)
class Resume:
    """The checkpoint that a run goes on from, or begins with the weights of (`finetune`)."""

    path: str
    checkpoint: Checkpoint
    step: int
    """Where the run goes on, and so the two below: 0 with `finetune`."""
    consumed_samples: int
    position: Position
    """Of the schedules."""
    saved: Config
    """Resolved options of the run that saved it."""
    weights_only: bool = False
    """The optimizer begins anew."""
    passed: tuple[int, ...] = ()
    """Newer steps in the folder that cannot be used."""

    @property
    def has_options(self) -> bool:
        """Whether the options that it was saved with, beyond the model, say how the run went on: not if converted."""
        return "converted_from" not in self.checkpoint.manifest.meta

    @property
    def identity(self) -> str:
        """What must be the same for all processes."""
        return f"step {self.checkpoint.step} with digest {self.checkpoint.manifest.digest}"


def find_checkpoint(config: CheckpointConfig, say: Say, peers: Peers | None = None) -> Resume | None:
    """Returns the checkpoint that --load and --ckpt-step name, or None if there is none yet; touches no device.

    Communication: see `reader.find`.

    Raises:
      UsageError: it cannot be read, or is not there and --exit-on-missing-checkpoint is given.
    """
    path = config.load
    if not path:
        return None
    try:
        checkpoint, passed = reader.find(path, step=config.ckpt_step, peers=peers, say=say)
    except TimeoutError as error:
        raise TrainingError(f"--load {path}: {error}; fix: look at the log of that process") from error
    if checkpoint is None:
        if config.exit_on_missing_checkpoint or config.finetune or config.no_load_optim:
            why = "--exit-on-missing-checkpoint asks for one" if config.exit_on_missing_checkpoint else "it is needed"
            raise UsageError(f"--load {path}: no checkpoint there, and {why}; fix: check the path")
        # The same line starts and resumes a run where both folders are one; otherwise it may be a slip.
        word = "" if path == config.save else "WARNING: "
        say(f"{word}--load {path}: no checkpoint there yet, starting from random weights")
        return None
    meta = checkpoint.manifest.meta
    saved = config_from_yaml(meta["config"], where=f"checkpoint {path}")
    if config.finetune:
        return Resume(path, checkpoint, 0, 0, START, saved, weights_only=True, passed=tuple(passed))
    position = Position(**{name: meta["schedule_position"][name] for name in ("updates", "samples")})
    if config.no_load_optim:  # a new optimizer has counted no updates
        position = Position(0, position.samples)
    return Resume(
        path,
        checkpoint,
        checkpoint.step,
        meta["consumed_samples"],
        position,
        saved,
        config.no_load_optim,
        tuple(passed),
    )


def load_state(program: Program, resume: Resume, say: Say) -> TrainState:
    """Returns the state of a checkpoint on the devices of this run.

    Communication: as of `Program.state_of`, and two integers an array for the checksums.

    Raises:
      UsageError: it cannot be read, or arrays are missing, too many or of another shape.
    """
    layout, records = program.saved_layout(), resume.checkpoint.manifest.arrays
    wanted, records, lines = _chosen(layout, records, resume.weights_only)
    differing = reader.differences(records, wanted)
    if differing:
        more = [f"... and {len(differing) - 8} more"] if len(differing) > 8 else []
        raise UsageError(
            f"--load {resume.path}: the checkpoint of step {resume.checkpoint.step} does not fit this run:\n  "
            + "\n  ".join([*differing[:8], *more])
            + "\n  fix: give the options of the run that saved it, or --no-load-optim or --finetune where only the"
            " optimizer differs"
        )
    arrays = resume.checkpoint.read(wanted)
    lines += [
        f"{name}: {records[name].dtype} in the checkpoint, {a.dtype} here"
        for name, a in wanted.items()
        if records[name].dtype != str(a.dtype)
    ]
    state = program.state_of(arrays)
    if resume.step != resume.checkpoint.step:
        state = dataclasses.replace(state, step=jax.device_put(np.int32(resume.step), state.step.sharding))
    what = f"{resume.path}, step {resume.checkpoint.step}"
    if program.config.checkpoint.finetune:
        say(f"started with the weights of {what}; step 0, consumed samples 0, a new optimizer")
    else:
        anew = ", a new optimizer (--no-load-optim)" if resume.weights_only else ""
        say(f"resumed from {what}, consumed samples {resume.consumed_samples}{anew}")
    begins = program.config.checkpoint.finetune or not resume.has_options
    sections = ("model",) if begins else ("model", "optimizer", "training", "data")
    for line in [*lines, *changed_options(program.config, resume.saved, sections)]:
        say(line)
    return state


def _chosen(layout: Any, records: Any, weights_only: bool) -> tuple[Any, Any, list[str]]:
    """Returns (what this run takes of its layout, of the checkpoint's arrays, what is to be said of the rest)."""
    if weights_only:
        keep = lambda name: name == "step" or name.startswith("parameters/")  # noqa: E731
        layout, records = ({n: v for n, v in tree.items() if keep(n)} for tree in (layout, records))
        return layout, records, []
    lines = []
    # A loss scale belongs to the precision, which may change.
    scaling = lambda tree: {n for n in tree if n.startswith("loss_scale/") or n == "skipped"}  # noqa: E731
    if scaling(layout) != scaling(records):
        there = bool(scaling(records))
        lines.append(f"loss scale: {'that of the checkpoint is not needed' if there else 'none saved, it begins anew'}")
        layout, records = ({n: v for n, v in t.items() if n not in scaling(t)} for t in (layout, records))
    return layout, records, lines


def clear_save_folder(path: str | None, resume: Resume | None, say: Say) -> None:
    """Makes the --save folder ready: removes what killed runs left, sets damaged steps aside; process 0 calls it.

    Raises:
      UsageError: a damaged step cannot be set aside.
    """
    if not path:
        return
    folder = Path(path).absolute()
    for name in steps.tidy(folder):
        say(f"--save {path}: removed {name}, which a run left unfinished")
    if resume and folder == Path(resume.path).absolute():
        for step in resume.passed:
            try:
                name = steps.set_aside(folder / str(step)).name
            except OSError as error:
                raise UsageError(f"--save {path}: cannot be written: {error}; fix: check its permissions") from error
            say(f"--save {path}: set step {step} aside as {name}")


def check_save_folder(path: str | None, resume: Resume | None) -> None:
    """Refuses a --save folder with steps beyond the run's first: they would not be replaced, and be resumed from.

    Raises:
      UsageError: it has some.
    """
    if not path:
        return
    first = resume.step if resume else 0
    folder = Path(path).absolute()
    own = resume is not None and folder == Path(resume.path).absolute()
    passed = resume.passed if resume and own else ()
    try:
        later = [step for step in steps.all_steps(folder) if step > first and step not in passed]
    except OSError as error:
        raise UsageError(f"--save {path}: cannot be read: {error}; fix: check its permissions") from error
    if later:
        raise UsageError(
            f"--save {path}: holds a checkpoint of step {later[-1]}, but this run starts at step {first}; expected a"
            f" folder without later steps; fix: go on from it with --load {path} (no --finetune, no"
            " --ckpt-step), or give another folder"
        )


_NO_NUMBERS = ("padded_vocab_size", "exit_interval", "eval_interval", "eval_iters", "data_cache_path")
"""Options of the sections below that do not change what a step computes."""


_SCHEDULE_OPTIONS = (
    "lr",
    "min_lr",
    "decoupled_lr",
    "decoupled_min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_fraction",
    "lr_warmup_init",
    "lr_wsd_decay_style",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "weight_decay",
    "weight_decay_incr_style",
    "start_weight_decay",
    "end_weight_decay",
)
"""What --override-opt-param-scheduler is about."""


def keep_schedules(config: Config, resume: Resume, say: Say) -> Config:
    """Returns the config with the checkpoint's schedules, unless --override-opt-param-scheduler is given.

    Each difference is said, and which value applies. A decay whose length was derived from the length of the run goes
    on following that. A run that takes only weights has its own schedules. Megatron-LM optimizer_param_scheduler.py
    (_check_and_set) stops instead.

    Raises:
      ConfigError: the checkpoint's schedules do not fit the other options.
    """
    if config.checkpoint.finetune or not resume.has_options:
        return config
    kept: dict[str, Any] = {}
    for name in _SCHEDULE_OPTIONS:
        now, then = (getattr(c.optimizer, name) for c in (config, resume.saved))
        if now == then:
            continue
        flag = f"--{name.replace('_', '-')}"
        if _follows_run(name, config) and _follows_run(name, resume.saved):
            say(f"changed since the checkpoint: {flag} {now} applies, as long as the run (saved with {then})")
        elif config.checkpoint.override_opt_param_scheduler:
            say(
                f"changed since the checkpoint: {flag} {now} applies, for --override-opt-param-scheduler is given"
                f" (saved with {then})"
            )
        else:
            kept[name] = then
            say(
                f"WARNING: changed since the checkpoint: {flag} {then}, the checkpoint's, applies, and not {now};"
                " --override-opt-param-scheduler makes the given one apply"
            )
    if not kept:
        return config
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **kept))
    validate(config)
    return config


def _follows_run(name: str, config: Config) -> bool:
    """Returns whether an option is the length of the decay, and that is the run's."""
    length = {"lr_decay_iters": config.training.train_iters, "lr_decay_samples": config.training.train_samples}
    return name in length and getattr(config.optimizer, name) == length[name]


def changed_options(config: Config, saved: Config, sections: Iterable[str]) -> list[str]:
    """Returns a line for each option that decides a run's numbers and is another one than in the checkpoint.

    Those of the schedules are said by `keep_schedules`.
    """
    lines = []
    for section in sections:
        now, then = (dataclasses.asdict(getattr(c, section)) for c in (config, saved))
        lines += [
            f"changed since the checkpoint: {section}.{name} {now[name]} applies (saved with {then[name]})"
            for name in now
            if now[name] != then[name]
            and name not in _NO_NUMBERS
            and name not in _SCHEDULE_OPTIONS
            and not (section == "model" and _same_layers(name, config.model, saved.model))
        ]
    return lines


_STRUCTURE_OPTIONS = (
    "model.num_layers",
    "model.hidden_size",
    "model.num_experts",
    "model.moe_layer_freq",
    "model.moe_ffn_hidden_size",
    "model.moe_shared_expert_intermediate_size",
    "model.moe_router_enable_expert_bias",
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
    "model.mask_padded_vocab",
)
"""What the tree of arrays follows from; the padding of the vocabulary as well, where it is trained."""


def check_same_model(config: Config, resume: Resume) -> None:
    """Compares everything that the arrays' shapes follow from.

    Raises:
      ConfigError: something differs.
    """
    names = [*_STRUCTURE_OPTIONS]
    if not resume.weights_only:
        names.append("optimizer.optimizer")
    if not config.model.mask_padded_vocab or config.model.vocab_size is None:
        names.append("model.padded_vocab_size")
    for name in names:
        section, option = name.split(".")
        now, then = (getattr(getattr(c, section), option) for c in (config, resume.saved))
        if now == then or _same_layers(option, config.model, resume.saved.model):
            continue
        flag = f"--{option.replace('_', '-')} {then}"
        if isinstance(then, bool):
            flag = f"--{'' if then else 'no-'}{option.replace('_', '-')}"
        give = f"leave --{option.replace('_', '-')} out" if then is None else f"give {flag}"
        raise ConfigError(
            f"--load {resume.path}: {name} is {now}, but the checkpoint was saved with {then}; fix: {give}, or"
            " another --load folder"
        )


def _same_layers(option: str, now: ModelConfig, then: ModelConfig) -> bool:
    """Returns whether two values of an option make the same layers, where that follows from another one as well."""
    if option == "moe_layer_freq":
        return moe_layers(now) == moe_layers(then)
    # No layer without experts has the width of such layers.
    return option == "ffn_hidden_size" and now.num_experts is not None and all(moe_layers(now))


def schedule_position(program: Program, state: TrainState) -> Position:
    """Returns where the schedules stand; waits for the state."""
    schedule = program.schedule
    return schedule.position.after(int(num_updates(state.optimizer)), schedule.samples_per_update)


def checkpoint_meta(config: Config, step: int, consumed: int, position: Position, dropout_key: Any) -> dict[str, Any]:
    """Returns the JSON that a checkpoint carries beside its arrays."""
    key = None if dropout_key is None else np.asarray(jax.random.key_data(dropout_key)).tolist()
    return {
        "step": step,
        "consumed_samples": consumed,
        "schedule_position": dataclasses.asdict(position),
        "config": to_yaml(config),
        "versions": startup.versions(),
        "random_keys": {"dropout": key},
    }


def dropout_key(program: Program, resume: Resume | None) -> Any:
    """Returns the run's dropout key: the checkpoint's, unless another --seed is given; None where nothing is dropped.

    Raises:
      UsageError: the checkpoint's is none.
    """
    own = program.dropout_key()
    config = program.config
    if own is None or resume is None or config.checkpoint.finetune:
        return own
    saved = resume.checkpoint.manifest.meta.get("random_keys", {}).get("dropout")
    if saved is None or config.training.seed != resume.saved.training.seed:
        return own
    try:
        data = np.asarray(saved, np.uint32)
        assert data.shape == jax.random.key_data(own).shape
        return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(own))
    except (ValueError, TypeError, OverflowError, AssertionError) as error:
        raise UsageError(
            f"--load {resume.path}: the dropout key of step {resume.checkpoint.step} is {saved!r:.80}, expected as many"
            " numbers below 2^32 as a key has; fix: give another --ckpt-step"
        ) from error


def keep_padding(config: Config, resume: Resume) -> Config:
    """Returns the config with the checkpoint's padded vocabulary where padding is trained, unless another is asked for.

    The padding follows from tp and pp, so that a model would change its shapes with the mesh it goes on on. Where it is
    not trained, no checkpoint holds it.

    Raises:
      ConfigError: the checkpoint's padding does not fit the options (divisibility by tp and pp).
    """
    model, saved = config.model, resume.saved.model
    if model.mask_padded_vocab and saved.vocab_size is not None and saved.mask_padded_vocab:
        return config
    if model.vocab_size is not None:
        parallel = config.parallel
        derived = padded_vocab_size(
            model.vocab_size,
            model.make_vocab_size_divisible_by,
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
        )
        if model.vocab_size != saved.vocab_size or model.padded_vocab_size != derived:
            return config
    elif model.padded_vocab_size is not None:
        return config
    kept = dataclasses.replace(config, model=dataclasses.replace(model, padded_vocab_size=saved.padded_vocab_size))
    validate(kept)
    return kept
