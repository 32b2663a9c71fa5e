"""Cross-field checks, before any device work (no communication).

`validate` checks what a config says by itself, `validate_for_devices` what depends on the number of devices. Each check
is a short function; the first one that fails is reported.

Reference: `validate_args` in `megatron/training/arguments.py`; batch rules in
`megatron/core/num_microbatches_calculator.py`.
"""

import math
from collections.abc import Iterator
from typing import Any

from jmegatron.config.layer_split import layer_split_of, num_chunks_of
from jmegatron.config.options import flag_of, options, problem
from jmegatron.config.resolution import attention_window, cp_comm_types, moe_layers, moe_places, resolve
from jmegatron.config.sections import Config
from jmegatron.errors import ConfigError

# name -> (smallest value, largest value); an option in _OPEN_... excludes that bound.
_INF = math.inf
_RANGES: dict[str, tuple[int | float, int | float]] = {
    "num_layers": (1, _INF),
    "hidden_size": (1, _INF),
    "num_attention_heads": (1, _INF),
    "seq_length": (1, _INF),
    "ffn_hidden_size": (1, _INF),
    "num_query_groups": (1, _INF),
    "kv_channels": (1, _INF),
    "max_position_embeddings": (1, _INF),
    "rotary_base": (0, _INF),
    "rotary_percent": (0, 1),
    "rotary_seq_len_interpolation_factor": (0, _INF),
    "rope_scaling_factor": (1, _INF),
    "norm_epsilon": (0, _INF),
    "hidden_dropout": (0, 1),
    "attention_dropout": (0, 1),
    "init_method_std": (0, _INF),
    "vocab_size": (1, _INF),
    "make_vocab_size_divisible_by": (1, _INF),
    "padded_vocab_size": (1, _INF),
    "tensor_model_parallel_size": (1, _INF),
    "pipeline_model_parallel_size": (1, _INF),
    "num_layers_per_virtual_pipeline_stage": (1, _INF),
    "num_virtual_stages_per_pipeline_rank": (1, _INF),
    "decoder_first_pipeline_num_layers": (1, _INF),
    "decoder_last_pipeline_num_layers": (1, _INF),
    "microbatch_group_size_per_virtual_pipeline_stage": (1, _INF),
    "context_parallel_size": (1, _INF),
    "expert_model_parallel_size": (1, _INF),
    "num_experts": (1, _INF),
    "moe_ffn_hidden_size": (1, _INF),
    "moe_shared_expert_intermediate_size": (1, _INF),
    "moe_router_topk": (1, _INF),
    # Upper ends: what is multiplied by them stays within float32.
    "moe_router_bias_update_rate": (0, 1e6),
    "moe_router_num_groups": (1, _INF),
    "moe_router_group_topk": (1, _INF),
    "moe_router_topk_scaling_factor": (0, 1e6),
    "moe_aux_loss_coeff": (0, 1e6),
    "moe_z_loss_coeff": (0, 1e6),
    "moe_expert_capacity_factor": (0, 1e6),
    "moe_receive_bound_factor": (1, 1e6),
    "expert_tensor_parallel_size": (1, _INF),
    "lr": (0, _INF),
    "min_lr": (0, _INF),
    "decoupled_lr": (0, _INF),
    "decoupled_min_lr": (0, _INF),
    "lr_decay_iters": (1, _INF),
    "lr_decay_samples": (1, _INF),
    "lr_warmup_iters": (0, _INF),
    "lr_warmup_samples": (0, _INF),
    "lr_wsd_decay_iters": (1, _INF),
    "lr_wsd_decay_samples": (1, _INF),
    "lr_warmup_fraction": (0, 1),
    "lr_warmup_init": (0, _INF),
    "weight_decay": (0, _INF),
    "start_weight_decay": (0, _INF),
    "end_weight_decay": (0, _INF),
    "adam_beta1": (0, 1),
    "adam_beta2": (0, 1),
    "adam_eps": (0, _INF),
    "sgd_momentum": (0, 1),
    "lion_beta1": (0, 1),
    "lion_beta2": (0, 1),
    "muon_momentum": (0, 1),
    "muon_extra_scale_factor": (0, _INF),
    "clip_grad": (0, _INF),
    "micro_batch_size": (1, _INF),
    "global_batch_size": (1, _INF),
    "recompute_num_layers": (1, _INF),
    "train_iters": (1, _INF),
    "train_samples": (1, _INF),
    "eval_interval": (1, _INF),
    "eval_iters": (0, _INF),
    "exit_interval": (1, _INF),
    "exit_duration_in_mins": (1, _INF),
    # Well inside float32, in which the scale, its reciprocal and the scaled loss are.
    "loss_scale": (2.0**-64, 2.0**64),
    "initial_loss_scale": (2.0**-64, 2.0**64),
    "min_loss_scale": (2.0**-64, 2.0**64),
    "loss_scale_window": (1, 2**31 - 1),
    "hysteresis": (1, 2**31 - 1),
    "check_weight_hash_across_dp_replicas_interval": (1, _INF),
    "seed": (0, 2**32 - 1),
    "mid_level_dataset_surplus": (0, _INF),
    "num_workers": (0, 1024),
    "tiktoken_num_special_tokens": (7, _INF),
    "label_smoothing": (0, 1),
    "save_interval": (1, _INF),
    "save_interval_minutes": (0, _INF),
    "ckpt_step": (0, _INF),
    "keep_latest": (1, _INF),
    "keep_every": (1, _INF),
    "log_interval": (1, _INF),
    "profile_step_start": (0, _INF),
    "profile_step_end": (1, _INF),
    # Each virtual device has its own threads and arrays: thousands would exhaust a machine before anything is said.
    "num_cpu_devices": (1, 512),
    "distributed_timeout_minutes": (1, _INF),
    "num_processes": (1, _INF),
    "process_id": (0, _INF),
    # Each GPU that is compiled for is an object here.
    "num_gpus": (1, 2**17),
    "gpus_per_node": (1, _INF),
    "assumed_tflops": (0, _INF),
}
_LARGEST = 2**63 - 1
DATA_SOURCES = (
    "data_path",
    "data_args_path",
    "train_data_path",
    "per_split_data_args_path",
    "mock_data",
    "demo_data",
)
# A probability or beta of 1 would keep nothing, a warm-up of the whole decay leaves none; a base, factor or epsilon of
# 0 would divide by it.
_OPEN_ABOVE = {
    "hidden_dropout",
    "attention_dropout",
    "adam_beta1",
    "adam_beta2",
    "sgd_momentum",
    "lion_beta1",
    "lion_beta2",
    "muon_momentum",
    "label_smoothing",
    "lr_warmup_fraction",
}
_OPEN_BELOW = {
    "rotary_base",
    "rotary_percent",
    "rotary_seq_len_interpolation_factor",
    "norm_epsilon",
    "adam_eps",
    "init_method_std",
    "assumed_tflops",
    "moe_router_topk_scaling_factor",
    "moe_expert_capacity_factor",
}


