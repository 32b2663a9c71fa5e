"""Mesh, shardings and jittable steps of a resolved config: what training and a dry run have in common.

No communication here; collectives happen inside the steps.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jmegatron import partition, random
from jmegatron.config import Config, resolve, validate_for_devices
from jmegatron.data.indexed_dataset import best_dtype
from jmegatron.data.sampler import CyclicOrder, SampleOrder, SequentialOrder
from jmegatron.data.tokenizers import build_tokenizer, tokenizer_settings
from jmegatron.mesh import PIPELINE_AXIS, SEQUENCE_AXIS, build_mesh
from jmegatron.optimizer.optimizers import build_optimizer, map_parameters
from jmegatron.optimizer.schedules import START, LearningRateSchedule, Position
from jmegatron.training.batches import BatchPlacer, CompactBatch, compact_shardings
from jmegatron.training.build import decoupled_schedule, learning_rate_schedule, step_settings
from jmegatron.training.state import TrainState, init_state, train_state_shardings
from jmegatron.training.step import StepSettings, make_train_step


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

    # ---- the layout of checkpoints: layers in order, whatever the pipeline ----
    @functools.cached_property
    def canonical_specs(self) -> Any:
        """Declarations of the parameters with their layers in order."""
        return partition.map_specs(partition.canonical, self.specs)

    @property
    def is_canonical(self) -> bool:
        """Whether the state's layers lie in order, so that a checkpoint holds it as it is."""
        pairs = zip(partition.named_specs(self.specs), partition.named_specs(self.canonical_specs), strict=True)
        return all(own.shape == ordered.shape and own.stacked == ordered.stacked for (_, own), (_, ordered) in pairs)

    def canonical_state(self) -> TrainState:
        """Returns shapes, dtypes and shardings of the state as a checkpoint holds it."""
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            jax.eval_shape(lambda state: self._rearranged(state, partition.to_canonical), self.abstract_state()),
            state_shardings(self.settings, self.canonical_specs, self.optimizer, self.mesh),
        )

    def to_canonical(self, state: TrainState) -> TrainState:
        """Returns the state as a checkpoint holds it. Communication: layers move between stages if they have chunks."""
        return state if self.is_canonical else self._to_canonical(state)

    def from_canonical(self, state: TrainState) -> TrainState:
        """Returns the state of a checkpoint as the step takes it; the other way round."""
        return state if self.is_canonical else self._from_canonical(state)

    @functools.cached_property
    def _to_canonical(self) -> Any:
        shardings = jax.tree.map(lambda a: a.sharding, self.canonical_state())
        return jax.jit(lambda s: self._rearranged(s, partition.to_canonical), out_shardings=shardings)

    @functools.cached_property
    def _from_canonical(self) -> Any:
        rearrange = lambda s: self._rearranged(s, partition.from_canonical)  # noqa: E731
        return jax.jit(rearrange, out_shardings=self.state_shardings, donate_argnums=0)

    def _rearranged(self, state: TrainState, how: Any) -> TrainState:
        tree = lambda values: partition.map_specs(how, self.specs, values)  # noqa: E731
        return dataclasses.replace(
            state,
            parameters=tree(state.parameters),
            master=None if state.master is None else tree(state.master),
            optimizer=map_parameters(self.optimizer, how, state.optimizer, self.specs),
        )

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
            compiler_options=compiler_options(self.mesh),
        )

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


# Both let permutes run beside compute. A pipeline's run beside whole loops over layers: the first pass would move a
# permute to another tick of the loop, and the limit counts the collectives inside the loop that the permute is to
# overlap. In the backward of context parallelism two permutes run beside the same attention kernel.
_PERMUTE_OPTIONS: dict[str, Any] = {
    "xla_disable_hlo_passes": "collective-permute-motion",
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """Returns the XLA options that a step on the mesh needs."""
    on_gpu = mesh.devices.flat[0].platform in ("gpu", "cuda")
    permutes = mesh.shape[PIPELINE_AXIS] > 1 or mesh.shape[SEQUENCE_AXIS] > 1
    return dict(_PERMUTE_OPTIONS) if on_gpu and permutes else {}


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


def resolve_for_run(config: Config, num_devices: int) -> tuple[Config, Any]:
    """Returns (the config with everything derived, the tokenizer).

    Raises:
      UsageError: the tokenizer cannot be read.
      ConfigError: the options do not fit the devices or the vocabulary.
    """
    dp = validate_for_devices(config, num_devices)
    data = config.data
    made_up = data.mock_data and config.model.vocab_size is not None
    tokenizer = None if made_up else build_tokenizer(**tokenizer_settings(data), vocab_size=config.model.vocab_size)
    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    return resolve(config, vocab_size, dp * config.parallel.expert_model_parallel_size), tokenizer
