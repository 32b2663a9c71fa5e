"""Mesh, shardings and jittable steps of a resolved config: what training and a dry run have in common.

No communication here; collectives happen inside the steps.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jmegatron import partition, random
from jmegatron.config import Config, resolve, validate_for_devices
from jmegatron.data.indexed_dataset import best_dtype
from jmegatron.data.sampler import CyclicOrder, SampleOrder, SequentialOrder
from jmegatron.data.tokenizers import build_tokenizer, tokenizer_settings
from jmegatron.mesh import build_mesh
from jmegatron.optimizer.optimizers import build_optimizer, map_parameters
from jmegatron.optimizer.schedules import START, LearningRateSchedule, Position
from jmegatron.training.batches import BatchPlacer, CompactBatch, compact_shardings
from jmegatron.training.build import decoupled_schedule, learning_rate_schedule, step_settings
from jmegatron.training.planning import auto_parallel
from jmegatron.training.state import (
    TrainState,
    data_shardings,
    init_state,
    name_of,
    named_arrays,
    start_of,
    train_state_shardings,
)
from jmegatron.training.step import StepSettings, make_train_step
from jmegatron.training.xla_flags import StepOptions, step_options


@dataclasses.dataclass(frozen=True)
class Program:
    """Mesh, compiled steps and shardings of a run."""

    config: Config
    mesh: Mesh
    settings: StepSettings
    specs: Any
    schedule: LearningRateSchedule
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
        return jax.jit(self._create, out_shardings=self.state_shardings)(key)

    def _create(self, key: Any) -> TrainState:
        return init_state(self.specs, key, self.optimizer, self.settings.compute_dtype, self.settings.scaler)

    def abstract_state(self) -> TrainState:
        """Returns shapes, dtypes and shardings of the state."""
        key = jax.random.key(0)
        shapes = jax.eval_shape(self._create, key)
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, self.state_shardings
        )

    # ---- what a checkpoint holds: arrays by name, layers in order, no padding, the same on every mesh ----
    @functools.cached_property
    def canonical_specs(self) -> Any:
        """Declarations of the parameters as a checkpoint holds them."""
        return partition.map_specs(lambda s: partition.canonical(s, self.mesh.shape), self.specs)

    @functools.cached_property
    def _saved_shardings(self) -> TrainState:
        found = state_shardings(self.settings, self.canonical_specs, self.optimizer, self.mesh)
        return found if found.master is None else dataclasses.replace(found, parameters=found.master, master=None)

    def _rearranged(self, how: Any, weights: Any, moments: Any) -> tuple[Any, Any]:
        """Returns weights and optimizer state (or None) with partition.to_canonical or from_canonical done to each."""
        specs = self.canonical_specs
        shardings = partition.shardings(specs, self.mesh)
        if self.settings.distributed_optimizer:
            shardings = data_shardings(specs, self.mesh)
        bound = lambda spec, sharding: functools.partial(how, spec, sharding=sharding)  # noqa: E731
        of_weights, of_moments = (
            partition.map_specs(bound, self.specs, tree) for tree in (self._saved_shardings.parameters, shardings)
        )
        apply = lambda rearrange, value: rearrange(value)  # noqa: E731
        if moments is not None:
            moments = map_parameters(self.optimizer, apply, moments, of_moments)
        return jax.tree.map(apply, of_weights, weights), moments

    def saved_layout(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape, dtype and sharding of each array of a checkpoint, by name.

        The parameters are the fp32 ones that the optimizer updates; those of the compute dtype are cast from them.
        """
        shapes = jax.eval_shape(self._to_saved, self.abstract_state())
        place = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)  # noqa: E731
        return named_arrays(jax.tree.map(place, shapes, self._saved_shardings))

    def saved_arrays(self, state: TrainState) -> dict[str, Any]:
        """Returns the arrays of a checkpoint by name; those that need no change are the state's own.

        Communication: layers move between stages if they have chunks, and rows of the vocabulary if they are padded.
        """
        if all(partition.is_canonical(spec) for _, spec in partition.named_specs(self.specs)):
            return named_arrays(self._to_saved(state))
        return named_arrays(self._jitted_to_saved(state))

    @functools.cached_property
    def _jitted_to_saved(self) -> Any:
        return jax.jit(self._to_saved, out_shardings=self._saved_shardings)

    def _to_saved(self, state: TrainState) -> TrainState:
        weights = state.parameters if state.master is None else state.master
        weights, moments = self._rearranged(partition.to_canonical, weights, state.optimizer)
        return dataclasses.replace(state, parameters=weights, master=None, optimizer=moments)

    def state_of(self, arrays: Mapping[str, Any]) -> TrainState:
        """Returns the state that the step takes of a checkpoint's arrays, which are consumed, in their own dtypes.

        Communication: as of `saved_arrays`; parameters of the compute dtype are gathered over the data axes.

        Args:
          arrays: of `saved_layout`. Without those of the optimizer it begins anew, and so does a loss scale.
        """
        shapes = jax.eval_shape(self._to_saved, self.abstract_state())
        paths, structure = jax.tree_util.tree_flatten_with_path(shapes)
        saved = jax.tree.unflatten(structure, [arrays.get(name_of(path)) for path, _ in paths])
        with warnings.catch_warnings():
            # What is cast, or gets padding, cannot stay where it lies.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return self._jitted_from_saved(saved)

    @functools.cached_property
    def _jitted_from_saved(self) -> Any:
        return jax.jit(self._from_saved, out_shardings=self.state_shardings, donate_argnums=0)

    def _from_saved(self, saved: TrainState) -> TrainState:
        moments = saved.optimizer if jax.tree.leaves(saved.optimizer) else None
        weights, moments = self._rearranged(partition.from_canonical, saved.parameters, moments)
        weights = jax.tree.map(lambda w: w.astype(jnp.float32), weights)
        if self.state_shardings.master is not None:
            # First to where they stay: what is gathered over the data axes is then the compute dtype's copy, and that
            # of a rank's own part.
            weights = jax.lax.with_sharding_constraint(weights, self.state_shardings.master)
        started = start_of(self.specs, weights, self.optimizer, self.settings.compute_dtype, self.settings.scaler)
        given = dataclasses.replace(started, step=saved.step)
        if moments is not None:
            given = dataclasses.replace(given, optimizer=moments)
        for name in ("loss_scale", "skipped"):
            if jax.tree.leaves(getattr(saved, name)):
                given = dataclasses.replace(given, **{name: getattr(saved, name)})
        return jax.tree.map(lambda value, like: value.astype(like.dtype), given, started)

    def dropout_key(self) -> Any:
        """Returns the run's dropout key, or None where nothing is dropped."""
        model = self.config.model
        if model.hidden_dropout == 0.0 and model.attention_dropout == 0.0:
            return None
        return random.parameter_key(jax.random.key(self.config.training.seed), "dropout")

    def train_step(self) -> Any:
        """Returns the jitted, donated training step."""
        step = make_train_step(self.settings, self.mesh, self.optimizer, self.schedule)
        return jax.jit(
            step,
            donate_argnums=0,
            out_shardings=(self.state_shardings, None),
            compiler_options=self.xla_options.values,
        )

    @functools.cached_property
    def xla_options(self) -> StepOptions:
        """The XLA options of the step.

        Raises:
          ConfigError: the installed jaxlib does not know one of `--xla-flags`.
        """
        on_gpu = self.mesh.devices.flat[0].platform in ("gpu", "cuda")
        hardware = self.config.hardware
        use_recommended = not hardware.no_recommended_xla_flags
        return step_options(dict(self.mesh.shape), on_gpu, hardware.xla_flags, use_recommended)

    @property
    def microbatch_width(self) -> int:
        """Sequences of a micro-batch over all data-parallel ranks."""
        assert self.config.training.global_batch_size is not None
        return self.config.training.global_batch_size // self.num_microbatches

    def abstract_batch(self) -> CompactBatch:
        """Returns shapes, dtypes and shardings of a global batch, as far as the options say.

        A corpus of another integer type, or a tokenizer with a padding id (hence a loss mask), changes them: a run
        compiles its step for the first batch that comes.
        """
        data, model = self.config.data, self.config.model
        assert model.vocab_size is not None
        lead = (self.num_microbatches, self.microbatch_width)
        integers = jax.ShapeDtypeStruct((*lead, model.seq_length), np.int32)
        text = jax.ShapeDtypeStruct((*lead, model.seq_length + 1), best_dtype(model.vocab_size))
        shapes = CompactBatch(
            text=integers if data.sft else text,
            sample_ids=jax.ShapeDtypeStruct(lead, np.uint32),
            labels=integers if data.sft else None,
            loss_mask=jax.ShapeDtypeStruct(integers.shape, np.bool_) if data.sft or data.eod_mask_loss else None,
            position_ids=integers if data.reset_position_ids else None,
            segment_ids=integers if data.reset_attention_mask else None,
        )
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            shapes,
            compact_shardings(shapes, self.mesh),
        )

    @functools.cached_property
    def placer(self) -> BatchPlacer:
        """Puts the run's batches onto the devices."""
        every_field = CompactBatch(*[True] * len(dataclasses.fields(CompactBatch)))
        return BatchPlacer(compact_shardings(every_field, self.mesh), self.num_microbatches, self.microbatch_width)

    def put(self, arrays: dict[str, np.ndarray]) -> CompactBatch:
        """Returns a global batch on the devices, micro-batch major, from its rows that this process needs."""
        return self.placer(arrays)

    def sample_order(self, num_samples: int) -> SampleOrder:
        """Returns which of `num_samples` training samples lies at each place of the run."""
        if self.config.data.dataloader_type == "single":
            return SequentialOrder(num_samples)
        data_ranks = self.mesh.shape["dp"] * self.mesh.shape["ep"]
        sharded = not self.config.data.no_data_sharding
        return CyclicOrder(num_samples, self.config.training.micro_batch_size, data_ranks, sharded)


