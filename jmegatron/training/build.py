"""From the options to the plain numbers of model, optimizer and step. No communication.

The one place where a configuration value reaches the model: layers, ops and models never see the config object.
"""

import dataclasses
from typing import Any, cast

import jax.numpy as jnp

from jmegatron.config import Config, attention_window, cp_comm_types, layer_split_of, moe_layers, moe_places
from jmegatron.config.layer_split import chunk_lengths, num_chunks_of
from jmegatron.context_parallel.layout import WHOLE_SEQUENCE, CommType, ContextParallel
from jmegatron.errors import ConfigError
from jmegatron.layers.attention import AttentionSettings
from jmegatron.layers.mlp import MLPSettings
from jmegatron.mesh import BATCH_AXES, EXPERT_AXIS, PIPELINE_AXIS, SEQUENCE_AXIS, TENSOR_AXIS
from jmegatron.models.gpt import GPTSettings, PipelineParallel
from jmegatron.models.transformer import ONE_EXPERT_RANK, LayerParallel, LayerSettings
from jmegatron.moe.experts import ExpertSettings
from jmegatron.moe.layer import ExpertParallel, MoESettings
from jmegatron.moe.router import RouterSettings
from jmegatron.ops.activations import is_gated
from jmegatron.ops.attention import Backend, choose_backend, fused_obstacles
from jmegatron.ops.rotary import RotaryScaling
from jmegatron.optimizer.loss_scaler import LossScalerSettings
from jmegatron.optimizer.optimizers import OptimizerSettings
from jmegatron.optimizer.schedules import START, LearningRateSchedule, Position, WeightDecaySchedule
from jmegatron.pipeline.layout import pipeline_layout
from jmegatron.planner.costs import Layout
from jmegatron.planner.formulas import ExpertShape, GPTShape
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


def layer_parallel(config: Config, platform: str = "cpu") -> LayerParallel:
    """Returns how layers are divided; sequence parallelism means nothing on one tp rank, as in the reference.

    Layers that reach other ranks' tokens in different ways say so themselves (`GPTSettings.place_settings`).
    """
    parallel = config.parallel
    ranks, context_ranks = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    return LayerParallel(
        TENSOR_AXIS,
        ranks,
        parallel.sequence_parallel and ranks > 1,
        ContextParallel(SEQUENCE_AXIS, context_ranks, cast(CommType, parallel.cp_comm_type[0]))
        if context_ranks > 1
        else WHOLE_SEQUENCE,
        ONE_EXPERT_RANK if config.model.num_experts is None else _expert_parallel(config, platform),
    )


def _expert_parallel(config: Config, platform: str) -> ExpertParallel:
    parallel = config.parallel
    return ExpertParallel(
        EXPERT_AXIS,
        parallel.expert_model_parallel_size,
        BATCH_AXES,
        divided_over_tp=parallel.expert_tensor_parallel_size != 1,
        ragged=platform in ("gpu", "cuda"),
    )


def _moe_settings(config: Config) -> MoESettings | None:
    """Returns the numbers of the mixtures of experts of a resolved config, None for a dense model."""
    model = config.model
    if model.num_experts is None:
        return None
    assert model.moe_ffn_hidden_size and model.activation
    balancing = model.moe_router_load_balancing_type
    router = RouterSettings(
        num_experts=model.num_experts,
        top_k=model.moe_router_topk,
        score_function=model.moe_router_score_function,
        pre_softmax=model.moe_router_pre_softmax,
        expert_bias=model.moe_router_enable_expert_bias,
        bias_update_rate=model.moe_router_bias_update_rate,
        num_groups=model.moe_router_num_groups,
        group_top_k=model.moe_router_group_topk,
        scaling_factor=model.moe_router_topk_scaling_factor,
        fp32=model.moe_router_dtype == "fp32",
        balancing=balancing,
        coefficient=0.0 if balancing == "none" else model.moe_aux_loss_coeff,
        z_coefficient=model.moe_z_loss_coeff or 0.0,
    )
    experts = ExpertSettings(
        model.num_experts,
        model.hidden_size,
        model.moe_ffn_hidden_size,
        model.activation,
        not model.disable_bias_linear,
    )
    return MoESettings(
        router,
        experts,
        shared_ffn_hidden_size=model.moe_shared_expert_intermediate_size,
        capacity_factor=model.moe_expert_capacity_factor,
        drop_policy=model.moe_token_drop_policy,
        pad_to_capacity=model.moe_pad_expert_input_to_capacity,
        bound_factor=model.moe_receive_bound_factor,
    )


def attention_backend(config: Config, platform: str) -> Backend:
    """Returns the attention backend that serves on the platform.

    Raises:
      ConfigError: the one that was asked for cannot serve.
    """
    try:
        return choose_backend(config.hardware.attention_backend, **_attention_facts(config, platform))
    except ValueError as error:
        raise ConfigError(f"hardware.{error}") from error


