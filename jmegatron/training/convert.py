"""Conversions of whole checkpoints: Hugging Face's folders and Megatron-Core's checkpoints to ours and back.

One tensor at a time, on the host; no communication, no devices. Names, shapes and options are all checked before
anything is written; what a killed conversion has written is there for the next try; what is there is never overwritten.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from omegaconf import OmegaConf

from jmegatron.checkpoint import reader, steps
from jmegatron.checkpoint.reader import Checkpoint
from jmegatron.checkpoint.streaming import StreamingReader, StreamingWriter
from jmegatron.config import Config, config_from_yaml, load_config, resolve
from jmegatron.config.options import flag_of
from jmegatron.config.options import options as all_options
from jmegatron.errors import UsageError
from jmegatron.interop import huggingface, megatron
from jmegatron.interop.pieces import check_finite
from jmegatron.interop.safetensors_folder import DTYPES, DType
from jmegatron.interop.torch_dist import TorchDistReader
from jmegatron.optimizer.schedules import Position
from jmegatron.training.build import gpt_settings, learning_rate_schedule, optimizer_settings
from jmegatron.training.resume import checkpoint_meta

Say = Callable[[str], None]
MODEL_FILE = "model.yaml"
"""Beside the steps: the model's options, for `train.py --config`."""
COMPANIONS = "huggingface"
"""Folder beside the steps with config.json and the tokenizer of the model that was imported."""
_LONGEST_SEQUENCE = 4096
_FILLERS = ("--micro-batch-size", "1", "--lr", "1e-5", "--train-iters", "1", "--mock-data")
"""For what a model's files do not say. A run that goes on from the checkpoint has its own values, and they apply."""


# ---- Hugging Face -------------------------------------------------------------------------------------------------
def import_huggingface(source: str, output: str, given: Sequence[str], say: Say) -> None:
    """Makes step 0 of a checkpoint folder from a folder of config.json and safetensors.

    Args:
      source: the folder.
      output: of steps.
      given: options of train.py, for what config.json does not say.
      say: prints a line.

    Raises:
      UsageError, ConfigError: the model is not one of those known, its files do not fit, or cannot be written.
    """
    options = huggingface.read_config(source)
    config = _config_of(options, given, f"{source}/config.json")
    folder = huggingface.SafetensorsFolder(source)
    matched = huggingface.match_tensors(folder, options)
    shapes = _parameter_shapes(config)
    layout: dict[str, tuple[tuple[int, ...], Any]] = {name: (shape, np.float32) for name, shape in shapes.items()}
    used, filled = huggingface.UsedOnce(list(folder.tensors)), huggingface.UsedOnce(_slot_names(shapes, matched.pieces))
    used.use(*matched.left_out)
    for name in matched.left_out:
        say(f"{name} -> (left out: no weight, or the same as the word embedding)")
    companions, refused = huggingface.read_companions(source)
    beside = {
        **{f"{COMPANIONS}/{name}": content for name, content in companions.items()},
        f"{COMPANIONS}/config.json": _read(Path(source) / "config.json"),
        MODEL_FILE: _model_file(config),
    }
    _check_output(output, beside)
    if later := [step for step in steps.all_steps(Path(output)) if step > 0]:
        raise UsageError(
            f"--output {output}: holds step {later[-1]}, expected no steps, as this model begins at 0; fix: give"
            " another folder"
        )
    with StreamingWriter(output, 0, {**layout, "step": ((), np.int32)}, _label("huggingface", source)) as out:
        for piece in matched.pieces:
            say(f"{', '.join(piece.theirs)} -> {', '.join(map(str, piece.ours))}")
            used.use(*piece.theirs)
            filled.use(*map(str, piece.ours))
            if all(out.is_written(f"parameters/{slot.path}", slot.layer) for slot in piece.ours):
                continue
            theirs = tuple(folder.read(name) for name in piece.theirs)
            for name, value in zip(piece.theirs, theirs, strict=True):
                check_finite(name, value, source)
            values = piece.to_ours(theirs)
            for slot, value in zip(piece.ours, values, strict=True):
                if not out.is_written(f"parameters/{slot.path}", slot.layer):
                    out.write(f"parameters/{slot.path}", np.ascontiguousarray(value), slot.layer)
        if not out.is_written("step"):
            out.write("step", np.array(0, np.int32))
        lines = [f"theirs: {used.check()}", f"ours: {filled.check()}"]
        _carry(output, beside)
        out.commit(_meta(config, 0, 0, Position(), "huggingface"))
    for line in [*lines, *(f"{name} is not carried along: it {why}" for name, why in refused.items())]:
        say(line)
    say(f"wrote {output}/0: weights only; train with --config {output}/{MODEL_FILE} --load {output} --finetune")


