"""From the options to the plain numbers of model, optimizer and step. No communication.

The one place where a configuration value reaches the model: layers, ops and models never see the config object.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jmegatron.config import Config, layer_split_of
from jmegatron.errors import ConfigError
from jmegatron.layers.attention import AttentionSettings
from jmegatron.layers.mlp import MLPSettings
from jmegatron.mesh import PIPELINE_AXIS, TENSOR_AXIS
from jmegatron.models.gpt import GPTSettings, PipelineParallel
from jmegatron.models.transformer import LayerParallel, LayerSettings
from jmegatron.ops.activations import is_gated
from jmegatron.ops.attention import Backend, choose_backend
from jmegatron.optimizer.loss_scaler import LossScalerSettings
from jmegatron.optimizer.optimizers import OptimizerSettings
from jmegatron.optimizer.schedules import LearningRateSchedule, WeightDecaySchedule
from jmegatron.pipeline.layout import pipeline_layout
from jmegatron.planner.formulas import GPTShape
from jmegatron.training.stages import PipelineSettings
from jmegatron.training.step import StepSettings


def compute_dtype(config: Config) -> Any:
    """Returns the dtype of matmul inputs and activations."""
    if config.training.fp16:
        return jnp.float16
    return jnp.bfloat16 if config.training.bf16 else jnp.float32


def loss_scaler_settings(config: Config) -> LossScalerSettings | None:
    """Returns how the loss is scaled, None where it is not: constant, or with fp16 alone as overflows demand."""
    training = config.training
    if not training.fp16 and training.loss_scale is None:
        return None
    return LossScalerSettings(
        initial=training.initial_loss_scale,
        minimum=training.min_loss_scale,
        window=training.loss_scale_window,
        hysteresis=training.hysteresis,
        constant=training.loss_scale,
    )


def tensor_parallel(config: Config) -> LayerParallel:
    """Returns how layers are divided; sequence parallelism means nothing on one tp rank, as in the reference."""
    ranks = config.parallel.tensor_model_parallel_size
    return LayerParallel(TENSOR_AXIS, ranks, config.parallel.sequence_parallel and ranks > 1)


def attention_backend(config: Config, platform: str) -> Backend:
    """Returns the attention backend that serves on the platform.

    Raises:
      ConfigError: the one that was asked for cannot serve.
    """
    model = config.model
    assert model.kv_channels is not None, "the config is resolved"
    try:
        return choose_backend(
            config.hardware.attention_backend,
            platform=platform,
            dtype=jnp.dtype(compute_dtype(config)),
            dropout=model.attention_dropout,
            head_dim=model.kv_channels,
            packed=config.data.reset_attention_mask,
        )
    except ValueError as error:
        raise ConfigError(f"hardware.{error}") from error


def gpt_settings(config: Config, platform: str) -> GPTSettings:
    """Returns the model of a resolved config.

    Raises:
      ConfigError: the attention backend that was asked for cannot serve.
    """
    model = config.model
    assert model.num_query_groups and model.kv_channels and model.ffn_hidden_size and model.activation
    assert model.vocab_size and model.padded_vocab_size and model.max_position_embeddings
    attention = AttentionSettings(
        hidden_size=model.hidden_size,
        num_heads=model.num_attention_heads,
        num_kv_heads=model.num_query_groups,
        head_dim=model.kv_channels,
        use_bias=not model.disable_bias_linear,
        use_qkv_bias=not model.disable_bias_linear or model.add_qkv_bias,
        qk_norm=model.normalization if model.qk_layernorm else None,
        norm_eps=model.norm_epsilon,
        zero_centered_norm=model.apply_layernorm_1p,
        rotary_interleaved=model.rotary_interleaved,
        dropout=model.attention_dropout,
        backend=attention_backend(config, platform),
    )
    layer = LayerSettings(
        attention=attention,
        mlp=MLPSettings(model.hidden_size, model.ffn_hidden_size, model.activation, not model.disable_bias_linear),
        normalization=model.normalization,
        norm_eps=model.norm_epsilon,
        zero_centered_norm=model.apply_layernorm_1p,
        hidden_dropout=model.hidden_dropout,
        recompute=config.training.recompute_granularity,
        recompute_mlp="mlp" in config.training.recompute_modules,
    )
    return GPTSettings(
        num_layers=model.num_layers,
        layer=layer,
        vocab_size=model.vocab_size,
        padded_vocab_size=model.padded_vocab_size,
        max_positions=model.max_position_embeddings,
        position_embedding=model.position_embedding_type,
        rotary_dim=int(model.kv_channels * model.rotary_percent),
        rotary_base=model.rotary_base,
        rotary_interpolation=model.rotary_seq_len_interpolation_factor or 1.0,
        tied=not model.untie_embeddings_and_output_weights,
        mask_padded_vocab=model.mask_padded_vocab,
        label_smoothing=config.training.label_smoothing,
        init_std=model.init_method_std,
    )


def _updates(config: Config, length: str) -> float:
    """Returns an option that is there in iterations and in samples, such as lr_decay, in (parts of) updates."""
    in_samples = config.training.train_samples is not None
    value = getattr(config.optimizer, f"{length}_{'samples' if in_samples else 'iters'}")
    return value / _batch(config) if in_samples else float(value)


def _batch(config: Config) -> int:
    assert config.training.global_batch_size is not None, "the config is resolved"
    return config.training.global_batch_size


def learning_rate_schedule(config: Config) -> LearningRateSchedule:
    """Returns the schedule; a warm-up fraction may end within an iteration, as in the reference."""
    optimizer = config.optimizer
    decay = _updates(config, "lr_decay")
    fraction, wsd = optimizer.lr_warmup_fraction, optimizer.lr_decay_style == "WSD"
    return LearningRateSchedule(
        style=optimizer.lr_decay_style,
        peak=optimizer.lr,
        minimum=optimizer.min_lr,
        warmup=_updates(config, "lr_warmup") if fraction is None else fraction * decay,
        decay=decay,
        warmup_start=optimizer.lr_warmup_init,
        wsd_style=optimizer.lr_wsd_decay_style,
        wsd_decay=_updates(config, "lr_wsd_decay") if wsd else None,
        samples_per_update=_batch(config),
    )


def decoupled_schedule(config: Config) -> LearningRateSchedule | None:
    """Returns the schedule of word embedding and output layer, None where it is that of all."""
    rate, minimum = config.optimizer.decoupled_lr, config.optimizer.decoupled_min_lr
    if rate is None:
        return None
    common = learning_rate_schedule(config)
    return dataclasses.replace(common, peak=rate, minimum=common.minimum if minimum is None else minimum)


def weight_decay_schedule(config: Config) -> WeightDecaySchedule:
    """Returns the schedule of weight decay; it grows over the whole run, whatever the learning rate does."""
    optimizer, training = config.optimizer, config.training
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    run = training.train_iters if training.train_samples is None else training.train_samples / _batch(config)
    assert run is not None, "the config is resolved"
    return WeightDecaySchedule(
        style=optimizer.weight_decay_incr_style,
        start=optimizer.weight_decay if start is None else start,
        end=optimizer.weight_decay if end is None else end,
        steps=float(run),
    )


def optimizer_settings(config: Config) -> OptimizerSettings:
    """Returns the numbers of the optimizer."""
    optimizer = config.optimizer
    return OptimizerSettings(
        name=optimizer.optimizer,
        beta1=optimizer.adam_beta1,
        beta2=optimizer.adam_beta2,
        eps=optimizer.adam_eps,
        sgd_momentum=optimizer.sgd_momentum,
        lion_beta1=optimizer.lion_beta1,
        lion_beta2=optimizer.lion_beta2,
        muon_momentum=optimizer.muon_momentum,
        muon_scale=optimizer.muon_extra_scale_factor,
        weight_decay=weight_decay_schedule(config),
        clip_grad=optimizer.clip_grad,
    )


def pipeline_settings(config: Config) -> PipelineSettings:
    """Returns how the stages of a resolved config are cut and in which order they work.

    Raises:
      ConfigError: the layers do not fit the stages.
    """
    parallel = config.parallel
    layout = pipeline_layout(**dataclasses.asdict(layer_split_of(config)))
    if layout.num_stages == 1:
        return PipelineSettings()
    assert parallel.pipeline_schedule is not None
    places = tuple(tuple(row) for row in layout.places().tolist())
    return PipelineSettings(
        PipelineParallel(PIPELINE_AXIS, layout.num_stages, places),
        parallel.pipeline_schedule,
        parallel.microbatch_group_size_per_virtual_pipeline_stage if layout.num_chunks > 1 else None,
    )


def step_settings(config: Config, platform: str) -> StepSettings:
    """Returns what a training step needs to know.

    Raises:
      ConfigError: the attention backend that was asked for cannot serve, or the layers do not fit the stages.
    """
    return StepSettings(
        model=gpt_settings(config, platform),
        parallel=tensor_parallel(config),
        optimizer=optimizer_settings(config),
        compute_dtype=compute_dtype(config),
        per_token=config.optimizer.calculate_per_token_loss,
        pipeline=pipeline_settings(config),
        distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        overlap_param_gather=config.parallel.overlap_param_gather,
        scaler=loss_scaler_settings(config),
    )


def formula_shape(config: Config) -> GPTShape:
    """Returns the shape that the closed forms take (parameters, FLOPs) of a resolved config."""
    model = config.model
    assert model.num_query_groups and model.kv_channels and model.ffn_hidden_size and model.activation
    assert model.padded_vocab_size and model.max_position_embeddings
    learned = model.position_embedding_type == "learned_absolute"
    return GPTShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        vocab_rows=model.padded_vocab_size,
        seq_len=model.seq_length,
        gated=is_gated(model.activation),
        biases=not model.disable_bias_linear,
        qkv_bias=model.add_qkv_bias,
        norm=model.normalization.lower(),
        tied=not model.untie_embeddings_and_output_weights,
        num_positions=model.max_position_embeddings if learned else 0,
        qk_norm=model.qk_layernorm,
    )
