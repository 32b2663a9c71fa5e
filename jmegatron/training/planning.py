"""From the options to a planning request, and from a planned layout back to options. No communication.

`scripts/plan.py` shows the plan, `--auto-parallel` takes its first layout. What may be planned is
`config.sections.PLANNED`; of these the command line's stay as they are, the YAML file's have given way on loading.
"""

import dataclasses
from typing import Any

from jmegatron.config import Config, layer_split_of, padded_vocab_size, validate
from jmegatron.config.options import flag_of, options, problem
from jmegatron.errors import ConfigError, NothingFits
from jmegatron.planner import cards
from jmegatron.planner.costs import Layout
from jmegatron.planner.layouts import SPLIT_FIELDS, Candidate, Plan, Request, describe, plan, ways_out
from jmegatron.training.build import compute_dtype, formula_shape

_FIELDS = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "pipeline_schedule": "schedule",
    "sequence_parallel": "sequence_parallel",
    "use_distributed_optimizer": "distributed_optimizer",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "overlap_param_gather": "overlap_param_gather",
    "micro_batch_size": "micro_batch_size",
    "recompute_granularity": "recompute",
    "recompute_method": "recompute_method",
    "recompute_num_layers": "recompute_num_layers",
    "recompute_modules": "recompute_modules",
}
"""Option -> field of `Layout`."""
_SPLIT_OPTIONS = {
    "num_chunks": "num_virtual_stages_per_pipeline_rank",
    "layers_per_virtual_stage": "num_layers_per_virtual_pipeline_stage",
    "first_stage_layers": "decoder_first_pipeline_num_layers",
    "last_stage_layers": "decoder_last_pipeline_num_layers",
    "account_for_embedding": "account_for_embedding_in_pipeline_split",
    "account_for_loss": "account_for_loss_in_pipeline_split",
    "layout": "pipeline_model_parallel_layout",
}
"""Field of `LayerSplit` -> option."""

NAMES = {field: flag_of(name) for name, field in _FIELDS.items()} | {
    field: flag_of(name) for field, name in _SPLIT_OPTIONS.items()
}
"""What the command line calls a field of `Request.fixed`."""


def request_of(config: Config, num_gpus: int, card: cards.Card, **more: Any) -> Request:
    """Returns what is to be planned for a config that was loaded with `auto_parallel`, its vocabulary known.

    Args:
      config: resolved as far as it can be without devices.
      num_gpus: devices.
      card: the GPU.
      more: further fields of `Request`.

    Raises:
      ConfigError: the global batch or the vocabulary is not known, or the card cannot be as fast as is assumed.
    """
    check_assumed_tflops(config, card)
    model, hardware, batch = config.model, config.hardware, config.training.global_batch_size
    for name, value in (("global_batch_size", batch), ("vocab_size", model.vocab_size)):
        if value is None:
            raise problem(
                f"A plan needs {name}.",
                where=(name,),
                got="no value",
                expected="a number: what each device has to do depends on it",
                fix=f"give {flag_of(name)}",
            )
    assert batch is not None
    assert model.vocab_size is not None
    derived = padded_vocab_size(
        model.vocab_size,
        model.make_vocab_size_divisible_by,
        config.parallel.tensor_model_parallel_size,
        config.parallel.pipeline_model_parallel_size,
    )
    split = layer_split_of(config)
    fixed = {name: getattr(split, name) for name in SPLIT_FIELDS if _SPLIT_OPTIONS[name] in config.fixed_options}
    fixed |= {_FIELDS[name]: _value(config, name) for name in config.fixed_options if name in _FIELDS}
    return Request(
        shape=formula_shape(config),
        num_gpus=num_gpus,
        card=card,
        global_batch_size=batch,
        vocab_size=model.vocab_size if derived == model.padded_vocab_size else None,
        divisible_by=model.make_vocab_size_divisible_by,
        base=_base(config),
        fixed=fixed,
        **{"gpus_per_node": hardware.gpus_per_node, "assumed_tflops": hardware.assumed_tflops, **more},
    )


def _base(config: Config) -> Layout:
    """Returns what no layout changes."""
    parallel, group = config.parallel, "microbatch_group_size_per_virtual_pipeline_stage"
    types, expert_ranks = parallel.cp_comm_type, parallel.expert_tensor_parallel_size
    # With auto_parallel a size is there only where it was given; a derived one of 1 is that of one tp rank.
    derived = not parallel.auto_parallel and parallel.tensor_model_parallel_size == 1
    return Layout(
        ep=parallel.expert_model_parallel_size,
        experts_over_tp=expert_ranks != 1 or derived,
        parameter_bytes=compute_dtype(config).dtype.itemsize,
        optimizer=config.optimizer.optimizer,
        dropout=config.model.hidden_dropout > 0,
        group_size=_value(config, group) if group in config.fixed_options else None,
        cp_comm_type="p2p" if "p2p" in types else types[0],
        gpus_per_node=config.hardware.gpus_per_node,
    )


def _value(config: Config, name: str) -> Any:
    return getattr(getattr(config, options()[name].section), name)


def planned_options(candidate: Candidate) -> dict[str, Any]:
    """Returns option -> value for every option that a layout decides."""
    layout, split = candidate.layout, candidate.split
    full, selective = layout.recompute == "full", layout.recompute == "selective"
    return {
        **{name: getattr(layout, field) for name, field in _FIELDS.items()},
        **{option: getattr(split, field) for field, option in _SPLIT_OPTIONS.items()},
        "microbatch_group_size_per_virtual_pipeline_stage": layout.group_size,
        "pipeline_schedule": layout.schedule_name,
        "recompute_method": layout.recompute_method if full else None,
        "recompute_num_layers": layout.recompute_num_layers if full else None,
        "recompute_modules": (layout.recompute_modules or ("core_attn",)) if selective else (),
    }