def attention_line(config: Config, platform: str) -> str:
    """Returns what the log says about the attention backend: which one runs, and why where that was left open.

    Raises:
      ConfigError: the one that was asked for cannot serve.
    """
    backend, requested = attention_backend(config, platform), config.hardware.attention_backend
    if requested != "auto":
        return f"attention: {backend} (as asked for)"
    obstacles = fused_obstacles(**_attention_facts(config, platform))
    return f"attention: {backend} (auto{'; not fused since ' if obstacles else ''}{', '.join(obstacles)})"


def _attention_facts(config: Config, platform: str) -> dict[str, Any]:
    model, parallel = config.model, config.parallel
    return {
        "platform": platform,
        "dtype": jnp.dtype(compute_dtype(config)),
        "dropout": model.attention_dropout,
        "head_dim": model.kv_channels,
        "packed": config.data.reset_attention_mask,
        "window": attention_window(model),
        "in_order": parallel.context_parallel_size == 1 or set(parallel.cp_comm_type) == {"a2a"},
    }


def _place_settings(config: Config, layer: LayerSettings) -> tuple[LayerSettings, ...]:
    """Returns the settings of each place of a chunk where they differ, else none.

    Layers may communicate in different ways, some alone may have experts, and some alone may be computed again.
    """
    training, types = config.training, set(config.parallel.cp_comm_type)
    settings = [layer] * pipeline_layout(**dataclasses.asdict(layer_split_of(config))).layers_per_chunk
    if config.parallel.context_parallel_size > 1 and len(types) > 1:
        of = {t: dataclasses.replace(layer.attention, comm_type=cast(CommType, t)) for t in types}
        settings = [dataclasses.replace(layer, attention=of[t]) for t in cp_comm_types(config)]
    settings = [
        one if experts else dataclasses.replace(one, moe=None)
        for one, experts in zip(settings, moe_places(config), strict=True)
    ]
    if training.recompute_method == "block":
        plain = slice(training.recompute_num_layers, None)
        settings[plain] = [dataclasses.replace(one, recompute=None) for one in settings[plain]]
    return () if set(settings) == {layer} else tuple(settings)


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
        window=attention_window(model),
    )
    uniform = config.training.recompute_method == "uniform"
    layer = LayerSettings(
        attention=attention,
        mlp=MLPSettings(model.hidden_size, model.ffn_hidden_size, model.activation, not model.disable_bias_linear),
        normalization=model.normalization,
        norm_eps=model.norm_epsilon,
        zero_centered_norm=model.apply_layernorm_1p,
        hidden_dropout=model.hidden_dropout,
        recompute=config.training.recompute_granularity,
        recompute_mlp="mlp" in config.training.recompute_modules,
        recompute_unit=(config.training.recompute_num_layers or 1) if uniform else 1,
        moe=_moe_settings(config),
    )
    return GPTSettings(
        num_layers=model.num_layers,
        layer=layer,
        place_settings=_place_settings(config, layer),
        vocab_size=model.vocab_size,
        padded_vocab_size=model.padded_vocab_size,
        max_positions=model.max_position_embeddings,
        position_embedding=model.position_embedding_type,
        rotary_dim=int(model.kv_channels * model.rotary_percent),
        rotary_base=model.rotary_base,
        rotary_interpolation=model.rotary_seq_len_interpolation_factor or 1.0,
        rotary_scaling=RotaryScaling(factor=model.rope_scaling_factor) if model.use_rope_scaling else None,
        tied=not model.untie_embeddings_and_output_weights,
        mask_padded_vocab=model.mask_padded_vocab,
        label_smoothing=config.training.label_smoothing,
        init_std=model.init_method_std,
    )


def _samples(config: Config, length: str) -> float:
    """Returns an option that is there in iterations and in samples, such as lr_decay, in samples."""
    in_samples = config.training.train_samples is not None
    value = getattr(config.optimizer, f"{length}_{'samples' if in_samples else 'iters'}")
    return float(value if in_samples else value * _batch(config))


def _batch(config: Config) -> int:
    assert config.training.global_batch_size is not None, "the config is resolved"
    return config.training.global_batch_size


def learning_rate_schedule(config: Config, position: Position = START) -> LearningRateSchedule:
    """Returns the schedule of a run that starts at `position`.

    A warm-up fraction may end within an iteration, as in the reference.
    """
    optimizer = config.optimizer
    decay = _samples(config, "lr_decay")
    fraction, wsd = optimizer.lr_warmup_fraction, optimizer.lr_decay_style == "WSD"
    return LearningRateSchedule(
        style=optimizer.lr_decay_style,
        peak=optimizer.lr,
        minimum=optimizer.min_lr,
        warmup=_samples(config, "lr_warmup") if fraction is None else fraction * decay,
        decay=decay,
        warmup_start=optimizer.lr_warmup_init,
        wsd_style=optimizer.lr_wsd_decay_style,
        wsd_decay=_samples(config, "lr_wsd_decay") if wsd else None,
        samples_per_update=_batch(config),
        position=position,
    )


