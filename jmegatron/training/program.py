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
from jmegatron.data.sampler import CyclicOrder, SampleOrder, SequentialOrder
from jmegatron.data.tokenizers import build_tokenizer, tokenizer_settings
from jmegatron.mesh import build_mesh
from jmegatron.models.gpt import gpt_specs
from jmegatron.optimizer.adamw import adamw
from jmegatron.training.batches import BatchPlacer
from jmegatron.training.build import learning_rate_schedule, step_settings
from jmegatron.training.state import TrainState, init_state, train_state_shardings
from jmegatron.training.step import Batch, StepSettings, batch_shardings, make_train_step


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
        integers = jax.ShapeDtypeStruct((*lead, seq), np.int32)
        shapes = Batch(
            tokens=integers,
            labels=integers,
            loss_mask=jax.ShapeDtypeStruct((*lead, seq), np.float32),
            sample_ids=jax.ShapeDtypeStruct(lead, np.uint32),
            position_ids=integers if self.config.data.reset_position_ids else None,
            segment_ids=integers if self.config.data.reset_attention_mask else None,
        )
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, batch_shardings(shapes, self.mesh)
        )

    @functools.cached_property
    def placer(self) -> BatchPlacer:
        """Puts the run's batches onto the devices."""
        return BatchPlacer(self.abstract_batch(), self.num_microbatches)

    def put(self, arrays: dict[str, np.ndarray]) -> Batch:
        """Returns a global batch on the devices, micro-batch major, from its rows that this process needs."""
        return self.placer(arrays)

    def sample_order(self, num_samples: int) -> SampleOrder:
        """Returns which of `num_samples` training samples lies at each place of the run."""
        if self.config.data.dataloader_type == "single":
            return SequentialOrder(num_samples)
        data_ranks = self.mesh.shape["dp"] * self.mesh.shape["ep"]
        sharded = not self.config.data.no_data_sharding
        return CyclicOrder(num_samples, self.config.training.micro_batch_size, data_ranks, sharded)


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
    tokenizer = None if made_up else build_tokenizer(**tokenizer_settings(data), vocab_size=config.model.vocab_size)
    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    return resolve(config, vocab_size, dp * config.parallel.expert_model_parallel_size), tokenizer
