"""Fills in the options that follow from others (no communication).

Reference: the derived values of `validate_args` in `megatron/training/arguments.py`; the vocabulary's padding is that
of `megatron/training/vocab_utils.py`.
"""

import ast
import dataclasses
import math
import re
from collections.abc import Sequence

from jmegatron.config.layer_split import layer_split_of, layers_at_places, num_chunks_of
from jmegatron.config.options import problem
from jmegatron.config.sections import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PipelineSchedule,
    TrainingConfig,
)

DEFAULT_SPLIT = "969,30,1"


def padded_vocab_size(
    vocab_size: int, divisible_by: int, tensor_parallel_size: int, pipeline_parallel_size: int = 1
) -> int:
    """Returns the smallest number of rows that holds the vocabulary and that the devices can share.

    It is a multiple of `divisible_by * tensor_parallel_size`, as in the reference, and of the number of tensor- and
    pipeline-parallel devices, over which embedding and output layer are divided. With a `divisible_by` of 128 the
    second changes nothing for 2, 4, ... 128 stages.
    """
    multiple = tensor_parallel_size * math.lcm(divisible_by, pipeline_parallel_size)
    return -(-vocab_size // multiple) * multiple


def resolve(config: Config, vocab_size: int | None = None, data_parallel_size: int | None = None) -> Config:
    """Returns the config with every derived option filled in; what is set already stays.

    `resolve(resolve(c)) == resolve(c)`, so a printed config reads back as the same one.

    Args:
        config: A config that passed `validate`.
        vocab_size: The tokenizer's number of ids, once it is known. Without it and without `model.vocab_size`, the
            vocabulary's size and padding stay `None`.
        data_parallel_size: Replicas of the model, once the devices are known. Without it, a `global_batch_size` that
            was not given stays `None`.

    Raises:
        ConfigError: The tokenizer has more ids than `model.vocab_size` or `model.padded_vocab_size` have room for, the
            layers do not fit the pipeline, or `train_samples` is less than a batch.
    """
    training, optimizer = _resolve_nan_check(_resolve_recompute(config.training)), config.optimizer
    batch = training.global_batch_size
    if batch is None and data_parallel_size is not None:
        batch = training.micro_batch_size * data_parallel_size
    training = _resolve_duration(dataclasses.replace(training, global_batch_size=batch))
    return dataclasses.replace(
        config,
        model=_resolve_model(config, vocab_size),
        parallel=_resolve_parallel(config),
        data=_resolve_data(config.data),
        optimizer=_resolve_decay(optimizer, training),
        training=training,
    )


def _resolve_parallel(config: Config) -> ParallelConfig:
    """Returns the parallel section with the schedule that the chunks ask for, and the division of experts over tp."""
    parallel = config.parallel
    several = num_chunks_of(layer_split_of(config)) > 1
    derived: PipelineSchedule = "interleaved" if several else "1f1b"
    experts = parallel.expert_tensor_parallel_size
    if config.model.num_experts is not None and not parallel.auto_parallel:
        experts = experts or parallel.tensor_model_parallel_size
    return dataclasses.replace(
        parallel, pipeline_schedule=parallel.pipeline_schedule or derived, expert_tensor_parallel_size=experts
    )


def _resolve_duration(training: TrainingConfig) -> TrainingConfig:
    """Returns the training section with the iterations that a number of samples makes, once the batch is known."""
    samples, batch = training.train_samples, training.global_batch_size
    if samples is None or batch is None:
        return training
    if samples < batch:
        raise problem(
            "The run is shorter than one global batch.",
            where=("train_samples", "global_batch_size"),
            got=f"train_samples {samples}, global_batch_size {batch}",
            expected="train_samples of at least global_batch_size",
            fix=f"set --train-samples to {batch} or more, or lower --global-batch-size",
        )
    return dataclasses.replace(training, train_iters=samples // batch)


def _resolve_decay(optimizer: OptimizerConfig, training: TrainingConfig) -> OptimizerConfig:
    """Returns the optimizer section with the length of the decay, in what the run is counted in."""
    if training.train_samples is not None:
        return dataclasses.replace(optimizer, lr_decay_samples=optimizer.lr_decay_samples or training.train_samples)
    return dataclasses.replace(optimizer, lr_decay_iters=optimizer.lr_decay_iters or training.train_iters)


def _resolve_recompute(training: TrainingConfig) -> TrainingConfig:
    """Returns the training section with what the granularity of recomputation leaves open."""
    if training.recompute_granularity == "full":
        return dataclasses.replace(
            training,
            recompute_method=training.recompute_method or "uniform",
            recompute_num_layers=training.recompute_num_layers or 1,
        )
    if training.recompute_granularity == "selective":
        return dataclasses.replace(training, recompute_modules=training.recompute_modules or ("core_attn",))
    return training


def _resolve_nan_check(training: TrainingConfig) -> TrainingConfig:
    """Returns the training section without the check for NaN where steps that have one are skipped anyway."""
    skips = training.fp16 and training.loss_scale is None
    return dataclasses.replace(
        training, check_for_nan_in_loss_and_grad=training.check_for_nan_in_loss_and_grad and not skips
    )


def _resolve_data(data: DataConfig) -> DataConfig:
    """Returns the data section with the split that one corpus or blend is divided by; conversations stay apart."""
    if data.sft:
        data = dataclasses.replace(data, reset_position_ids=True, reset_attention_mask=True)
    if data.train_data_path or data.per_split_data_args_path:
        return data
    return dataclasses.replace(data, split=data.split or DEFAULT_SPLIT)


def _resolve_model(config: Config, tokenizer_vocab_size: int | None) -> ModelConfig:
    """Returns the model section without derived `None`s."""
    model = config.model
    activation = model.activation or ("gelu_erf" if model.disable_bias_linear else "gelu_tanh")
    groups = model.num_query_groups or (1 if model.group_query_attention else model.num_attention_heads)
    vocab, padded = _resolve_vocab(config, tokenizer_vocab_size)
    ffn_hidden_size = model.ffn_hidden_size or default_ffn_hidden_size(model.hidden_size, activation)
    experts_width = None if model.num_experts is None else model.moe_ffn_hidden_size or ffn_hidden_size
    return dataclasses.replace(
        model,
        activation=activation,
        ffn_hidden_size=ffn_hidden_size,
        moe_ffn_hidden_size=experts_width,
        num_query_groups=groups,
        kv_channels=model.kv_channels or model.hidden_size // model.num_attention_heads,
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        vocab_size=vocab,
        padded_vocab_size=padded,
    )


def default_ffn_hidden_size(hidden_size: int, activation: str) -> int:
    """Returns the reference's default width of the feed-forward layer.

    Only swiglu is narrowed there, to keep its three matrices near the size of the usual two.
    """
    return int(4 * hidden_size * 2 / 3) // 64 * 64 if activation == "swiglu" else 4 * hidden_size


def moe_layers(model: ModelConfig) -> tuple[bool, ...]:
    """Returns which layers are mixtures of experts.

    Raises:
        ConfigError: `moe_layer_freq` cannot be read, or is for another number of layers.
    """
    if model.num_experts is None:
        return (False,) * model.num_layers
    text = "1" if model.moe_layer_freq is None else model.moe_layer_freq.strip()
    pattern: list[int] | int | None = None
    try:
        pattern = _pattern(ast.parse(text[:10000], mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pattern = None
    if isinstance(pattern, int):
        pattern = [int(layer % pattern == 0) for layer in range(model.num_layers)] if pattern > 0 else None
    if pattern is None or len(pattern) != model.num_layers or not set(pattern) <= {0, 1} or 1 not in pattern:
        raise problem(
            "It cannot be told which layers have experts.",
            where=("moe_layer_freq", "num_layers"),
            got=f"{text[:200]!r}, num_layers {model.num_layers}",
            expected="a number from 1 on, or a list with 1 (experts) or 0 for each layer and at least one 1, with + and"
            " * to join and repeat",
            fix="write for instance --moe-layer-freq 2, or "
            f"--moe-layer-freq '[0]*1+[1]*{max(1, model.num_layers - 1)}'",
        )
    return tuple(bool(one) for one in pattern)


def moe_places(config: Config) -> tuple[bool, ...]:
    """Returns which of the layers that stand first, second, ... in a chunk are mixtures of experts.

    Raises:
        ConfigError: Layers that one program runs differ, or the layers do not fit the pipeline.
    """
    experts, split = moe_layers(config.model), layer_split_of(config)
    if len(set(experts)) == 1:
        return (experts[0],) * len(layers_at_places(split))
    kinds = {True: "experts", False: "none"}
    unequal = _unequal_layers(experts, layers_at_places(split))
    if unequal is not None:
        place, one, other = unequal
        raise problem(
            "Of layers at the same place of different stages or chunks some have experts and some have not.",
            where=("moe_layer_freq", "pipeline_model_parallel_size"),
            got=f"{kinds[experts[one]]} in layer {one + 1} and {kinds[experts[other]]} in layer"
            f" {other + 1}, both number {place + 1} of their chunks",
            expected="the same pattern in each of the "
            f"{split.num_stages * num_chunks_of(split)} chunks, since one program runs them all",
            fix="choose a moe_layer_freq that repeats from chunk to chunk, or other chunks",
        )
    return tuple(experts[layers[0]] for layers in layers_at_places(split))


_LONGEST_PATTERN = 100_000


def _pattern(node: ast.AST) -> list[int] | int:
    """Returns the value of an expression of integers, lists of them, + and *."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        entries = [_pattern(entry) for entry in node.elts]
        numbers = [entry for entry in entries if isinstance(entry, int)]
        if len(numbers) == len(entries):
            return numbers
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        a, b = _pattern(node.left), _pattern(node.right)
        if isinstance(node.op, ast.Add) and isinstance(a, list) and isinstance(b, list):
            return a + b
        if isinstance(node.op, ast.Mult) and isinstance(a, list) != isinstance(b, list):
            items, times = (a, b) if isinstance(a, list) else (b, a)
            assert isinstance(items, list) and isinstance(times, int)
            if len(items) * times <= _LONGEST_PATTERN:
                return items * times
    raise ValueError("no pattern")


def attention_window(model: ModelConfig) -> int | None:
    """Returns how many tokens before itself a token sees, `None` where that is all of them.

    Raises:
        ConfigError: `window_size` cannot be read, or lets a token see later ones.
    """
    if model.window_size is None:
        return None
    # The reference reads "128,0" and "(128,0)".
    match = re.fullmatch(r"\(?\s*(-?[0-9]{1,18})\s*,\s*(-?[0-9]{1,18})\s*\)?", model.window_size.strip())
    left, right = (int(number) for number in match.groups()) if match else (-2, 0)
    if left < -1 or right not in (0, -1):
        raise problem(
            "The window of attention cannot be used.",
            where=("window_size",),
            got=repr(model.window_size),
            expected="LEFT,RIGHT with a LEFT of at least 0, or -1 for all tokens before, and a RIGHT of 0 or -1: no "
            "token sees later ones",
            fix=f"write for instance --window-size {left if left >= 0 else 128},0",
        )
    return None if left == -1 or left >= model.seq_length - 1 else left


def cp_comm_types(config: Config) -> tuple[str, ...]:
    """Returns the `cp_comm_type` of the layers that stand first, second, ... in a chunk.

    Raises:
        ConfigError: Layers that one program runs have different ones, or the layers do not fit the pipeline.
    """
    types, split = config.parallel.cp_comm_type, layer_split_of(config)
    places = layers_at_places(split)
    if len(types) == 1:
        return types * len(places)
    unequal = _unequal_layers(types, places)
    if unequal is not None:
        place, one, other = unequal
        raise problem(
            "Layers at the same place of different stages or chunks communicate in different ways.",
            where=("cp_comm_type", "pipeline_model_parallel_size"),
            got=f"{types[one]} for layer {one + 1} and {types[other]} for layer {other + 1}, both "
            f"number {place + 1} of their chunks",
            expected="the same values in the same order in each of the "
            f"{split.num_stages * num_chunks_of(split)} chunks, since one program runs them all",
            fix="give one value for all layers, or one to each place of a chunk and to its layers in all chunks",
        )
    return tuple(types[layers[0]] for layers in places)


def _unequal_layers(values: Sequence[object], places: Sequence[Sequence[int]]) -> tuple[int, int, int] | None:
    """Returns (place, layer, layer) of the first place of a chunk whose layers have different values, None: no such."""
    for place, layers in enumerate(places):
        for other in layers:
            if values[other] != values[layers[0]]:
                return place, layers[0], other
    return None


def _resolve_vocab(config: Config, tokenizer_vocab_size: int | None) -> tuple[int | None, int | None]:
    """Returns the vocabulary's true and padded size, `None` for what cannot be known yet."""
    model = config.model
    vocab = tokenizer_vocab_size if model.vocab_size is None else model.vocab_size
    if vocab is None:
        return None, model.padded_vocab_size
    if config.data.tokenizer_type == "NullTokenizer" and tokenizer_vocab_size == vocab + 1:
        vocab = tokenizer_vocab_size  # the option counts without the end of document, as in the reference
    if tokenizer_vocab_size is not None and tokenizer_vocab_size > vocab:
        raise problem(
            "The tokenizer has more token ids than the model's vocabulary.",
            where=("vocab_size", "tokenizer_model"),
            got=f"tokenizer with {tokenizer_vocab_size} ids, vocab_size {vocab}",
            expected="vocab_size at least the tokenizer's number of ids",
            fix=f"leave --vocab-size out, or set it to {tokenizer_vocab_size} or more",
        )
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    derived = padded_vocab_size(vocab, model.make_vocab_size_divisible_by, tp, pp)
    padded = model.padded_vocab_size or derived
    if padded < vocab:
        raise problem(
            "The padded vocabulary is smaller than the vocabulary.",
            where=("padded_vocab_size", "vocab_size"),
            got=f"padded_vocab_size {padded}, vocabulary of {vocab} ids",
            expected="padded_vocab_size at least the number of ids",
            fix=f"leave --padded-vocab-size out, or set it to {derived}",
        )
    return vocab, padded