def export_huggingface(
    checkpoint: Checkpoint, output: str, original: str | None, dtype: DType | None, say: Say
) -> None:
    """Writes a step as a folder that Hugging Face's transformers loads.

    Args:
      checkpoint: the step.
      output: the folder to be.
      original: folder with the config.json and tokenizer that the model once had; None: those that were carried along
        when it was imported, or none.
      dtype: of the weights; None: the original's, or fp32.
      say: prints a line.

    Raises:
      UsageError, ConfigError: the model has no place in that format, or it cannot be written.
    """
    config = saved_config(checkpoint)
    beside = checkpoint.path.parent / COMPANIONS
    home = Path(original) if original else beside if beside.is_dir() else None
    fields = huggingface.write_config(config, huggingface.load_config_json(home) if home else None, dtype)
    companions, refused = huggingface.read_companions(home) if home else ({}, {})
    source = StreamingReader(checkpoint)
    shapes = _parameter_shapes(config)
    _check_parameters(source, shapes)
    found = huggingface.pieces(config)
    used = huggingface.UsedOnce(_slot_names(shapes, found))
    sizes = huggingface.tensor_shapes(config)
    label = f"jmegatron {checkpoint.path} {checkpoint.manifest.digest}"
    with huggingface.SafetensorsWriter(output, sizes, huggingface.stored_dtype(fields), source=label) as out:
        for piece in found:
            say(f"{', '.join(map(str, piece.ours))} -> {', '.join(piece.theirs)}")
            used.use(*map(str, piece.ours))
            if all(out.is_written(name) for name in piece.theirs):
                continue
            ours = tuple(source.read(f"parameters/{slot.path}", slot.layer) for slot in piece.ours)
            for name, value in zip(piece.theirs, piece.to_theirs(ours), strict=True):
                if not out.is_written(name):
                    check_finite(name, value, checkpoint.path)
                    out.write(name, value)
        say(f"ours: {used.check()}")
        for name, content in {**companions, "config.json": huggingface.config_text(fields)}.items():
            out.add_file(name, content)
        out.commit()
    for name, why in refused.items():
        say(f"{name} is not carried along: it {why}")
    say(f"wrote {output}: {len(sizes)} tensors, config.json{''.join(f', {name}' for name in companions)}")


# ---- Megatron-Core ------------------------------------------------------------------------------------------------
def import_megatron(source: str, output: str, given: Sequence[str], optimizer: bool, say: Say) -> None:
    """Makes a step from a torch_dist checkpoint of Megatron-Core, as its iteration.

    Args:
      source: folder of all iterations, or of one.
      output: of steps.
      given: options of train.py, for what the checkpoint's arguments do not say.
      optimizer: take adam's state as well.
      say: prints a line.

    Raises:
      UsageError, ConfigError: as `import_huggingface`.
    """
    folder = TorchDistReader(source)
    arguments = folder.common.get("args", {})
    options = megatron.options(arguments, folder.tensors)
    where = f"{source}: arguments in common.pt"
    config = _config_of(options, given, where)
    if config.model.vocab_size is None:  # its arguments do not say how many rows are padding: then all count
        config = _config_of(options, [*given, "--vocab-size", str(config.model.padded_vocab_size)], where)
    plan = megatron.plan_import(folder, gpt_settings(config, "cpu"), optimizer=optimizer)
    consumed = arguments.get("consumed_train_samples", plan.samples)
    label = _label(f"megatron {'with' if optimizer else 'without'} optimizer", folder.folder)
    beside = {MODEL_FILE: _model_file(config)}
    _check_output(output, beside)
    with StreamingWriter(output, plan.iteration, plan.layout, label) as out:
        for line in plan.lines:
            say(line)
        megatron.import_checkpoint(folder, plan, out)
        position = Position(plan.updates if optimizer else 0, plan.samples)
        _carry(output, beside)
        out.commit(_meta(config, plan.iteration, consumed, position, "megatron"))
    say(f"{len(plan.moves)} tensors, each used once")
    how = "" if optimizer else " --no-load-optim, or --finetune"
    say(f"wrote {output}/{plan.iteration}; go on with --config {output}/{MODEL_FILE} --load {output}{how}")


def export_megatron(checkpoint: Checkpoint, output: str, optimizer: bool, dtype: DType | None, say: Say) -> None:
    """Writes a step as a torch_dist checkpoint that Megatron-Core loads.

    Args:
      checkpoint: the step.
      output: folder of iterations.
      optimizer: write adam's state as well.
      dtype: of the weights; None: fp32.
      say: prints a line.

    Raises:
      UsageError: torch is missing, the model or its optimizer has no place in that format, or it cannot be written.
    """
    config, meta = saved_config(checkpoint), checkpoint.manifest.meta
    common: dict[str, Any] = {"args": {"consumed_train_samples": meta["consumed_samples"]}}
    if optimizer:
        position = Position(meta["schedule_position"]["updates"], meta["schedule_position"]["samples"])
        schedule = learning_rate_schedule(config, position)
        common |= megatron.optimizer_common(optimizer_settings(config, position), schedule, position.updates)
    kind = DTYPES[dtype or "F32"]
    source = StreamingReader(checkpoint)
    lines = megatron.export_checkpoint(
        source, gpt_settings(config, "cpu"), output, checkpoint.step, common=common, optimizer=optimizer, dtype=kind
    )
    for line in lines:
        say(line)
    say(f"wrote {output}, iteration {checkpoint.step}: {len(lines)} tensors")


