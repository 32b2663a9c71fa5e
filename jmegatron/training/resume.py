"""Which checkpoint a run goes on from, whether it fits, and what has changed since. No communication.

Everything but the arrays is read and compared before any device work.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jmegatron.checkpoint.manager import CheckpointFolder
from jmegatron.config import CheckpointConfig, Config, config_from_yaml, padded_vocab_size, to_yaml, validate
from jmegatron.errors import ConfigError, UsageError
from jmegatron.optimizer.optimizers import num_updates
from jmegatron.optimizer.schedules import Position
from jmegatron.training import startup
from jmegatron.training.program import Program
from jmegatron.training.state import TrainState

Say = Callable[[str], None]
"""Prints one line of the log."""


@dataclasses.dataclass(frozen=True)
class Resume:
    """The checkpoint that a run goes on from."""

    path: str
    step: int
    consumed_samples: int
    position: Position
    """Of the schedules."""
    saved: Config
    """Resolved options of the run that saved it."""


def find_checkpoint(config: CheckpointConfig, say: Say) -> Resume | None:
    """Returns the newest checkpoint in --load, or None if there is none yet; touches no device.

    Raises:
      UsageError: it cannot be read, or is not there and --exit-on-missing-checkpoint is given.
    """
    path = config.load
    if not path:
        return None
    with CheckpointFolder(path, option="load", read_only=True) as folder:
        step = folder.latest_step()
        if step is None:
            if config.exit_on_missing_checkpoint:
                raise UsageError(
                    f"--load {path}: no checkpoint there, and --exit-on-missing-checkpoint asks for one; fix: check the"
                    " path"
                )
            # The same line starts and resumes a run where both folders are one; otherwise it may be a slip.
            word = "" if path == config.save else "WARNING: "
            say(f"{word}--load {path}: no checkpoint there yet, starting from random weights")
            return None
        meta = folder.read_meta(step)
    saved = config_from_yaml(meta["config"], where=f"checkpoint {path}")
    return Resume(path, step, meta["consumed_samples"], Position(**meta["schedule_position"]), saved)


def load_state(program: Program, resume: Resume, say: Say) -> TrainState:
    """Returns the state of a checkpoint on the devices of this run.

    Raises:
      UsageError: it cannot be read.
    """
    with CheckpointFolder(resume.path, option="load", read_only=True) as folder:
        state = program.from_canonical(folder.restore(resume.step, program.canonical_state()))
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
    "training.fp16",
    "optimizer.optimizer",
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


def schedule_position(program: Program, state: TrainState) -> Position:
    """Returns where the schedules stand; waits for the state."""
    schedule = program.schedule
    return schedule.position.after(int(num_updates(state.optimizer)), schedule.samples_per_update)


def checkpoint_meta(config: Config, step: int, consumed: int, position: Position) -> dict[str, Any]:
    """Returns the JSON that a checkpoint carries beside its arrays."""
    return {
        "step": step,
        "consumed_samples": consumed,
        "schedule_position": dataclasses.asdict(position),
        "config": to_yaml(config),
        "versions": startup.versions(),
    }


def keep_padding(config: Config, resume: Resume) -> Config:
    """Returns the config with the checkpoint's padded vocabulary, unless the options ask for another one.

    The padding follows from tp and pp, so that a model would change its shapes with the mesh it goes on on.

    Raises:
      ConfigError: the checkpoint's padding does not fit the options (divisibility by tp and pp).
    """
    model, saved = config.model, resume.saved.model
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
