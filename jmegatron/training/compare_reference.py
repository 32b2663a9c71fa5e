"""One model, ours and a reference's: the same weights and tokens, compared activation by activation and leaf by leaf.

The reference is a folder of recordings of Megatron-Core, Hugging Face transformers, or Megatron-Core itself. Ours runs
under the layout that the options say: what is compared are the functions that training compiles (the step's gradients,
the training step, the pipeline's forward). Layer by layer the model's parts are called one by one instead, so that
nothing stands in the step for it. Talks as those do, then to the host.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jmegatron import partition
from jmegatron.checkpoint.streaming import StreamingReader
from jmegatron.config import Config, load_config, validate
from jmegatron.config.sections import CheckpointConfig, DataConfig, OptimizerConfig, ParallelConfig
from jmegatron.context_parallel.layout import from_order
from jmegatron.errors import ConfigError, UsageError
from jmegatron.interop import huggingface, megatron
from jmegatron.interop.pieces import Piece, all_ours, all_theirs
from jmegatron.interop.reference_runs import (
    EMBEDDING,
    FINAL_NORM,
    Arrays,
    Batch,
    MegatronReference,
    ReferenceStep,
    ReferenceTrajectory,
    TorchReference,
    TransformersReference,
    activation_names,
    check_installed,
    read_recording,
)
from jmegatron.interop.safetensors_folder import SINGLE
from jmegatron.interop.torch_dist import TRACKER, TorchDistReader
from jmegatron.layers.attention import self_attention
from jmegatron.layers.mlp import mlp
from jmegatron.layers.norm import norm
from jmegatron.mesh import BATCH_AXES
from jmegatron.models.gpt import (
    GPTSettings,
    Tokens,
    gpt_context,
    gpt_embed,
    gpt_layer,
    gpt_output_logits,
    gpt_output_loss,
    vocab_axes,
)
from jmegatron.models.transformer import LayerSettings
from jmegatron.pipeline.executor import run_forward
from jmegatron.pipeline.stage import at
from jmegatron.training import batches as training_batches
from jmegatron.training import compare, convert, startup
from jmegatron.training.program import Program, build_program, resolve_for_run
from jmegatron.training.stages import gpt_pipeline_model

Say = Callable[[str], None]
_WORD = "embedding.word_embeddings.weight"
"""What Megatron-Core calls the word embedding."""
TOLERANCES = {"logits": 1e-5, "loss": 1e-5, "gradients": 1e-4, "activations": 1e-5, "lr": 1e-6}
"""In float32, relative: largest difference over the reference's largest value. Those of the recorded tests."""
HALF_TOLERANCES = dict.fromkeys(TOLERANCES, 1e-1) | {"loss": 1e-2, "lr": 1e-6}
"""In bfloat16 or fp16: 4e-3 a rounding, a few on the way through each layer, the largest of thousands of elements. What
changes a model by less is seen in float32 only."""
WEIGHTS_PART_OF_LR = 0.01
"""Trained weights may differ by this part of the largest learning rate, one step of adam: it divides a gradient by its
size, so that an element whose gradient is small may carry its rounding into the step."""
SPARE_WEIGHTS = 1e-3
"""Part of each leaf's trained weights, at least one, that may differ by more: in the first step adam goes the whole
length whatever the gradient's size, so that where it is next to 0 its rounding is all there is."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What to compare with what."""

    reference: str
    """recorded, transformers or megatron."""
    folder: str | None = None
    """Of the recordings, or of a model of Hugging Face."""
    options: Sequence[str] = ()
    """Of train.py."""
    weights: str | None = None
    """Folder of a checkpoint, ours or Megatron-Core's, or of Hugging Face; None: the reference's own, or random."""
    weights_step: int | None = None
    devices: int | None = None
    """None: --num-cpu-devices, or as many as the layout needs."""
    num_sequences: int | None = None
    """Of the batch; None: the recorded ones, else two for each data-parallel rank."""
    num_steps: int | None = None
    """Of the optimizer; None: the recorded ones, else none."""
    per_layer: bool = False
    forward_only: bool = False
    tolerances: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By the names of TOLERANCES, and weights (absolute); what is not given is as there."""


@dataclasses.dataclass(frozen=True)
class Row:
    """How far one quantity of ours is from the reference's."""

    group: str
    """activations, forward, gradients, steps or weights."""
    name: str
    error: float
    """Largest difference, over the reference's largest value unless of weights; inf where a value is not finite."""
    mean: float
    """Mean difference, over the same."""
    tolerance: float
    note: str = ""

    @property
    def above(self) -> bool:
        """Whether it is above its tolerance."""
        return not self.error <= self.tolerance


# ---- weights ------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class WeightSource:
    """Weights that are not read yet."""

    name: str
    options: Mapping[str, Any]
    """Of the model, as far as the source says them."""
    read: Callable[[Config, GPTSettings], dict[str, np.ndarray]]
    """Returns our arrays by path, as a checkpoint holds them, of a model's options and numbers."""