# ---- both ---------------------------------------------------------------------------------------------------------
def find(path: str, step: int | None, say: Say) -> Checkpoint:
    """Returns the step of a folder to export, the newest if None.

    Raises:
      UsageError: there is none, or it is damaged.
    """
    checkpoint, _ = reader.find(path, step=step, say=say, option="input")
    if checkpoint is None:
        raise UsageError(f"--input {path}: no checkpoint there; fix: check the path")
    return checkpoint


def saved_config(checkpoint: Checkpoint) -> Config:
    """Returns the resolved options of the run that saved a step."""
    return config_from_yaml(checkpoint.manifest.meta["config"], where=f"checkpoint {checkpoint.path}")


def _config_of(options: Mapping[str, Any], given: Sequence[str], where: str) -> Config:
    """Returns a resolved config with the model's options, those given, and fillers for the rest.

    Raises:
      ConfigError, UsageError: an option that was given contradicts the model's.
    """
    line = [*_FILLERS]
    if "max_position_embeddings" in options:
        line += ["--seq-length", str(min(options["max_position_embeddings"], _LONGEST_SEQUENCE))]
    known = all_options()
    for name, value in options.items():
        if isinstance(value, bool):
            flag = flag_of(name) if value else known[name].negation
            line += [flag] if flag else []
        elif value is not None:
            words = value if isinstance(value, (list, tuple)) else [value]
            line += [flag_of(name), *map(str, words)]
    config = resolve(load_config([*line, *given]), data_parallel_size=1)
    for name, value in options.items():
        own = getattr(config.model, name)
        if value is not None and own != value:
            raise UsageError(
                f"{flag_of(name)}: got {own}, expected {value!r}, as {where} says; fix: remove the option, or give"
                " other weights"
            )
    return config


def _model_file(config: Config) -> bytes:
    """Returns the model's options as YAML; its length of a sequence is that of a run."""
    options = {name: value for name, value in dataclasses.asdict(config.model).items() if value is not None}
    # The padding follows from the mesh of each run.
    kept = {name: value for name, value in options.items() if name not in ("seq_length", "padded_vocab_size")}
    return OmegaConf.to_yaml({"model": kept}).encode()


def _parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    return {f"parameters/{path}": shape for path, shape in megatron.shapes(gpt_settings(config, "cpu")).items()}


def _slot_names(shapes: Mapping[str, tuple[int, ...]], pieces: Sequence[Any]) -> list[str]:
    """Returns every part of our arrays that pieces have to fill."""
    by_layer = {slot.path for piece in pieces for slot in piece.ours if slot.layer is not None}
    names = []
    for name, shape in shapes.items():
        path = name.removeprefix("parameters/")
        names += [f"{path}[{n}]" for n in range(shape[0])] if path in by_layer else [path]
    return names


def _check_parameters(source: StreamingReader, shapes: Mapping[str, tuple[int, ...]]) -> None:
    there = {name: record.shape for name, record in source.arrays.items() if name.startswith("parameters/")}
    wrong = sorted(name for name in there.keys() | shapes.keys() if there.get(name) != shapes.get(name))
    if wrong:
        found = "; ".join(f"{n} is {there.get(n, 'missing')}, expected {shapes.get(n, 'none')}" for n in wrong[:8])
        raise UsageError(f"the checkpoint does not hold the model that its options describe: {found}; fix: another one")


def _meta(config: Config, step: int, consumed: int, position: Position, source: str) -> dict[str, Any]:
    return {**checkpoint_meta(config, step, consumed, position, None), "converted_from": source}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error}; fix: check its permissions") from error


def _label(what: str, folder: str | Path) -> str:
    """Returns what is converted, and its files as they are now: no try goes on with what one with others has left."""
    files = sorted((e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in os.scandir(folder) if e.is_file())
    return f"{what} {Path(folder).absolute()} {xxhash.xxh3_128_hexdigest(repr(files).encode())}"


def _check_output(output: str, files: Mapping[str, bytes]) -> None:
    """Checks that what goes along with the weights takes the place of nothing else.

    Raises:
      UsageError: one of the files is there and says something else.
    """
    for name, content in files.items():
        path = Path(output) / name
        if path.exists() and not (path.is_file() and path.read_bytes() == content):
            raise UsageError(
                f"{path}: is already there and differs from what would be written; fix: give another folder, or remove"
                " it"
            )


def _carry(output: str, files: Mapping[str, bytes]) -> None:
    """Writes what goes along with the weights."""
    try:
        for name, content in files.items():
            path = Path(output) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(path.name + ".tmp")
            unfinished.write_bytes(content)
            unfinished.replace(path)  # whole or not at all, so that the next try finds nothing that differs
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error}; fix: make room, or give another folder") from error