def with_layout(config: Config, candidate: Candidate) -> Config:
    """Returns the config with the layout's options, checked; `auto_parallel` is off in it, since it is done.

    Raises:
      ConfigError: the options do not fit together.
    """
    values = planned_options(candidate)
    changed = {
        section: dataclasses.replace(
            getattr(config, section),
            **{name: value for name, value in values.items() if options()[name].section == section},
        )
        for section in ("parallel", "training")
    }
    model = dataclasses.replace(config.model, padded_vocab_size=candidate.vocab_rows)
    parallel = dataclasses.replace(
        changed["parallel"], auto_parallel=False, expert_tensor_parallel_size=_expert_ranks(config, candidate)
    )
    result = dataclasses.replace(config, model=model, parallel=parallel, training=changed["training"])
    validate(result)
    return result


def _expert_ranks(config: Config, candidate: Candidate) -> int | None:
    """Returns the devices that share each expert's matrices; None for a dense model."""
    if config.model.num_experts is None:
        return None
    return candidate.layout.tp if candidate.layout.experts_over_tp else 1


def expert_note(config: Config) -> list[str]:
    """Returns what is to be said of a plan for a model with experts."""
    if config.model.num_experts is None:
        return []
    size = config.parallel.expert_model_parallel_size
    return [f"expert-model-parallel-size {size} is as given: other numbers of expert-parallel devices are not tried"]


def option_words(candidate: Candidate, config: Config | None) -> list[str]:
    """Returns the words that say a layout behind `train.py` and the config's own ones, those of no effect left out.

    Args:
      candidate: the layout.
      config: as it stands; what differs from it is written, so that the line overrides a file. None: all is written.
    """
    words = []
    for name, value in planned_options(candidate).items():
        option = options()[name]
        if config is not None and value == _value(config, name):
            continue
        if option.kind is bool:
            words.append(option.flag if value else str(option.negation))
        elif value is None:
            words += [option.flag, "null"]
        elif option.is_list:
            words += [option.flag, *value] if value else []
        else:
            words += [option.flag, str(value)]
    given = None if config is None else config.parallel.expert_tensor_parallel_size
    if config is not None and given is not None and given != (ranks := _expert_ranks(config, candidate)):
        words += ["--expert-tensor-parallel-size", str(ranks)]
    if config is not None and candidate.vocab_rows != config.model.padded_vocab_size:
        words += ["--padded-vocab-size", str(candidate.vocab_rows)]
    return words


def auto_parallel(config: Config, num_gpus: int, device_kind: str = "") -> tuple[Config, list[str]]:
    """Returns (the config with the layout that is expected to be fastest, what to say about it).

    Args:
      config: with `auto_parallel`, its vocabulary known.
      num_gpus: devices.
      device_kind: of the devices; where it is no card that is known, `target_gpu` is planned for.

    Raises:
      NothingFits: nothing fits.
      ConfigError: the batch is not known, or no card is as fast as is assumed.
    """
    card = cards.card_of_device_kind(device_kind)
    note = [] if card or not device_kind else [f"auto-parallel: {device_kind!r} is no GPU that is known, so it is"]
    card = card or cards.card(config.hardware.target_gpu)
    note = [f"{note[0]} planned for {card.name} (--target-gpu)"] if note else []
    request = request_of(config, num_gpus, card)
    found = plan(request)
    best = found.best
    if best is None:
        raise _nothing_fits(config, found)
    return with_layout(config, best), [
        *note,
        f"auto-parallel: {describe(best.layout)}; first of {len(found.ranked)} layouts that fit {num_gpus} x "
        f"{card.name}, {best.memory.total / 1e9:.1f} GB and {best.time.total:.4g} s a step by the formulas",
        *(f"auto-parallel: {line}" for line in expert_note(config)),
    ]


def check_assumed_tflops(config: Config, card: cards.Card) -> None:
    """Checks that a card can be as fast as is assumed.

    Raises:
      ConfigError: it cannot.
    """
    assumed, peak = config.hardware.assumed_tflops, card.peak_bf16_flops / 1e12
    if assumed is not None and assumed > peak:
        raise ConfigError(
            f"--assumed-tflops: got {assumed:g}, expected at most {peak:g}, {card.name}'s dense peak; fix: give the"
            " TFLOP/s that a GPU reaches end to end"
        )


def _nothing_fits(config: Config, found: Plan) -> NothingFits:
    request, miss = found.request, found.nearest_miss
    fixed = [f"{name} {_value(config, name)}" for name in config.fixed_options]
    if miss is not None:
        got = f"at least {miss.memory.total / 1e9:.1f} GB of {request.usable_bytes / 1e9:.1f} ({describe(miss.layout)})"
    else:
        reasons = sorted({f"{one.what}: {one.reason}" for one in found.rejected})
        got = "; ".join(reasons[:3]) or "no layout"
    ways = ways_out(request, NAMES)
    found_problem = problem(
        f"No layout fits {request.num_gpus} x {request.card.name}.",
        where=("auto_parallel", *config.fixed_options),
        got=got + (f"; fixed: {', '.join(fixed)}" if fixed else ""),
        expected=f"a layout of which {100 * (1 - request.headroom):.0f} % of a card's memory hold a step",
        fix="; or ".join(ways) if ways else "use more GPUs, or a smaller model",
    )
    return NothingFits(str(found_problem))