def validate(config: Config) -> None:
    """Checks everything that can be known without devices and data.

    Raises:
        ConfigError: A value is out of range, options contradict each other, or one asks for what is not there yet.
    """
    for check in (
        _check_ranges,
        _check_duration,
        _check_low_memory_schedule,
        _check_layers_of_stages,
        _check_schedule,
        _check_overlap_of_schedule,
        _check_microbatch_group,
        _check_recompute,
        _check_precision,
        _check_loss_scale,
        _check_param_gather,
        _check_heads,
        _check_query_groups,
        _check_widths,
        _check_positions,
        _check_rotary,
        _check_rope_scaling,
        _check_window,
        _check_sequence_parallel,
        _check_context_parallel,
        _check_comm_type,
        _check_heads_of_a2a,
        _check_experts_used,
        _check_experts,
        _check_expert_tensor_parallel,
        _check_router,
        _check_router_used,
        _check_router_groups,
        _check_capacity,
        _check_vocab,
        _check_learning_rate,
        _check_decoupled_rate,
        _check_units,
        _check_warmup,
        _check_wsd,
        _check_weight_decay,
        _check_data_source,
        _check_tokenizer,
        _check_tokenizer_model,
        _check_sft,
        _check_split_sources,
        _check_split,
        _check_dry_run,
        _check_batch,
        _check_outputs,
        _check_profile,
    ):
        check(config)


def validate_for_devices(config: Config, num_devices: int) -> int:
    """Checks a valid config against the number of devices.

    Returns:
        The length of the mesh axis dp: `num_devices / (tp * pp * cp * ep)`. Batches are sharded over dp and ep.

    Raises:
        ConfigError: The devices are not a multiple of the product of the degrees, or the global batch is not a multiple
            of micro-batch times data-parallel size.
    """
    names = tuple(_degrees(config))
    product = math.prod(_degrees(config).values())
    devices_option = "num_gpus" if config.hardware.dry_run else "num_cpu_devices"
    if num_devices < 1 or num_devices % product:
        sizes = ", ".join(f"{name} {size}" for name, size in _degrees(config).items() if size > 1)
        raise problem(
            "The devices cannot be divided among the degrees of parallelism.",
            where=(*(name for name in names if _degrees(config)[name] > 1), devices_option),
            got=f"{num_devices} devices; {sizes}, product {product}",
            expected="the number of devices to be a multiple of the product",
            fix=f"lower a degree so that the product divides {num_devices}, or use a multiple of {product} devices"
            + ("" if config.hardware.dry_run else f" (--num-cpu-devices {product} makes virtual ones)"),
        )
    dp = num_devices // product
    replicas = dp * config.parallel.expert_model_parallel_size
    micro, batch = config.training.micro_batch_size, config.training.global_batch_size
    if batch is not None and batch % (micro * replicas):
        raise problem(
            "The global batch cannot be divided into micro-batches.",
            where=("global_batch_size", "micro_batch_size"),
            got=f"global_batch_size {batch}, micro_batch_size {micro}, data-parallel size {replicas} "
            f"({num_devices} devices / {product // config.parallel.expert_model_parallel_size})",
            expected=f"global_batch_size to be a multiple of {micro} * {replicas} = {micro * replicas}",
            fix=f"set --global-batch-size to {_nearest_multiple(batch, micro * replicas)}, or change "
            "--micro-batch-size or the number of devices",
        )
    return dp


def _degrees(config: Config) -> dict[str, int]:
    """Returns option name -> degree of model parallelism."""
    parallel = config.parallel
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
    }


def _values(config: Config) -> Iterator[tuple[str, Any]]:
    """Yields (option name, value) over all sections."""
    for name, option in options().items():
        yield name, getattr(getattr(config, option.section), name)