def open_weights(path: str, step: int | None, say: Say) -> WeightSource:
    """Returns the weights of a folder: of ours, of Hugging Face, or a torch_dist checkpoint of Megatron-Core.

    Raises:
      UsageError: it is none of them, or cannot be read.
    """
    folder = Path(path)
    if (folder / ".metadata").is_file() or (folder / TRACKER).is_file():
        return _torch_dist_weights(path)
    if (folder / "config.json").is_file() or (folder / SINGLE).is_file():
        return _huggingface_weights(path)
    checkpoint = convert.find(path, step, say)
    saved = dataclasses.asdict(convert.saved_config(checkpoint).model)
    if saved["mask_padded_vocab"]:
        del saved["padded_vocab_size"]  # follows from the mesh
    reader = StreamingReader(checkpoint)

    def read(config: Config, settings: GPTSettings) -> dict[str, np.ndarray]:
        shapes = megatron.shapes(settings)
        there = {name.removeprefix("parameters/"): record for name, record in reader.arrays.items()}
        where = f"checkpoint {checkpoint.path}"
        _check_shapes(where, {n: tuple(there[n].shape) for n in shapes.keys() & there.keys()}, shapes)
        return {name: np.asarray(reader.read(f"parameters/{name}"), np.float32) for name in shapes}

    return WeightSource(f"{checkpoint.path}", saved, read)


def _huggingface_weights(path: str) -> WeightSource:
    options = huggingface.read_config(path)

    def read(config: Config, settings: GPTSettings) -> dict[str, np.ndarray]:
        folder = huggingface.SafetensorsFolder(path)
        found = huggingface.match_tensors(folder, config).pieces
        return all_ours(found, {name: folder.read(name) for piece in found for name in piece.theirs})

    return WeightSource(path, options, read)


def _torch_dist_weights(path: str) -> WeightSource:
    folder = TorchDistReader(path)
    options = megatron.options(folder.common.get("args", {}), folder.tensors)
    rows = options.pop("padded_vocab_size")
    options.setdefault("vocab_size", rows)  # every row counts where the arguments do not say which are padding

    def read(config: Config, settings: GPTSettings) -> dict[str, np.ndarray]:
        megatron.plan_import(folder, settings)  # checks names and shapes
        found = megatron.pieces(settings, rows)
        places = {name: megatron.stored(name) for piece in found for name in piece.theirs}
        theirs = {n: folder.read(slot.path, slot.layer).astype(np.float32) for n, slot in places.items()}
        return all_ours(found, theirs)

    return WeightSource(str(folder.folder), options, read)


def random_weights(settings: GPTSettings, seed: int) -> dict[str, np.ndarray]:
    """Returns weights by path in which nothing is left out unseen: biases and scales have noise, too."""
    rng, found = np.random.default_rng(seed), {}
    for path, shape in megatron.shapes(settings).items():
        value = rng.normal(0, settings.init_std, shape).astype(np.float32)
        found[path] = value + 1 if path.endswith("scale") and not settings.layer.zero_centered_norm else value
    return found


def _checked_ours(where: str, pieces: Sequence[Piece], theirs: Arrays) -> dict[str, np.ndarray]:
    """Returns our arrays of all of theirs.

    Raises:
      UsageError: one is missing, too many, or has another shape.
    """
    expected = {n: shape for piece in pieces for n, shape in zip(piece.theirs, piece.their_shapes, strict=True)}
    _check_shapes(where, {name: array.shape for name, array in theirs.items()}, expected)
    return all_ours(pieces, theirs)