def state_shardings(settings: StepSettings, specs: Any, optimizer: Any, mesh: Mesh) -> TrainState:
    """Returns the TrainState of NamedSharding of a step's settings, for parameters declared by `specs`."""
    return train_state_shardings(
        specs,
        optimizer,
        settings.compute_dtype,
        mesh,
        distributed_optimizer=settings.distributed_optimizer,
        overlap_param_gather=settings.overlap_param_gather,
        scaler=settings.scaler,
    )


def build_program(config: Config, devices: list[Any], position: Position = START) -> Program:
    """Returns the program of a resolved config on the devices; compiles nothing.

    Args:
      config: resolved.
      devices: as many as the mesh has.
      position: where the schedules start, in a run that goes on from a checkpoint.

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
    settings = step_settings(config, devices[0].platform, position)
    specs, schedule = settings.specs, learning_rate_schedule(config, position)
    optimizer = build_optimizer(settings.optimizer, schedule, specs, decoupled_schedule(config, position))
    shardings = state_shardings(settings, specs, optimizer, mesh)
    program = Program(config, mesh, settings, specs, schedule, optimizer, shardings)
    settings.pipeline.build(program.num_microbatches)
    return program


def resolve_for_run(
    config: Config, num_devices: int, device_kind: str = "", say: Callable[[str], None] = lambda text: None
) -> tuple[Config, Any]:
    """Returns (the config with everything derived, the tokenizer).

    Args:
      config: the options.
      num_devices: of all processes.
      device_kind: of the devices, for `--auto-parallel`.
      say: prints which layout `--auto-parallel` chose.

    Raises:
      UsageError: the tokenizer cannot be read.
      ConfigError: the options do not fit the devices or the vocabulary, or no layout fits the devices.
    """
    if not config.parallel.auto_parallel:
        validate_for_devices(config, num_devices)  # first what is known without the tokenizer
    data = config.data
    made_up = data.mock_data and config.model.vocab_size is not None
    tokenizer = None if made_up else build_tokenizer(**tokenizer_settings(data), vocab_size=config.model.vocab_size)
    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    if config.parallel.auto_parallel:
        config, lines = auto_parallel(resolve(config, vocab_size), num_devices, device_kind)
        for line in lines:
            say(line)
    dp = validate_for_devices(config, num_devices)
    return resolve(config, vocab_size, dp * config.parallel.expert_model_parallel_size), tokenizer