def _nearest_multiple(value: int, factor: int) -> int:
    return max(1, (value + factor // 2) // factor) * factor


def _divisors(number: int) -> str:
    """Returns the small divisors of a number, to propose degrees."""
    return ", ".join(str(size) for size in range(1, min(number, 64) + 1) if number % size == 0)


# --- single options ----------------------------------------------------------------------------------------------


def _check_ranges(config: Config) -> None:
    for name, value in _values(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise _out_of_range(name, value, "a finite number")
        if isinstance(value, int) and value > _LARGEST:
            raise _out_of_range(name, value, f"at most {_LARGEST}")
        if value is None or name not in _RANGES:
            continue
        low, high = _RANGES[name]
        too_low = value <= low if name in _OPEN_BELOW else value < low
        too_high = value >= high if name in _OPEN_ABOVE else value > high
        if too_low or too_high:
            raise _out_of_range(name, value, _range_text(name, low, high))


def _range_text(name: str, low: int | float, high: int | float) -> str:
    above = f"more than {low}" if name in _OPEN_BELOW else f"at least {low}"
    if high == _INF:
        return above
    return f"{above} and {'less than' if name in _OPEN_ABOVE else 'at most'} {high}"


def _out_of_range(name: str, value: int | float, expected: str) -> ConfigError:
    return problem(
        f"{name} is out of range.",
        where=(name,),
        got=str(value),
        expected=expected,
        fix=f"set {flag_of(name)} to a value that is {expected}",
    )


# --- pipeline ----------------------------------------------------------------------------------------------------


def _check_low_memory_schedule(config: Config) -> None:
    """A permute joins all devices of the program, so it must not stand in a branch that some stages do not take.

    The groups of an all-gather or an all-to-all over cp lie within a stage, whose devices all take the same branch.
    """
    parallel = config.parallel
    low_memory = parallel.pipeline_schedule == "1f1b-low-memory" and parallel.pipeline_model_parallel_size > 1
    if low_memory and parallel.context_parallel_size > 1 and "p2p" in parallel.cp_comm_type:
        raise problem(
            "The low-memory schedule would deadlock with ring attention, or mix up what is sent: its stages take "
            "different branches, and the ring's permutes inside them join all stages.",
            where=("pipeline_schedule", "context_parallel_size", "cp_comm_type"),
            got=f"pipeline_schedule 1f1b-low-memory, context_parallel_size {parallel.context_parallel_size}, "
            f"cp_comm_type {' '.join(parallel.cp_comm_type)}",
            expected="another cp_comm_type than p2p for all layers, or another schedule",
            fix="use --cp-comm-type all_gather or a2a, or --pipeline-schedule 1f1b",
        )


def _check_overlap_of_schedule(config: Config) -> None:
    """A reduction waits for all devices of its axis, as above; its stages run their loops at different times."""
    parallel = config.parallel
    low_memory = parallel.pipeline_schedule == "1f1b-low-memory" and parallel.pipeline_model_parallel_size > 1
    on = [name for name in ("overlap_grad_reduce", "overlap_param_gather") if getattr(parallel, name)]
    if low_memory and on:
        raise problem(
            "The low-memory schedule has no loop over layers in which all stages could reduce gradients.",
            where=("pipeline_schedule", *on),
            got="pipeline_schedule 1f1b-low-memory, " + " and ".join(on),
            expected="the low-memory schedule without " + " and ".join(flag_of(name) for name in on),
            fix="leave " + " and ".join(flag_of(name) for name in on) + " out, or use --pipeline-schedule 1f1b",
        )


def _check_layers_of_stages(config: Config) -> None:
    num_chunks_of(layer_split_of(config))


def _check_schedule(config: Config) -> None:
    schedule, chunks = config.parallel.pipeline_schedule, num_chunks_of(layer_split_of(config))
    if schedule is None or (schedule == "interleaved") == (chunks > 1):
        return
    chunk_options = (
        "num_virtual_stages_per_pipeline_rank",
        "num_layers_per_virtual_pipeline_stage",
        "pipeline_model_parallel_layout",
    )
    given = [name for name in chunk_options if getattr(config.parallel, name) is not None]
    # Undoing an even cut always leaves whole stages; a layout has no such neighbour.
    undo = {
        "num_virtual_stages_per_pipeline_rank": ", or --num-virtual-stages-per-pipeline-rank 1",
        "num_layers_per_virtual_pipeline_stage": ", or --num-layers-per-virtual-pipeline-stage null",
    }
    raise problem(
        "Several chunks a stage need the interleaved schedule."
        if chunks > 1
        else "The interleaved schedule needs several chunks a stage.",
        where=("pipeline_schedule", *(given or chunk_options)),
        got=f"pipeline_schedule {schedule}, {chunks} chunk{'s' if chunks > 1 else ''} a stage",
        expected="interleaved with several chunks a stage; 1f1b, 1f1b-low-memory or gpipe with one",
        fix="use --pipeline-schedule interleaved" + "".join(undo.get(name, "") for name in given)
        if chunks > 1
        else "use --pipeline-schedule 1f1b, or give several chunks with --num-virtual-stages-per-pipeline-rank",
    )


def _check_microbatch_group(config: Config) -> None:
    parallel = config.parallel
    group, stages = (
        parallel.microbatch_group_size_per_virtual_pipeline_stage,
        parallel.pipeline_model_parallel_size,
    )
    if group is not None and group < stages and num_chunks_of(layer_split_of(config)) > 1:
        raise problem(
            "A group of micro-batches is too small to keep all stages busy.",
            where=("microbatch_group_size_per_virtual_pipeline_stage", "pipeline_model_parallel_size"),
            got=f"microbatch_group_size_per_virtual_pipeline_stage {group}, pipeline_model_parallel_size {stages}",
            expected="at least pipeline_model_parallel_size",
            fix=f"use --microbatch-group-size-per-virtual-pipeline-stage {stages}, or leave it out",
        )


# --- recomputation -----------------------------------------------------------------------------------------------

_RECOMPUTABLE = ("core_attn", "layernorm", "mlp")


def _check_recompute(config: Config) -> None:
    training = config.training
    granularity = training.recompute_granularity
    modules = training.recompute_modules
    for name, belongs_to in (
        ("recompute_method", "full"),
        ("recompute_num_layers", "full"),
        ("recompute_modules", "selective"),
    ):
        value = getattr(training, name)
        if value not in (None, ()) and granularity != belongs_to:
            got = f"{name} {' '.join(value) if isinstance(value, tuple) else value}"
            raise problem(
                f"{name} counts only with recompute_granularity {belongs_to}.",
                where=(name, "recompute_granularity"),
                got=f"{got}, recompute_granularity {granularity or 'not given'}",
                expected=f"{flag_of(name)} beside --recompute-granularity {belongs_to}",
                fix=f"use --recompute-granularity {belongs_to}, or leave {flag_of(name)} out",
            )
    if training.recompute_method == "block" and training.recompute_num_layers is None:
        raise problem(
            "Method block recomputes a given number of layers.",
            where=("recompute_num_layers", "recompute_method"),
            got="recompute_method block, recompute_num_layers not given",
            expected="the recomputed layers of each chunk of a pipeline stage",
            fix="add --recompute-num-layers, or use --recompute-method uniform, which recomputes all layers",
        )
    # Norms are computed again with the core anyhow, and the feed-forward part without the core saves little.
    if modules and not ("core_attn" in modules and set(modules) <= set(_RECOMPUTABLE)):
        raise problem(
            "These recompute_modules are not implemented yet.",
            where=("recompute_modules",),
            got=f"recompute_modules {' '.join(modules)}",
            expected="core_attn and beside it layernorm, mlp or neither",
            fix="use --recompute-modules core_attn, or leave it out",
        )


# --- precision and the sharded optimizer -------------------------------------------------------------------------


def _check_precision(config: Config) -> None:
    if config.training.bf16 and config.training.fp16:
        raise problem(
            "A run computes in one precision.",
            where=("bf16", "fp16"),
            got="bf16 and fp16",
            expected="one of the two, or neither for float32",
            fix="remove one; --no-bf16 and --no-fp16 take back what the YAML file says",
        )


def _check_loss_scale(config: Config) -> None:
    training = config.training
    if training.loss_scale is not None and not (training.fp16 or training.bf16):
        raise problem(
            "float32 needs no loss scale.",
            where=("loss_scale", "fp16", "bf16"),
            got=f"loss_scale {training.loss_scale}, neither fp16 nor bf16",
            expected="loss_scale beside fp16 or bf16",
            fix="leave --loss-scale out, or add --fp16",
        )
    if training.min_loss_scale > training.initial_loss_scale:
        raise problem(
            "The loss scale would start below its minimum.",
            where=("initial_loss_scale", "min_loss_scale"),
            got=f"initial_loss_scale {training.initial_loss_scale}, min_loss_scale {training.min_loss_scale}",
            expected="min_loss_scale of at most initial_loss_scale",
            fix="lower --min-loss-scale or raise --initial-loss-scale",
        )


def _check_param_gather(config: Config) -> None:
    parallel = config.parallel
    needed = ("use_distributed_optimizer", "overlap_grad_reduce")
    missing = [name for name in needed if not getattr(parallel, name)]
    if parallel.overlap_param_gather and missing:
        raise problem(
            "overlap_param_gather needs " + " and ".join(missing) + ".",
            where=("overlap_param_gather", *missing),
            got="overlap_param_gather, no " + " and no ".join(missing),
            expected=" and ".join(flag_of(name) for name in needed) + " beside --overlap-param-gather",
            fix="add " + " and ".join(flag_of(name) for name in missing) + ", or leave --overlap-param-gather out",
        )


# --- model -------------------------------------------------------------------------------------------------------


def _check_heads(config: Config) -> None:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads = model.num_attention_heads
    if heads % tp:
        raise problem(
            "The attention heads cannot be divided among the tensor-parallel devices.",
            where=("num_attention_heads", "tensor_model_parallel_size"),
            got=f"num_attention_heads {heads}, tensor_model_parallel_size {tp}",
            expected="num_attention_heads to be a multiple of tensor_model_parallel_size",
            fix=f"set --tensor-model-parallel-size to one of {_divisors(heads)}, "
            f"or --num-attention-heads to a multiple of {tp}",
        )
    if model.kv_channels is None and model.hidden_size % heads:
        raise problem(
            "The hidden size cannot be divided among the attention heads.",
            where=("hidden_size", "num_attention_heads", "kv_channels"),
            got=f"hidden_size {model.hidden_size}, num_attention_heads {heads}, no kv_channels",
            expected="hidden_size to be a multiple of num_attention_heads, or kv_channels to be given",
            fix=f"set --hidden-size to {_nearest_multiple(model.hidden_size, heads)}, or give --kv-channels",
        )


def _check_experts_used(config: Config) -> None:
    if config.model.num_experts is not None:
        return
    given = [
        name
        for name, option in options().items()
        if name.startswith("moe_") and getattr(config.model, name) != option.default
    ]
    # Sizes of 1 divide nothing: lines for dense models have them.
    sizes = ("expert_model_parallel_size", "expert_tensor_parallel_size")
    given += [name for name in sizes if (getattr(config.parallel, name) or 1) > 1]
    if given:
        raise problem(
            "Options of a mixture of experts are given to a dense model.",
            where=given,
            got=", ".join(f"{name} {dict(_values(config))[name]}" for name in given) + ", no num_experts",
            expected="num_experts to be given as well",
            fix=f"give --num-experts, or leave {', '.join(flag_of(name) for name in given)} out",
        )


def _check_experts(config: Config) -> None:
    experts, ep = config.model.num_experts, config.parallel.expert_model_parallel_size
    if experts is None:
        return
    if experts % ep:
        raise problem(
            "The experts cannot be divided among the expert-parallel devices.",
            where=("num_experts", "expert_model_parallel_size"),
            got=f"num_experts {experts}, expert_model_parallel_size {ep}",
            expected="num_experts to be a multiple of expert_model_parallel_size",
            fix=f"set --expert-model-parallel-size to one of {_divisors(experts)}",
        )
    moe_places(config)
    if config.parallel.tensor_model_parallel_size > 1:
        local = config.model.seq_length // config.parallel.context_parallel_size
        if local % config.parallel.tensor_model_parallel_size:
            raise problem(
                "The tokens of a sequence cannot be divided among the tensor-parallel devices, each routing a part.",
                where=("seq_length", "tensor_model_parallel_size", "context_parallel_size"),
                got=f"seq_length {config.model.seq_length}, context_parallel_size "
                f"{config.parallel.context_parallel_size}, tensor_model_parallel_size "
                f"{config.parallel.tensor_model_parallel_size}",
                expected="seq_length / context_parallel_size to be a multiple of tensor_model_parallel_size",
                fix="change --seq-length or --tensor-model-parallel-size",
            )


def _check_expert_tensor_parallel(config: Config) -> None:
    size, tp = config.parallel.expert_tensor_parallel_size, config.parallel.tensor_model_parallel_size
    if size is not None and size not in (1, tp):
        raise problem(
            "Experts can be divided over all tensor-parallel devices, or over none.",
            where=("expert_tensor_parallel_size", "tensor_model_parallel_size"),
            got=f"expert_tensor_parallel_size {size}, tensor_model_parallel_size {tp}",
            expected=f"1{f' or {tp}' if tp > 1 else ''}",
            fix=f"set --expert-tensor-parallel-size to {tp}, or leave it out",
        )
    model = resolve(config).model
    width = model.moe_ffn_hidden_size
    if model.num_experts is not None and width is not None and (size or tp) > 1 and width % tp:
        raise problem(
            "The width of an expert cannot be divided among the tensor-parallel devices.",
            where=("moe_ffn_hidden_size", "tensor_model_parallel_size", "expert_tensor_parallel_size"),
            got=f"moe_ffn_hidden_size {width}, tensor_model_parallel_size {tp}",
            expected="moe_ffn_hidden_size to be a multiple of tensor_model_parallel_size",
            fix=f"set --moe-ffn-hidden-size to {_nearest_multiple(width, tp)}, or --expert-tensor-parallel-size 1",
        )
    shared = model.moe_shared_expert_intermediate_size
    if shared is not None and shared % tp:
        raise problem(
            "The width of the shared expert cannot be divided among the tensor-parallel devices.",
            where=("moe_shared_expert_intermediate_size", "tensor_model_parallel_size"),
            got=f"moe_shared_expert_intermediate_size {shared}, tensor_model_parallel_size {tp}",
            expected="a multiple of tensor_model_parallel_size",
            fix=f"set --moe-shared-expert-intermediate-size to {_nearest_multiple(shared, tp)}",
        )


def _check_router(config: Config) -> None:
    model = config.model
    if model.num_experts is None:
        return
    if model.moe_router_topk > model.num_experts:
        raise problem(
            "A token cannot have more experts than there are.",
            where=("moe_router_topk", "num_experts"),
            got=f"moe_router_topk {model.moe_router_topk}, num_experts {model.num_experts}",
            expected="moe_router_topk of at most num_experts",
            fix=f"set --moe-router-topk to {model.num_experts} or less"
            + (", with --moe-router-pre-softmax" if model.num_experts == 1 else ""),
        )
    softmax = model.moe_router_score_function == "softmax"
    if model.moe_router_topk == 1 and softmax and not model.moe_router_pre_softmax:
        raise problem(
            "The router would learn nothing: the softmax over a single expert is 1 whatever its logit is.",
            where=("moe_router_topk", "moe_router_pre_softmax"),
            got="moe_router_topk 1 without moe_router_pre_softmax",
            expected="moe_router_pre_softmax with moe_router_topk 1",
            fix="add --moe-router-pre-softmax, or use --moe-router-score-function sigmoid",
        )
    if model.moe_router_enable_expert_bias and softmax:
        raise problem(
            "The bias of experts is added to sigmoids only.",
            where=("moe_router_enable_expert_bias", "moe_router_score_function"),
            got="moe_router_enable_expert_bias with moe_router_score_function softmax",
            expected="moe_router_score_function sigmoid",
            fix="add --moe-router-score-function sigmoid, or leave --moe-router-enable-expert-bias out",
        )


def _check_router_used(config: Config) -> None:
    """Checks that no option of the router is given whose effect another one takes away."""
    model = config.model
    if model.num_experts is None:
        return
    rate = model.moe_router_bias_update_rate
    if not model.moe_router_enable_expert_bias and rate != options()["moe_router_bias_update_rate"].default:
        raise problem(
            "There is no bias of experts to update.",
            where=("moe_router_bias_update_rate", "moe_router_enable_expert_bias"),
            got=f"moe_router_bias_update_rate {rate} without moe_router_enable_expert_bias",
            expected="moe_router_enable_expert_bias beside a rate of its own",
            fix="add --moe-router-enable-expert-bias, or leave --moe-router-bias-update-rate out",
        )
    if model.moe_router_pre_softmax and model.moe_router_score_function != "softmax":
        raise problem(
            "There is no softmax that could come before the choice of experts.",
            where=("moe_router_pre_softmax", "moe_router_score_function"),
            got=f"moe_router_pre_softmax with moe_router_score_function {model.moe_router_score_function}",
            expected="moe_router_score_function softmax",
            fix="leave --moe-router-pre-softmax out, or use --moe-router-score-function softmax",
        )
    if model.moe_router_load_balancing_type == "none" and model.moe_aux_loss_coeff:
        raise problem(
            "There is no auxiliary loss to weigh.",
            where=("moe_router_load_balancing_type", "moe_aux_loss_coeff"),
            got=f"moe_router_load_balancing_type none with moe_aux_loss_coeff {model.moe_aux_loss_coeff}",
            expected="moe_aux_loss_coeff 0, or another moe_router_load_balancing_type",
            fix="set --moe-aux-loss-coeff 0, or choose aux_loss, seq_aux_loss or global_aux_loss",
        )


def _check_router_groups(config: Config) -> None:
    model = config.model
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    if model.num_experts is None or (groups is None and chosen is None):
        return
    fits = groups is not None and chosen is not None and chosen <= groups and model.num_experts % groups == 0
    if fits:
        assert groups is not None and chosen is not None
        each, left = divmod(model.moe_router_topk, chosen)
        fits = not left and each <= model.num_experts // groups
    if not fits:
        raise problem(
            "The groups of experts do not fit.",
            where=("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk", "num_experts"),
            got=f"moe_router_num_groups {groups}, moe_router_group_topk {chosen}, moe_router_topk "
            f"{model.moe_router_topk}, num_experts {model.num_experts}",
            expected="both given, groups that divide the experts, and a moe_router_group_topk of at most the groups "
            "that divides moe_router_topk into no more than the experts of a group",
            fix="change them so that they do, or leave --moe-router-num-groups and --moe-router-group-topk out",
        )


def _check_capacity(config: Config) -> None:
    model = config.model
    if model.num_experts is None or model.moe_expert_capacity_factor is not None:
        return
    given = [
        name
        for name in ("moe_pad_expert_input_to_capacity", "moe_token_drop_policy")
        if getattr(model, name) != options()[name].default
    ]
    if given:
        raise problem(
            "Without a capacity no token is dropped and nothing padded.",
            where=(*given, "moe_expert_capacity_factor"),
            got=f"{', '.join(given)}, no moe_expert_capacity_factor",
            expected="moe_expert_capacity_factor to be given as well",
            fix=f"give --moe-expert-capacity-factor, or leave {', '.join(flag_of(name) for name in given)} out",
        )


def _check_query_groups(config: Config) -> None:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    groups, heads = resolve(config).model.num_query_groups, model.num_attention_heads
    assert groups is not None
    names = ("num_query_groups", "num_attention_heads", "group_query_attention")
    got = f"num_query_groups {groups}, num_attention_heads {heads}"
    if not model.group_query_attention and groups != heads:
        raise problem(
            "num_query_groups counts only with grouped-query attention.",
            where=names,
            got=got + ", group_query_attention false",
            expected="--group-query-attention beside --num-query-groups",
            fix="add --group-query-attention, or leave --num-query-groups out",
        )
    if heads % groups:
        raise problem(
            "The attention heads cannot be divided among the query groups.",
            where=names[:2],
            got=got,
            expected="num_attention_heads to be a multiple of num_query_groups",
            fix=f"set --num-query-groups to one of {_divisors(heads)}",
        )
    if groups % tp and tp % groups:
        raise problem(
            "The key/value heads fit the tensor-parallel devices neither divided nor repeated.",
            where=("num_query_groups", "tensor_model_parallel_size"),
            got=f"num_query_groups {groups}, tensor_model_parallel_size {tp}",
            expected="one of the two to be a multiple of the other (fewer key/value heads than devices are repeated)",
            fix=f"set --tensor-model-parallel-size to one of {_divisors(groups)}, or to a multiple of {groups}",
        )


def _check_widths(config: Config) -> None:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    ffn = resolve(config).model.ffn_hidden_size
    assert ffn is not None
    if ffn <= 0:
        # The reference's rounding to a multiple of 64 leaves nothing of a very small swiglu layer.
        raise problem(
            "The derived width of the feed-forward layer is 0.",
            where=("ffn_hidden_size", "hidden_size"),
            got=f"hidden_size {model.hidden_size} with swiglu",
            expected="a positive ffn_hidden_size",
            fix=f"give --ffn-hidden-size, for instance {4 * model.hidden_size}",
        )
    if ffn % tp and not (model.num_experts is not None and all(moe_layers(model))):
        raise problem(
            "The feed-forward layer cannot be divided among the tensor-parallel devices.",
            where=("ffn_hidden_size", "tensor_model_parallel_size"),
            got=f"ffn_hidden_size {ffn}{'' if model.ffn_hidden_size else ' (derived)'}, "
            f"tensor_model_parallel_size {tp}",
            expected="ffn_hidden_size to be a multiple of tensor_model_parallel_size",
            fix=f"set --ffn-hidden-size to {_nearest_multiple(ffn, tp)}, or lower --tensor-model-parallel-size",
        )


def _check_positions(config: Config) -> None:
    model = config.model
    rows = model.max_position_embeddings
    learned = model.position_embedding_type == "learned_absolute"
    if (rows is None and learned) or (rows is not None and rows < model.seq_length):
        raise problem(
            "The positions do not cover the sequence.",
            where=("max_position_embeddings", "seq_length", "position_embedding_type"),
            got=f"max_position_embeddings {'not given' if rows is None else rows}, seq_length {model.seq_length}, "
            f"position_embedding_type {model.position_embedding_type}",
            expected="max_position_embeddings of at least seq_length; learned positions need it given",
            fix=f"set --max-position-embeddings {model.seq_length}",
        )


def _check_rotary(config: Config) -> None:
    model = config.model
    if model.position_embedding_type != "rope":
        return
    channels = resolve(config).model.kv_channels
    assert channels is not None
    rotated = int(channels * model.rotary_percent)
    if rotated < 2 or rotated % 2:
        raise problem(
            "Rotary positions need an even number of channels.",
            where=("kv_channels", "rotary_percent"),
            got=f"int({channels} channels a head * {model.rotary_percent}) = {rotated}",
            expected="an even number, at least 2",
            fix="change --rotary-percent, --kv-channels, or --hidden-size and --num-attention-heads",
        )


def _check_rope_scaling(config: Config) -> None:
    model = config.model
    if model.use_rope_scaling and model.position_embedding_type != "rope":
        raise problem(
            "There are no rotary positions to be scaled.",
            where=("use_rope_scaling", "position_embedding_type"),
            got=f"use_rope_scaling, position_embedding_type {model.position_embedding_type}",
            expected="--position-embedding-type rope beside --use-rope-scaling",
            fix="add --position-embedding-type rope, or leave --use-rope-scaling out",
        )


def _check_window(config: Config) -> None:
    attention_window(config.model)


def _check_sequence_parallel(config: Config) -> None:
    parallel, length = config.parallel, config.model.seq_length
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if parallel.sequence_parallel and tp > 1 and length % (tp * cp):
        sizes = {"tensor_model_parallel_size": tp, **({"context_parallel_size": cp} if cp > 1 else {})}
        raise problem(
            "The sequence cannot be divided among the tensor-parallel devices.",
            where=("seq_length", *sizes, "sequence_parallel"),
            got=f"seq_length {length}, {', '.join(f'{name} {size}' for name, size in sizes.items())}, "
            "sequence_parallel true",
            expected=f"seq_length to be a multiple of {' * '.join(sizes)} = {tp * cp}",
            fix=f"set --seq-length to {_nearest_multiple(length, _parts_of_sequence(config))}, or write "
            "--no-sequence-parallel",
        )


# --- context parallelism -----------------------------------------------------------------------------------------

_COMM_TYPES = ("p2p", "all_gather", "a2a")


def _parts_of_sequence(config: Config) -> int:
    """Returns what the sequence's length must be a multiple of."""
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    cp = parallel.context_parallel_size
    return tp if cp == 1 else cp * math.lcm(2, tp)


def _check_context_parallel(config: Config) -> None:
    cp, length = config.parallel.context_parallel_size, config.model.seq_length
    if cp > 1 and length % (2 * cp):
        raise problem(
            "The sequence cannot be divided among the context-parallel devices, which hold an early and a late part.",
            where=("seq_length", "context_parallel_size"),
            got=f"seq_length {length}, context_parallel_size {cp}",
            expected=f"seq_length to be a multiple of 2 * context_parallel_size = {2 * cp}",
            fix=f"set --seq-length to {_nearest_multiple(length, _parts_of_sequence(config))}, or change "
            "--context-parallel-size",
        )


def _check_comm_type(config: Config) -> None:
    types, layers = config.parallel.cp_comm_type, config.model.num_layers
    wrong = [name for name in types if name not in _COMM_TYPES]
    if wrong:
        reason = "; a2a+p2p, which nests one in the other, is not implemented" if "a2a+p2p" in wrong else ""
        raise problem(
            "cp_comm_type is unknown.",
            where=("cp_comm_type",),
            got=" ".join(wrong),
            expected=f"{', '.join(_COMM_TYPES)}{reason}",
            fix="use --cp-comm-type " + " or ".join(_COMM_TYPES),
        )
    if len(types) not in (1, layers):
        raise problem(
            "cp_comm_type has the wrong number of values.",
            where=("cp_comm_type", "num_layers"),
            got=f"{len(types)} values of cp_comm_type, num_layers {layers}",
            expected=f"one value, or {layers}: one for each layer",
            fix="give one value, or one for each layer",
        )
    if config.parallel.context_parallel_size > 1 and len(types) > 1:
        cp_comm_types(config)


def _check_heads_of_a2a(config: Config) -> None:
    parallel, model = config.parallel, resolve(config).model
    cp, tp, groups = parallel.context_parallel_size, parallel.tensor_model_parallel_size, model.num_query_groups
    assert groups is not None
    own = max(1, groups // tp)  # divides the query heads of a device
    if "a2a" in parallel.cp_comm_type and own % cp:
        raise problem(
            "The key/value heads of a tensor-parallel device cannot be divided among the context-parallel devices.",
            where=(
                "cp_comm_type",
                "num_attention_heads",
                "num_query_groups",
                "tensor_model_parallel_size",
                "context_parallel_size",
            ),
            got=f"cp_comm_type a2a, num_attention_heads {model.num_attention_heads}, num_query_groups {groups}, "
            f"tensor_model_parallel_size {tp} ({model.num_attention_heads // tp} query and {own} key/value heads a "
            f"device), context_parallel_size {cp}",
            expected="the heads and the key/value heads of a device to be multiples of context_parallel_size",
            fix="use --cp-comm-type p2p or all_gather"
            + (f", or set --context-parallel-size to one of {_divisors(own)}" if own > 1 else ""),
        )


def _check_vocab(config: Config) -> None:
    padded, parallel = config.model.padded_vocab_size, config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if padded is not None and padded % (tp * pp):
        raise problem(
            "The padded vocabulary cannot be divided among the tensor- and pipeline-parallel devices.",
            where=("padded_vocab_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
            got=f"padded_vocab_size {padded}, tensor_model_parallel_size {tp}, pipeline_model_parallel_size {pp}",
            expected=f"padded_vocab_size to be a multiple of {tp} * {pp} = {tp * pp}",
            fix=f"set --padded-vocab-size to {-(-padded // (tp * pp)) * tp * pp}",
        )
    resolve(config)  # refuses a padding below the vocabulary


# --- optimizer ---------------------------------------------------------------------------------------------------


def _check_learning_rate(config: Config) -> None:
    optimizer = config.optimizer
    for name, value in (("min_lr", optimizer.min_lr), ("lr_warmup_init", optimizer.lr_warmup_init)):
        if value > optimizer.lr:
            raise problem(
                f"{name} is above the highest learning rate.",
                where=("lr", name),
                got=f"lr {optimizer.lr}, {name} {value}",
                expected=f"{name} of at most lr",
                fix=f"lower {flag_of(name)} or raise --lr",
            )


def _check_decoupled_rate(config: Config) -> None:
    optimizer = config.optimizer
    rate, minimum = optimizer.decoupled_lr, optimizer.decoupled_min_lr
    if rate is None and minimum is not None:
        raise problem(
            "decoupled_min_lr counts only with decoupled_lr.",
            where=("decoupled_min_lr", "decoupled_lr"),
            got=f"decoupled_min_lr {minimum}, no decoupled_lr",
            expected="--decoupled-lr beside --decoupled-min-lr",
            fix="add --decoupled-lr, or leave --decoupled-min-lr out",
        )
    for name, value in (("decoupled_min_lr", minimum), ("lr_warmup_init", optimizer.lr_warmup_init)):
        if rate is not None and value is not None and value > rate:
            raise problem(
                f"{name} is above the highest learning rate of embedding and output layer.",
                where=("decoupled_lr", name),
                got=f"decoupled_lr {rate}, {name} {value}",
                expected=f"{name} of at most decoupled_lr",
                fix=f"lower {flag_of(name)} or raise --decoupled-lr",
            )


# What a run counted in iterations must not say in samples, and the other way round.
_LENGTHS = ("lr_decay", "lr_warmup", "lr_wsd_decay")


def _unit(config: Config) -> str:
    """Returns what the run is counted in: iters or samples."""
    return "iters" if config.training.train_samples is None else "samples"


def _check_units(config: Config) -> None:
    unit = _unit(config)
    other = "samples" if unit == "iters" else "iters"
    for length in _LENGTHS:
        name = f"{length}_{other}"
        if getattr(config.optimizer, name):
            raise problem(
                f"The run is counted in {unit}, and this length in {other}.",
                where=(name, f"train_{unit}"),
                got=f"{name} {getattr(config.optimizer, name)}, "
                f"train_{unit} {getattr(config.training, f'train_{unit}')}",
                expected=f"all lengths in {unit}, or --train-{other}",
                fix=f"write {flag_of(f'{length}_{unit}')} instead",
            )


def _check_warmup(config: Config) -> None:
    optimizer, unit = config.optimizer, _unit(config)
    warmup_name, decay_name = f"lr_warmup_{unit}", f"lr_decay_{unit}"
    warmup, decay = getattr(optimizer, warmup_name), getattr(resolve(config).optimizer, decay_name)
    if optimizer.lr_warmup_fraction is not None and warmup:
        raise problem(
            "The warm-up is given twice.",
            where=("lr_warmup_fraction", warmup_name),
            got=f"lr_warmup_fraction {optimizer.lr_warmup_fraction}, {warmup_name} {warmup}",
            expected="one of the two",
            fix=f"remove one; {flag_of(warmup_name)} 0 or --lr-warmup-fraction null takes back what the YAML file says",
        )
    if warmup >= decay:
        derived = "" if getattr(optimizer, decay_name) else f" (derived from train_{unit})"
        raise problem(
            "The warm-up is as long as the decay that contains it.",
            where=(warmup_name, decay_name, f"train_{unit}"),
            got=f"{warmup_name} {warmup}, {decay_name} {decay}{derived}",
            expected=f"{warmup_name} below {decay_name}",
            fix=f"set {flag_of(warmup_name)} to {decay - 1} or less, or raise {flag_of(decay_name)}",
        )


def _check_wsd(config: Config) -> None:
    optimizer, name = config.optimizer, f"lr_wsd_decay_{_unit(config)}"
    if optimizer.lr_decay_style == "WSD" and getattr(optimizer, name) is None:
        raise problem(
            "WSD needs the length of its last phase.",
            where=("lr_decay_style", name),
            got=f"lr_decay_style WSD, no {name}",
            expected=f"{flag_of(name)} beside --lr-decay-style WSD",
            fix=f"add {flag_of(name)}, often a tenth of the run, or choose another --lr-decay-style",
        )


def _check_weight_decay(config: Config) -> None:
    optimizer = config.optimizer
    start, end, style = optimizer.start_weight_decay, optimizer.end_weight_decay, optimizer.weight_decay_incr_style
    names = ("weight_decay_incr_style", "start_weight_decay", "end_weight_decay")
    got = f"weight_decay_incr_style {style}, start_weight_decay {start}, end_weight_decay {end}"
    if style == "constant" and (start, end) != (None, None):
        raise problem(
            "Constant weight decay has neither start nor end.",
            where=names,
            got=got,
            expected="--weight-decay alone, or a growing style with start and end",
            fix="give --weight-decay instead of them, or --weight-decay-incr-style linear or cosine",
        )
    if style != "constant" and (start is None or end is None or start > end):
        raise problem(
            "Growing weight decay needs a start and an end that is not below it.",
            where=names,
            got=got,
            expected="0 <= start_weight_decay <= end_weight_decay",
            fix="give --start-weight-decay and --end-weight-decay, or --weight-decay-incr-style constant",
        )


def _check_duration(config: Config) -> None:
    """A resolved config has both lengths; they must then say the same."""
    training = config.training
    iters, samples, batch = training.train_iters, training.train_samples, training.global_batch_size
    names = ("train_iters", "train_samples")
    if iters is None and samples is None:
        raise problem(
            "The length of the run is missing.",
            where=names,
            got="neither",
            expected="one of the two",
            fix="give --train-iters, or --train-samples",
        )
    if iters is not None and samples is not None and (batch is None or samples // batch != iters):
        raise problem(
            "The length of the run is given twice.",
            where=names,
            got=f"train_iters {iters}, train_samples {samples}",
            expected="one of the two",
            fix="remove one; --train-iters null or --train-samples null takes back what the YAML file says",
        )


# --- data and batches --------------------------------------------------------------------------------------------


def _check_data_source(config: Config) -> None:
    data = config.data
    given = [name for name in DATA_SOURCES if getattr(data, name)]
    if len(given) != 1:
        raise problem(
            "Exactly one source of data is needed.",
            where=DATA_SOURCES,
            got=" and ".join(given) if given else "none",
            expected="one of --data-path PREFIX, --mock-data, --demo-data",
            fix="remove all but one; --no-demo-data and --no-mock-data take back what the YAML file says"
            if given
            else "add --demo-data to train on text that needs no download, or --data-path PREFIX",
        )


def _check_tokenizer(config: Config) -> None:
    data = config.data
    needs = {
        "HuggingFaceTokenizer": ("tokenizer_model", data.tokenizer_model),
        "SentencePieceTokenizer": ("tokenizer_model", data.tokenizer_model),
        "TikTokenizer": ("tokenizer_model", data.tokenizer_model),
        "GPT2BPETokenizer": ("vocab_file and merge_file", data.vocab_file and data.merge_file),
        "NullTokenizer": ("vocab_size", config.model.vocab_size),
    }
    names, value = needs.get(data.tokenizer_type, ("", True))
    if not value:
        flags = " and ".join(flag_of(name) for name in names.split(" and "))
        raise problem(
            "The tokenizer lacks what it is made of.",
            where=("tokenizer_type", *names.split(" and ")),
            got=f"{data.tokenizer_type}, no {names}",
            expected=f"{flags} to be given as well",
            fix=f"give {flags}, or use --tokenizer-type ByteTokenizer",
        )


def _check_tokenizer_model(config: Config) -> None:
    data = config.data
    if data.tokenizer_model and data.tokenizer_type in ("ByteTokenizer", "NullTokenizer", "GPT2BPETokenizer"):
        raise problem(
            "The tokenizer does not read a model file.",
            where=("tokenizer_type", "tokenizer_model"),
            got=f"{data.tokenizer_type}, tokenizer_model {data.tokenizer_model}",
            expected="a tokenizer_type that reads it",
            fix="add --tokenizer-type HuggingFaceTokenizer for a tokenizer.json, or leave --tokenizer-model out",
        )


def _check_sft(config: Config) -> None:
    data = config.data
    if data.sft and len(data.data_path) != 1:
        raise problem(
            "Fine-tuning on conversations reads one file.",
            where=("sft", "data_path"),
            got=f"sft, data_path {' '.join(data.data_path) or 'not given'}",
            expected="--data-path FILE.jsonl, one file of conversations",
            fix="give one --data-path, or leave --sft out",
        )


def _check_split_sources(config: Config) -> None:
    data = config.data
    companions = [name for name in ("valid_data_path", "test_data_path") if getattr(data, name)]
    if companions and not data.train_data_path:
        raise problem(
            "There are corpora of their own for a part, but none for training.",
            where=("train_data_path", *companions),
            got=" and ".join(companions) + ", no train_data_path",
            expected="--train-data-path beside --valid-data-path and --test-data-path",
            fix="add --train-data-path, or give one --data-path and --split",
        )
    if data.split is not None and (data.train_data_path or data.per_split_data_args_path):
        raise problem(
            "Corpora that are given for each part are not divided.",
            where=("split", "train_data_path", "per_split_data_args_path"),
            got=f"split {data.split} and corpora for each part",
            expected="one of the two",
            fix="leave --split out, or give one --data-path",
        )


def _check_split(config: Config) -> None:
    split = config.data.split
    if split is None:
        return
    try:
        shares = [float(part) for part in split.split(",")]
    except ValueError:
        shares = []
    fine = 1 <= len(shares) <= 3 and all(math.isfinite(share) and share >= 0 for share in shares)
    if not fine or shares[0] == 0:
        raise problem(
            "The split cannot be read.",
            where=("split",),
            got=repr(split),
            expected="one to three numbers of at least 0 (training, validation, test), the first above 0",
            fix="write for instance --split 969,30,1",
        )


def _check_batch(config: Config) -> None:
    micro, batch = config.training.micro_batch_size, config.training.global_batch_size
    if batch is not None and batch % micro:
        raise problem(
            "The global batch cannot be divided into micro-batches.",
            where=("global_batch_size", "micro_batch_size"),
            got=f"global_batch_size {batch}, micro_batch_size {micro}",
            expected="global_batch_size to be a multiple of micro_batch_size times the data-parallel size",
            fix=f"set --global-batch-size to {_nearest_multiple(batch, micro)}, or change --micro-batch-size",
        )
    hardware = config.hardware
    if config.parallel.auto_parallel:
        return  # the planner looks for degrees that fit the devices
    if hardware.dry_run:
        validate_for_devices(config, hardware.num_gpus or math.prod(_degrees(config).values()))
    elif hardware.num_cpu_devices is not None:
        validate_for_devices(config, hardware.num_cpu_devices * (hardware.num_processes or 1))


def _check_dry_run(config: Config) -> None:
    hardware = config.hardware
    if not hardware.dry_run:
        for name in ("num_gpus", "report", "assumed_tflops"):
            if getattr(hardware, name) is not None:
                raise problem(
                    f"{name} is an option of a dry run.",
                    where=(name, "dry_run"),
                    got=f"{name} {getattr(hardware, name)}, no dry_run",
                    expected="dry_run to be given as well",
                    fix=f"add --dry-run, or remove {flag_of(name)}",
                )
        return
    num_gpus, node = hardware.num_gpus, hardware.gpus_per_node
    if num_gpus is not None and num_gpus > node and num_gpus % node:
        raise problem(
            "The GPUs do not make whole nodes.",
            where=("num_gpus", "gpus_per_node"),
            got=f"num_gpus {num_gpus}, gpus_per_node {node}",
            expected="num_gpus to be a multiple of gpus_per_node, or less",
            fix=f"set --num-gpus to {_nearest_multiple(num_gpus, node)}, or change --gpus-per-node",
        )


# --- outputs -----------------------------------------------------------------------------------------------------


_NEED_SAVE = ("save_interval", "save_interval_minutes", "keep_latest")
_NEED_LOAD = ("ckpt_step", "no_load_optim", "finetune")


def _check_outputs(config: Config) -> None:
    checkpoint = config.checkpoint
    for name, needs, value, other in (
        *((name, "save", getattr(checkpoint, name), checkpoint.save) for name in _NEED_SAVE),
        *((name, "load", getattr(checkpoint, name), checkpoint.load) for name in _NEED_LOAD),
        ("keep_every", "keep_latest", checkpoint.keep_every, checkpoint.keep_latest),
        ("wandb_exp_name", "wandb_project", config.logging.wandb_exp_name, config.logging.wandb_project),
    ):
        if value is not None and value is not False and not other:
            raise problem(
                f"{name} needs {needs}.",
                where=(name, needs),
                got=f"{name} {value}, no {needs}",
                expected=f"{needs} to be given as well",
                fix=f"add {flag_of(needs)}, or remove {flag_of(name)}",
            )


def _check_profile(config: Config) -> None:
    logging = config.logging
    if logging.profile and logging.profile_step_end <= logging.profile_step_start:
        raise problem(
            "The trace would end before it starts.",
            where=("profile_step_start", "profile_step_end"),
            got=f"profile_step_start {logging.profile_step_start}, profile_step_end {logging.profile_step_end}",
            expected="profile_step_end above profile_step_start",
            fix=f"set --profile-step-end to {logging.profile_step_start + 2}",
        )