def _check_shapes(where: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    names = sorted(found.keys() | expected.keys())
    wrong = [
        f"{name} is {list(found[name]) if name in found else 'missing'}, expected"
        f" {list(expected[name]) if name in expected else 'none'}"
        for name in names
        if found.get(name) != expected.get(name)
    ]
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise UsageError(
            f"{where}: does not fit the model: {'; '.join(wrong[:8])}{more}; fix: give the options of that model"
        )


# ---- ours ---------------------------------------------------------------------------------------------------------
def parameter_tree(program: Program, weights: Arrays) -> Any:
    """Returns weights by path as the tree that `compare.run_step` takes."""
    structure = jax.tree.structure(program.specs, is_leaf=partition.is_spec)
    return jax.tree.unflatten(structure, [weights[path] for path, _ in partition.named_specs(program.specs)])


def forward(program: Program, weights: Arrays, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Returns (logits [sequences, seq, padded vocabulary], losses of tokens [sequences, seq]), by the pipeline's parts.

    Communication: as of `run_forward`, with one micro-batch.
    """
    settings = program.settings
    pipeline, context = settings.pipeline.parallel, settings.parallel.context

    def outputs(parameters: Any, y: Array, one: Any) -> tuple[Array, Any]:
        numbers = (settings.model, settings.parallel, pipeline)
        objective, losses = gpt_output_loss(parameters, y, one[0], *numbers)
        return objective, {"logits": gpt_output_logits(parameters, y, *numbers), "losses": losses}

    def body(parameters: Any, batch: Any) -> Any:
        own = training_batches.own_part(batch, context)
        model = gpt_pipeline_model(settings.model, settings.parallel, pipeline)
        model = dataclasses.replace(model, loss=outputs)
        schedule = dataclasses.replace(settings.pipeline, group_size=None).build(1)
        tokens = Tokens(own.tokens, own.labels, own.loss_mask, own.sample_ids)
        return run_forward(model, schedule, parameters, (tokens, own.loss_mask), axis=pipeline.axis)

    whole = _one_microbatch(batch, program.mesh)
    mapped = jax.shard_map(
        body,
        mesh=program.mesh,
        in_specs=(partition.partition_specs(program.specs), training_batches.batch_specs(whole)),
        out_specs={
            "logits": P(BATCH_AXES, context.axis, vocab_axes(settings.parallel, pipeline)),
            "losses": P(BATCH_AXES, context.axis),
        },
    )
    parameters = compare.place_weights(program, parameter_tree(program, weights))
    found = jax.jit(mapped, compiler_options=program.xla_options.values)(parameters, whole)
    return _in_order(found["logits"], program), _in_order(found["losses"], program)


def _one_microbatch(batch: Batch, mesh: Any) -> training_batches.Batch:
    arrays = {name: np.asarray(batch[name])[None] for name in ("tokens", "labels", "loss_mask")}
    arrays = {name: array.astype(np.float32 if name == "loss_mask" else np.int32) for name, array in arrays.items()}
    whole = training_batches.Batch(**arrays, sample_ids=np.arange(len(batch["tokens"]), dtype=np.uint32)[None])
    return jax.device_put(whole, training_batches.batch_shardings(whole, mesh))


def activations(program: Program, weights: Arrays, batch: Batch) -> dict[str, np.ndarray]:
    """Returns activations [sequences, seq, hidden] by `activation_names`, the model's parts called one after another.

    Attention and MLP are computed once more beside each layer, whose own output goes on.

    Communication: of the parts, over tp and cp.

    Args:
      program: of one pipeline stage.
      weights: by path.
      batch: the batch.
    """
    model, parallel, mesh = program.settings.model, program.settings.parallel, program.mesh
    whole = _one_microbatch(batch, mesh)
    sequence = tuple(axis for axis in (parallel.context.axis, parallel.sequence_axis) if axis is not None)
    x_spec, batch_spec = P(BATCH_AXES, sequence or None), training_batches.batch_specs(whole)
    place = partition.partition_specs(program.specs)

    def tokens_of(batch: training_batches.Batch) -> Tokens:
        own = jax.tree.map(lambda a: a[0], training_batches.own_part(batch, parallel.context))
        return Tokens(own.tokens, own.labels, own.loss_mask, own.sample_ids)

    def normed(scales: Any, x: Array, layer: LayerSettings) -> Array:
        return norm(scales, x, layer.normalization, eps=layer.norm_eps, zero_centered=layer.zero_centered_norm)

    def run_layer(layer: LayerSettings) -> Callable[..., tuple[Array, Array, Array]]:
        def run(parameters: Any, batch: Any, x: Array, number: Array) -> tuple[Array, Array, Array]:
            own, context = at(parameters["layers"], number), gpt_context(tokens_of(batch), model, parallel)
            axis, shard = parallel.axis, parallel.sequence_parallel
            attention = self_attention(
                own["attention"],
                normed(own["input_norm"], x, layer),
                context,
                layer.attention,
                axis=axis,
                sequence_parallel=shard,
                context_parallel=parallel.context,
                layer=number,
            )
            h = normed(own["mlp_norm"], x + attention, layer)
            feed_forward = mlp(own["mlp"], h, layer.mlp, axis=axis, sequence_parallel=shard)
            return attention, feed_forward, gpt_layer(own, x, context, number, layer, parallel)

        return run

    def jitted(body: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs))

    embed = jitted(lambda p, one: gpt_embed(p, tokens_of(one), model, parallel), (place, batch_spec), x_spec)
    last = jitted(lambda p, x: normed(p["final_norm"], x, model.layer), (place, x_spec), x_spec)
    settings = model.settings_at(model.num_layers)
    layers = {
        layer: jitted(run_layer(layer), (place, batch_spec, x_spec, P()), (x_spec,) * 3)
        for layer in dict.fromkeys(settings)
    }
    parameters = compare.place_weights(program, parameter_tree(program, weights))
    x = embed(parameters, whole)
    found = {EMBEDDING: x}
    for number, layer in enumerate(settings):
        parts = layers[layer](parameters, whole, x, np.int32(number))
        found |= zip(activation_names(number), jax.device_get(parts), strict=True)
        x = parts[2]
    found[FINAL_NORM] = last(parameters, x)
    return {name: _in_order(value, program) for name, value in found.items()}


def _in_order(value: Any, program: Program) -> np.ndarray:
    """Returns an array of [sequences, seq, ...] with the tokens of each sequence in order."""
    context = program.settings.parallel.context
    whole = np.asarray(jax.device_get(value))
    return from_order(whole, context.num_ranks, 1, context.order).astype(np.float32)


def train(program: Program, weights: Arrays, batches: Iterable[Batch]) -> ReferenceTrajectory:
    """Returns what the training step makes of the weights, with an optimizer that begins anew; weights by our paths."""
    layout = program.saved_layout()
    start = {f"parameters/{path}": value for path, value in weights.items()} | {"step": np.int32(0)}
    state = program.state_of({name: jax.device_put(value, layout[name].sharding) for name, value in start.items()})
    step, rows = program.train_step(), []
    for batch in batches:
        state, metrics = step(state, program.put(dict(batch)), None)
        rows.append([float(metrics[name]) for name in ("loss", "grad_norm", "lr")])
    saved = program.saved_arrays(state)
    loss, norm_, lr = np.array(rows, np.float64).T
    return ReferenceTrajectory(loss, norm_, lr, {path: np.asarray(saved[f"parameters/{path}"]) for path in weights})


# ---- the comparison -----------------------------------------------------------------------------------------------
def errors(
    ours: np.ndarray, theirs: np.ndarray, *, absolute: bool = False, spare: float = 0.0
) -> tuple[float, float, tuple[int, ...]]:
    """Returns (largest difference, mean difference, index of the largest), relative to the reference's largest value.

    Where that is 0, or with `absolute`, the differences themselves; inf where a value is not finite.

    Args:
      ours: any shape.
      theirs: the same shape.
      absolute: see above.
      spare: this part of the differences, the largest ones, does not count (but in the index).

    Raises:
      UsageError: the shapes differ.
    """
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if ours.shape != theirs.shape:
        raise UsageError(
            f"the reference's array: got {list(theirs.shape)}, expected {list(ours.shape)}, as ours has; fix: give"
            " recordings of this model and these tokens"
        )
    bad = ~(np.isfinite(ours) & np.isfinite(theirs))
    difference = np.where(bad, np.inf, np.abs(np.where(bad, 0, ours) - np.where(bad, 0, theirs)))
    place = tuple(int(i) for i in np.unravel_index(int(difference.argmax()), ours.shape))
    if bad.any():
        return math.inf, math.inf, place
    scale = 1.0 if absolute else float(np.abs(theirs).max()) or 1.0
    rank = ours.size - 1 - min(math.ceil(spare * ours.size), ours.size - 1)
    largest = np.partition(difference.reshape(-1), rank)[rank]
    return float(largest) / scale, float(difference.mean()) / scale, place


def leaf_rows(
    group: str, ours: Arrays, theirs: Arrays, names: Mapping[str, str], tolerance: float, **how: Any
) -> list[Row]:
    """Returns a row for each leaf, each layer of a stacked one by itself, the worst first.

    Args:
      group: see `Row`.
      ours: by path.
      theirs: by our paths.
      names: what they call it, by path or path[layer].
      tolerance: of each.
      **how: see `errors`.
    """
    rows = []
    for path in theirs:
        layers: Sequence[int | None] = range(len(theirs[path])) if path.startswith("layers/") else [None]
        for layer in layers:
            one, two = (a[path] if layer is None else a[path][layer] for a in (ours, theirs))
            error, mean, place = errors(one, two, **how)
            name = path if layer is None else f"{path}[{layer}]"
            rows.append(Row(group, name, error, mean, tolerance, f"{names.get(name, '')} at {list(place)}".strip()))
    return sorted(rows, key=lambda row: -row.error)


def step_rows(ours: ReferenceTrajectory, theirs: ReferenceTrajectory, tolerances: Mapping[str, float]) -> list[Row]:
    """Returns the rows of loss, gradient norm and learning rate, each of all steps."""
    rows = []
    kinds = (("loss", "loss", "loss"), ("grad norm", "grad_norm", "gradients"), ("lr", "lr", "lr"))
    for name, field, kind in kinds:
        for step in range(len(ours.loss)):
            values = [float(getattr(run, field)[step]) for run in (ours, theirs)]
            error, mean, _ = errors(*(np.array([value]) for value in values))
            note = "{:.8g} and {:.8g}".format(*values)
            rows.append(Row("steps", f"step {step + 1} {name}", error, mean, tolerances[kind], note))
    return rows


def without_key_bias(arrays: Arrays) -> dict[str, np.ndarray]:
    """Returns arrays without the biases of keys: no gradient reaches them, and adam makes steps of its rounding."""
    cut = {path: value[:, :, 1] for path, value in arrays.items() if path.endswith("attention/key_value/bias")}
    return dict(arrays) | cut


# ---- all of it ----------------------------------------------------------------------------------------------------
class Comparison:
    """Ours and a reference, ready to run.

    Args:
      request: what to compare with what.
      say: prints a line.

    Raises:
      UsageError, ConfigError: an option, a file, or the reference cannot be used.
    """

    def __init__(self, request: Request, say: Say = print):
        self.request, self.say = request, say
        check_installed(request.reference)
        self.recording = read_recording(str(request.folder)) if request.reference == "recorded" else None
        path = request.weights or (request.folder if request.reference == "transformers" else None)
        source = open_weights(path, request.weights_step, say) if path else None
        config = self._load_config(source)
        self.devices = self._devices(config)
        self.ranks = len(self.devices) * config.parallel.expert_model_parallel_size // _degrees(config)
        self.config, _ = resolve_for_run(config, len(self.devices))
        self.batch = self._random_batch(0) if self.recording is None else self.recording.batch
        step_config = self._config_for(self.config, self.batch, per_token=True)
        self.program = build_program(step_config, self.devices)
        startup.check_memory(self.program.specs, step_config, self.program.mesh)
        self.model = self.program.settings.model
        self.pieces = self._find_pieces()
        self.weights = self._read_weights(source)
        self.tolerances = self._find_tolerances()
        self.reference = self._open_reference()

    # ---- what goes in ----
    def _load_config(self, source: WeightSource | None) -> Config:
        request, recording = self.request, self.recording
        fallbacks: dict[str, Any] = {"micro_batch_size": 1, "lr": 1e-4, "train_iters": max(request.num_steps or 0, 1)}
        if not _names_a_file(request.options):
            fallbacks["mock_data"] = True
        if source is not None:
            fallbacks |= {
                "seq_length": min(source.options.get("max_position_embeddings") or 128, 128),
                **source.options,
            }
        if recording is not None:
            fallbacks |= {
                "seq_length": recording.batch["tokens"].shape[1],
                "vocab_size": len(recording.weights.get(_WORD, ())) or None,
            }
        config = _load(request.options, {name: value for name, value in fallbacks.items() if value is not None})
        if config.checkpoint.load:
            self.say(f"--load {config.checkpoint.load} is not looked at: --weights names the weights")
        startup.configure_devices(config)
        # As many sequences as the comparison has, not as the run.
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, global_batch_size=None))
        # No data is read, and so no tokenizer where the number of tokens is known.
        return dataclasses.replace(config, data=_NO_DATA) if config.model.vocab_size is not None else config

    def _devices(self, config: Config) -> list[Any]:
        found = jax.devices()
        count = self.request.devices
        if count is None:
            count = config.hardware.num_cpu_devices or _degrees(config)
        if not 0 < count <= len(found):
            raise UsageError(
                f"--devices: got {count}, expected 1 to {len(found)}, as many as there are; fix: --num-cpu-devices"
                f" {max(count, 1)} makes virtual ones"
            )
        return found[:count]

    def _random_batch(self, number: int) -> Batch:
        """Returns random tokens of the seed, all of which count."""
        model, rows = self.config.model, self.request.num_sequences or 2 * self.ranks
        assert model.vocab_size is not None, "the config is resolved"
        rng = np.random.default_rng([self.config.training.seed, number])
        return _batch_of(rng.integers(0, model.vocab_size, (rows, model.seq_length + 1), dtype=np.int32))

    def _config_for(self, config: Config, batch: Batch, *, per_token: bool = False) -> Config:
        """Returns the config of a step on a batch, without dropout and label smoothing."""
        rows, seq = batch["tokens"].shape
        if rows % self.ranks:
            raise UsageError(
                f"--devices: got {self.ranks} data-parallel ranks for {rows} sequences, expected a divisor of them;"
                " fix: fewer devices, or --num-sequences where they are not recorded"
            )
        # A pipeline gets as many micro-batches as there can be.
        wanted = 1 if config.parallel.pipeline_model_parallel_size > 1 else config.training.micro_batch_size
        optimizer, training = config.optimizer, config.training
        changed = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, hidden_dropout=0.0, attention_dropout=0.0, seq_length=seq),
            data=_NO_DATA,
            checkpoint=CheckpointConfig(),
            optimizer=dataclasses.replace(
                optimizer, calculate_per_token_loss=per_token or optimizer.calculate_per_token_loss
            ),
            training=dataclasses.replace(
                training,
                global_batch_size=rows,
                micro_batch_size=math.gcd(rows // self.ranks, wanted),
                label_smoothing=0.0,
            ),
        )
        validate(changed)
        return changed

    def _find_pieces(self) -> list[Piece]:
        """Returns how the reference's arrays correspond to ours."""
        if self.request.reference == "transformers":
            if self.model.loss_vocab_size is None and self.model.padded_vocab_size != self.model.vocab_size:
                raise UsageError(
                    "--no-mask-padded-vocab: got padding that takes part in the softmax, expected none, as in"
                    " transformers; fix: remove it"
                )
            return huggingface.pieces(self.program.config)
        rows = self.model.loss_vocab_size or self.model.padded_vocab_size
        if self.recording is not None:
            there = len(self.recording.weights.get(_WORD, ()))
            if there != rows:
                raise UsageError(
                    f"--vocab-size: got {rows} rows that take part in the softmax, expected the {there} of the recorded"
                    f" word embedding, its padding among them; fix: --vocab-size {there}"
                )
            self._check_tokens(rows)
        return megatron.pieces(self.model, rows)

    def _check_tokens(self, rows: int) -> None:
        """Refuses recorded tokens that the model has not."""
        assert self.recording is not None
        found = {"batch/tokens": self.batch["tokens"], "batch/labels": self.batch["labels"]}
        if self.recording.train_tokens is not None:
            found["tokens of the steps"] = self.recording.train_tokens
        for name, tokens in found.items():
            if tokens.size == 0 or tokens.min() < 0 or tokens.max() >= rows:
                raise UsageError(
                    f"{self.recording.path}: {name}: got {tokens.size} tokens"
                    + (f", {tokens.min()} to {tokens.max()}" if tokens.size else "")
                    + f", expected 0 to {rows - 1}; fix: give recordings of this model"
                )

    def _read_weights(self, source: WeightSource | None) -> dict[str, np.ndarray]:
        if source is not None:
            self.say(f"weights: {source.name}")
            return source.read(self.program.config, self.model)
        if self.recording is not None:
            where = self.recording.path / "weights.safetensors"
            self.say(f"weights: {where}")
            return _checked_ours(str(where), self.pieces, self.recording.weights)
        seed = self.config.training.seed
        self.say(f"weights: random ones of --seed {seed}")
        return random_weights(self.model, seed)

    def _find_tolerances(self) -> dict[str, float]:
        half = np.dtype(self.program.settings.compute_dtype) != np.float32
        return (HALF_TOLERANCES if half else TOLERANCES) | dict(self.request.tolerances)

    def _open_reference(self) -> TorchReference | None:
        if self.recording is not None:
            tokens = self.recording.train_tokens
            there = 0 if tokens is None else len(tokens)
            if (self.request.num_steps or 0) > there:
                raise UsageError(
                    f"--num-steps: got {self.request.num_steps}, expected at most the {there} recorded ones of"
                    f" {self.recording.path}; fix: fewer steps"
                )
            if self.request.per_layer:
                self._check_activations(self.recording.step.activations or {}, self.recording.path / "forward.npz")
            return None
        name = self.program.settings.optimizer.name
        if self.request.num_steps and name != "adam":
            raise UsageError(f"--optimizer {name}: expected adam to compare steps; fix: --optimizer adam, or no steps")
        theirs = all_theirs(self.pieces, self.weights)
        if self.request.reference == "transformers":
            return TransformersReference(str(self.request.folder), theirs)
        return MegatronReference(self.model, theirs)

    def _check_activations(self, found: Arrays, where: Path) -> None:
        """Refuses recorded activations of which a layer's are missing: what is not compared must not pass as equal."""
        layers = range(self.model.num_layers)
        missing = [name for layer in layers for name in activation_names(layer) if name not in found]
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            got = f"no {', '.join(missing[:4])}{more}" if found else "no activations"
            raise UsageError(
                f"--per-layer: got {got} in {where}, expected act/layer_I_attn_out, act/layer_I_mlp_out and"
                f" act/layer_I_out of I from 0 to {len(layers) - 1}; fix: leave it out, or record them"
            )

    # ---- what comes out ----
    def rows(self) -> list[Row]:
        """Runs both sides and returns every row, in the order in which they are read."""
        request = self.request
        if self.recording is not None:
            self.say(f"reference: recorded in {self.recording.path}")
            theirs = self.recording.step
        else:
            assert self.reference is not None
            self.say(f"reference: {self.reference.name}")
            theirs = self.reference.step(self.batch, gradients=not request.forward_only, activations=request.per_layer)
        self.say(f"ours: {layout_line(self.program)}")
        rows = []
        with jax.default_matmul_precision("highest"):  # of float32 on GPUs, which have a shorter format as well
            if request.per_layer:
                rows += self._activation_rows(theirs)
            rows += self._forward_rows(theirs)
            if not request.forward_only:
                rows += self._gradient_rows(theirs)
                rows += self._training_rows()
        if not rows:
            where = "the reference" if self.recording is None else self.recording.path / "forward.npz"
            raise UsageError(
                f"nothing to compare: got none of it in {where}, expected logits, token_loss, loss or (without"
                " --forward-only) gradients; fix: record them, or leave --forward-only out"
            )
        absent = self._absent(rows)
        if absent:
            self.say(f"not compared: {', '.join(absent)}")
        return rows

    def _absent(self, rows: Sequence[Row]) -> list[str]:
        """Returns what was asked for and has no row, since the reference does not say it."""
        request, names, groups = self.request, {row.name for row in rows}, {row.group for row in rows}
        wanted = [EMBEDDING, FINAL_NORM] if request.per_layer else []
        absent = [name for name in (*wanted, "logits", "token losses", "loss") if name not in names]
        if not request.forward_only:
            absent += [] if "gradients" in groups else ["gradients"]
            if "steps" not in groups:
                absent += ["optimizer steps"] if self.recording is not None and request.num_steps is None else []
            elif "weights" not in groups:
                absent.append("weights after the steps")
        return absent

    def _activation_rows(self, theirs: ReferenceStep) -> list[Row]:
        found, program = theirs.activations or {}, self.program
        if program.mesh.shape["pp"] > 1:
            self.say("layer by layer without the pipeline, on the devices of its first stage")
            program = build_program(_one_stage(program.config), list(program.mesh.devices[0].flat))
        ours = activations(program, self.weights, self.batch)
        rows = []
        for name, value in ours.items():
            if name in found:
                error, mean, place = errors(value, found[name])
                note = f"at {list(place)}"
                rows.append(Row("activations", name, error, mean, self.tolerances["activations"], note))
        return rows

    def _forward_rows(self, theirs: ReferenceStep) -> list[Row]:
        if theirs.logits is None and theirs.token_losses is None and theirs.loss is None:
            return []
        logits, losses = forward(self.program, self.weights, self.batch)
        mask = self.batch["loss_mask"]
        loss = float((losses * mask).sum() / max(float(mask.sum()), 1.0))
        rows = []
        for name, ours, expected in (
            ("logits", logits[..., : self.model.loss_vocab_size], theirs.logits),
            ("token losses", losses, theirs.token_losses),
            ("loss", np.array([loss]), None if theirs.loss is None else np.array([theirs.loss])),
        ):
            if expected is not None:
                error, mean, place = errors(ours, expected)
                tolerance = self.tolerances["logits" if name == "logits" else "loss"]
                note = f"{loss:.8g} and {theirs.loss:.8g}" if name == "loss" else f"at {list(place)}"
                rows.append(Row("forward", name, error, mean, tolerance, note))
        return rows

    def _gradient_rows(self, theirs: ReferenceStep) -> list[Row]:
        if theirs.gradients is None:
            return []
        batch = dict(self.batch) | {"sample_ids": np.arange(len(self.batch["tokens"]), dtype=np.uint32)}
        ours = compare.run_step(self.program, parameter_tree(self.program, self.weights), batch)
        rows = []
        if theirs.loss is not None:
            error, mean, _ = errors(np.array([ours.loss]), np.array([theirs.loss]))
            note = f"{ours.loss:.8g} and {theirs.loss:.8g}"
            rows.append(Row("forward", "loss of the step", error, mean, self.tolerances["loss"], note))
        expected = _checked_ours("gradients of the reference", self.pieces, theirs.gradients)
        return rows + leaf_rows(
            "gradients", ours.gradients, expected, self._their_names(), self.tolerances["gradients"]
        )

    def _training_rows(self) -> list[Row]:
        texts, theirs, config = self._their_training()
        if theirs is None:
            return []
        program = build_program(config, self.devices)
        batches = [_batch_of(text) for text in texts]
        for batch in batches:
            batch["sample_ids"] = np.arange(len(batch["tokens"]), dtype=np.uint32)
        ours = train(program, self.weights, batches)
        rows = step_rows(ours, theirs, self.tolerances)
        if theirs.weights:
            expected = _checked_ours("trained weights of the reference", self.pieces, theirs.weights)
            half = np.dtype(program.settings.compute_dtype) != np.float32
            own = config.optimizer.lr * (len(texts) if half else WEIGHTS_PART_OF_LR)
            # A recording begins with a step of learning rate 0, so that no step rests on one gradient alone.
            spare = 0.0 if self.recording is not None else SPARE_WEIGHTS
            rows += leaf_rows(
                "weights",
                without_key_bias(ours.weights),
                without_key_bias(expected),
                self._their_names(),
                self.tolerances.get("weights", own),
                absolute=True,
                spare=spare,
            )
        return rows

    def _their_training(self) -> tuple[Sequence[np.ndarray], ReferenceTrajectory | None, Config]:
        """Returns (tokens of each step, what the reference made of them, our config of such a step)."""
        num_steps = self.request.num_steps
        if self.recording is not None:
            recorded, tokens = self.recording.trajectory, self.recording.train_tokens
            if recorded is None or tokens is None or num_steps == 0:
                return [], None, self.config
            count = len(tokens) if num_steps is None else num_steps
            config = self._config_for(
                recorded_optimizer(self.config, self.recording.train_settings, len(tokens), self.say),
                _batch_of(tokens[0]),
            )
            return list(tokens[:count]), _cut(recorded, count, len(tokens)), config
        if not num_steps:
            return [], None, self.config
        assert self.reference is not None
        batches = [self._random_batch(number + 1) for number in range(num_steps)]
        config = self._config_for(self.config, batches[0])
        program = build_program(config, self.devices)
        settings = program.settings.optimizer
        micro = config.training.micro_batch_size
        theirs = self.reference.train(batches, micro, settings, program.schedule)
        texts = [np.concatenate([b["tokens"], b["labels"][:, -1:]], axis=1) for b in batches]
        return texts, theirs, config

    def _their_names(self) -> dict[str, str]:
        return {str(slot): ", ".join(piece.theirs) for piece in self.pieces for slot in piece.ours}


_NO_DATA = DataConfig(mock_data=True)


def _names_a_file(options: Sequence[str]) -> bool:
    return any(word.split("=")[0] == "--config" for word in options)


def _load(options: Sequence[str], fallbacks: Mapping[str, Any]) -> Config:
    """Returns the config; fallbacks are for what it does not say, unless it is a file that says enough for a run."""
    if _names_a_file(options):
        try:
            return load_config(options)
        except ConfigError:
            pass
    return load_config(options, fallbacks)


def _degrees(config: Config) -> int:
    """Returns how many devices hold one replica."""
    parallel = config.parallel
    model = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    return model * parallel.context_parallel_size * parallel.expert_model_parallel_size


def _one_stage(config: Config) -> Config:
    """Returns the config without a pipeline."""
    plain = ParallelConfig()
    names = [field.name for field in dataclasses.fields(plain)]
    cut = [name for name in names if name.startswith(("pipeline_", "decoder_", "account_for_")) or "virtual" in name]
    values = {name: getattr(plain, name) for name in cut} | {"pipeline_schedule": "1f1b"}
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **values))