def decoupled_schedule(config: Config, position: Position = START) -> LearningRateSchedule | None:
    """Returns the schedule of word embedding and output layer, None where it is that of all."""
    rate, minimum = config.optimizer.decoupled_lr, config.optimizer.decoupled_min_lr
    if rate is None:
        return None
    common = learning_rate_schedule(config, position)
    return dataclasses.replace(common, peak=rate, minimum=common.minimum if minimum is None else minimum)


def weight_decay_schedule(config: Config, position: Position = START) -> WeightDecaySchedule:
    """Returns the schedule of weight decay; it grows over the whole run, whatever the learning rate does."""
    optimizer, training = config.optimizer, config.training
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    assert training.train_iters is not None, "the config is resolved"
    samples = training.train_iters * _batch(config) if training.train_samples is None else training.train_samples
    return WeightDecaySchedule(
        style=optimizer.weight_decay_incr_style,
        start=optimizer.weight_decay if start is None else start,
        end=optimizer.weight_decay if end is None else end,
        steps=float(samples),
        samples_per_update=_batch(config),
        position=position,
    )


def optimizer_settings(config: Config, position: Position = START) -> OptimizerSettings:
    """Returns the numbers of the optimizer of a run that starts at `position`."""
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
        weight_decay=weight_decay_schedule(config, position),
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


def step_settings(config: Config, platform: str, position: Position = START) -> StepSettings:
    """Returns what a training step needs to know, in a run whose schedules start at `position`.

    Raises:
      ConfigError: the attention backend that was asked for cannot serve, or the layers do not fit the stages.
    """
    return StepSettings(
        model=gpt_settings(config, platform),
        parallel=layer_parallel(config, platform),
        optimizer=optimizer_settings(config, position),
        compute_dtype=compute_dtype(config),
        per_token=config.optimizer.calculate_per_token_loss,
        pipeline=pipeline_settings(config),
        distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        overlap_param_gather=config.parallel.overlap_param_gather,
        scaler=loss_scaler_settings(config),
        check_gradients=config.training.check_for_nan_in_loss_and_grad,
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
        window=attention_window(model),
        experts=_expert_shape(config),
    )


def _expert_shape(config: Config) -> ExpertShape | None:
    model = config.model
    if model.num_experts is None:
        return None
    assert model.moe_ffn_hidden_size is not None
    return ExpertShape(
        num_experts=model.num_experts,
        top_k=model.moe_router_topk,
        ffn_hidden_size=model.moe_ffn_hidden_size,
        num_layers=sum(moe_layers(model)),
        shared_ffn_hidden_size=model.moe_shared_expert_intermediate_size or 0,
        router_bias=model.moe_router_enable_expert_bias,
        pattern=moe_layers(model),
        capacity_factor=model.moe_expert_capacity_factor,
        pad_to_capacity=model.moe_pad_expert_input_to_capacity,
        bound_factor=model.moe_receive_bound_factor,
        router_fp32=model.moe_router_dtype == "fp32",
    )


def formula_layout(config: Config, data_parallel_size: int, gpus_per_node: int = 8) -> Layout:
    """Returns the layout that the closed forms take of a resolved config.

    Args:
      config: resolved.
      data_parallel_size: length of the mesh axis dp, as `validate_for_devices` returns it.
      gpus_per_node: devices that NVLink joins.
    """
    parallel, training = config.parallel, config.training
    split = layer_split_of(config)
    ranks = data_parallel_size * parallel.expert_model_parallel_size
    return Layout(
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        dp=data_parallel_size,
        cp=parallel.context_parallel_size,
        ep=parallel.expert_model_parallel_size,
        experts_over_tp=parallel.expert_tensor_parallel_size != 1 or parallel.tensor_model_parallel_size == 1,
        num_chunks=num_chunks_of(split),
        micro_batch_size=training.micro_batch_size,
        num_microbatches=_batch(config) // (training.micro_batch_size * ranks),
        sequence_parallel=layer_parallel(config).sequence_parallel,
        distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        recompute=training.recompute_granularity,
        recompute_method=training.recompute_method or "uniform",
        recompute_num_layers=training.recompute_num_layers or 1,
        recompute_modules=training.recompute_modules,
        parameter_bytes=jnp.dtype(compute_dtype(config)).itemsize,
        optimizer=config.optimizer.optimizer,
        dropout=config.model.hidden_dropout > 0,
        schedule=parallel.pipeline_schedule or "",
        group_size=parallel.microbatch_group_size_per_virtual_pipeline_stage,
        chunk_lengths=chunk_lengths(split),
        cp_comm_type=parallel.cp_comm_type[0],
        gpus_per_node=gpus_per_node,
    )