def _batch_of(text: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the batch of a text [sequences, seq + 1], all of which counts."""
    return {
        "tokens": text[:, :-1],
        "labels": text[:, 1:],
        "loss_mask": np.ones((len(text), text.shape[1] - 1), np.float32),
    }


def _cut(recorded: ReferenceTrajectory, count: int, whole: int) -> ReferenceTrajectory:
    """Returns the first steps of a recording; weights are those after the last one alone."""
    weights = recorded.weights if count == whole else {}
    return ReferenceTrajectory(recorded.loss[:count], recorded.grad_norm[:count], recorded.lr[:count], weights)


def recorded_optimizer(config: Config, settings: Mapping[str, Any], num_steps: int, say: Say) -> Config:
    """Returns the config with the optimizer that steps were recorded with; as it is where the folder does not say it.

    Raises:
      UsageError: what it says is not understood.
    """
    said = settings.get("optimizer")
    if said is None:
        return config
    names = {"warmup_steps": "lr_warmup_iters", "decay_steps": "lr_decay_iters"}
    known = {"lr", "min_lr", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps", *names}
    try:
        values = {names.get(n, n): _number(n, value, n in names) for n, value in said.items() if n in known}
        optimizer = OptimizerConfig(lr_decay_style="cosine", **values)
        micro = _number("micro_batch", settings.get("micro_batch", config.training.micro_batch_size), True)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(f"config.json of the recorded steps: {error}; fix: record them again") from error
    say("steps: optimizer as recorded, " + ", ".join(f"{name} {value}" for name, value in values.items()))
    training = dataclasses.replace(config.training, train_iters=num_steps, train_samples=None, micro_batch_size=micro)
    return dataclasses.replace(config, optimizer=optimizer, training=training)


def _number(name: str, value: Any, whole: bool) -> Any:
    """Returns a value of a JSON file that must be a finite number, or a whole one."""
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not abs(value) < math.inf:
        raise ValueError(f"{name}: got {value!r}, expected a {'whole ' if whole else ''}number")
    return value if whole else float(value)


# ---- in words -----------------------------------------------------------------------------------------------------
def layout_line(program: Program) -> str:
    """Returns mesh, precision and micro-batches."""
    mesh = ", ".join(f"{axis} {size}" for axis, size in program.mesh.shape.items())
    more = [f"{program.num_microbatches} micro-batches", np.dtype(program.settings.compute_dtype).name]
    if program.settings.parallel.sequence_parallel:
        more.append("sequence parallel")
    if program.settings.pipeline.num_chunks > 1:
        more.append(f"{program.settings.pipeline.num_chunks} chunks a stage")
    return f"mesh {mesh}; {', '.join(more)}"


_TITLES = {
    "activations": "layer by layer",
    "forward": "forward",
    "gradients": "gradients, worst first",
    "steps": "optimizer steps",
    "weights": "weights after the steps (absolute), worst first",
}
_MOST_LEAVES = 8


def table(rows: Sequence[Row], *, show_all: bool = False) -> list[str]:
    """Returns the lines of the table; of leaves only the worst ones without `show_all`."""
    width = max(len(text) for text in [*_TITLES.values(), *(row.name for row in rows)])
    lines = []
    for group, title in _TITLES.items():
        own = [row for row in rows if row.group == group]
        if not own:
            continue
        lines += ["", f"{title:{width}}  {'max error':>9}  {'mean':>9}  {'tolerance':>9}"]
        shown = own if show_all or group not in ("gradients", "weights") else own[:_MOST_LEAVES]
        lines += [_line(row, width) for row in shown]
        rest = own[len(shown) :]
        if rest:
            above = sum(row.above for row in rest)
            lines.append(f"... and {len(rest)} more, none of them worse, {above or 'none'} above tolerance (--all)")
    return lines


def _line(row: Row, width: int) -> str:
    mark = "ABOVE  " if row.above else ""
    numbers = f"{row.error:9.2e}  {row.mean:9.2e}  {row.tolerance:9.2g}"
    return f"{row.name:{width}}  {numbers}  {mark}{row.note}".rstrip()


def verdict(rows: Sequence[Row]) -> list[str]:
    """Returns the last lines: the worst leaf, where activations part, and what is above its tolerance."""
    lines = [""]
    for group in ("gradients", "weights"):
        own = [row for row in rows if row.group == group]
        if own:
            lines.append(f"worst of the {group}: {own[0].name}, {own[0].error:.2e}")
    first = next((row for row in rows if row.group == "activations" and row.above), None)
    if first is not None:
        lines.append(f"first activation above tolerance: {first.name}, {first.error:.2e}")
    above = [row for row in rows if row.above]
    if not above:
        return [*lines, "equal within the tolerances"]
    named = "; ".join(f"{row.name} {row.error:.2e} ({row.tolerance:g})" for row in above[:4])
    return [*lines, f"above tolerance: {named}{f' and {len(above) - 4} more' if len(above) > 4 else ''}"]
