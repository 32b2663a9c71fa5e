"""How the layers are cut into stages and chunks: the rules, and what to write where one is broken (no communication).

Plain arithmetic without numpy, so that a config can be checked before anything is loaded; `jmegatron.pipeline.layout`
makes arrays of it. With p stages and v chunks a stage the model runs through the p * v chunks in the order of
chunk * p + stage, and each takes the next layers.

Reference: `get_num_layers_to_build` (core/transformer/transformer_block.py), `get_transformer_layer_offset`
(transformer_layer.py), `pipeline_parallel_layer_layout.py`, and the checks of `TransformerConfig.__post_init__` and of
`validate_args` in `megatron/training/arguments.py`.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from jmegatron.config.options import flag_of, problem
from jmegatron.config.sections import Config
from jmegatron.errors import ConfigError

Lengths = tuple[tuple[int, ...], ...]
"""Number of layers by [stage][chunk]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSplit:
    """What the options say about the cut, `None` for what is not given.

    Attributes:
        num_layers: Layers of the model.
        num_stages: Length p of the pipeline.
        num_chunks: Chunks v a stage.
        layers_per_virtual_stage: Layers of one chunk, another way to give v.
        first_stage_layers: Layers of the first stage, over all its chunks.
        last_stage_layers: The same of the last stage.
        account_for_embedding: Whether the embedding takes the place of one layer in the first chunk.
        account_for_loss: Whether the output layer takes the place of one layer in the last chunk.
        layout: Megatron's layout string, which says everything else by itself.
    """

    num_layers: int
    num_stages: int
    num_chunks: int | None = None
    layers_per_virtual_stage: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    layout: str | None = None


_OPTION = {
    "num_layers": "num_layers",
    "num_stages": "pipeline_model_parallel_size",
    "num_chunks": "num_virtual_stages_per_pipeline_rank",
    "layers_per_virtual_stage": "num_layers_per_virtual_pipeline_stage",
    "first_stage_layers": "decoder_first_pipeline_num_layers",
    "last_stage_layers": "decoder_last_pipeline_num_layers",
    "account_for_embedding": "account_for_embedding_in_pipeline_split",
    "account_for_loss": "account_for_loss_in_pipeline_split",
    "layout": "pipeline_model_parallel_layout",
}
"""Field of `LayerSplit` -> option."""
_UNEVEN = ("first_stage_layers", "last_stage_layers")
_PLACES = ("account_for_embedding", "account_for_loss")
_LONGEST_LAYOUT = 1_000_000
_MOST_WAYS = 4


def layer_split_of(config: Config) -> LayerSplit:
    """Returns what a config says about the cut."""
    return LayerSplit(
        num_layers=config.model.num_layers,
        **{field: getattr(config.parallel, option) for field, option in _OPTION.items() if field != "num_layers"},
    )


def num_chunks_of(split: LayerSplit) -> int:
    """Returns the number of chunks a stage, 1 where stages are not cut further; builds no list.

    Raises:
        ConfigError: The split breaks a rule; the message proposes changes that were tried and fit.
    """
    try:
        return _checked_chunks(split)
    except _Misfit as misfit:
        raise misfit.error(split) from None


def chunk_lengths(split: LayerSplit) -> Lengths:
    """Returns the number of layers of each chunk.

    Raises:
        ConfigError: As `num_chunks_of`.
    """
    chunks, stages = num_chunks_of(split), split.num_stages
    if split.layout is not None:
        entries = _layout_entries(split.layout)
        return tuple(tuple(entries[c * stages + r].count("t") for c in range(chunks)) for r in range(stages))
    first, middle, last = _stage_places(split)
    places = [first] if stages == 1 else [first, *[middle] * (stages - 2), last]
    lengths = [[length // chunks] * chunks for length in places]
    lengths[0][0] -= split.account_for_embedding
    lengths[-1][-1] -= split.account_for_loss
    return tuple(tuple(stage) for stage in lengths)


def layers_at_places(split: LayerSplit) -> tuple[tuple[int, ...], ...]:
    """Returns the layers that stand first, second, ... in any chunk of any stage; one program runs those of a place.

    Raises:
        ConfigError: As `num_chunks_of`.
    """
    lengths = chunk_lengths(split)
    places: list[list[int]] = [[] for _ in range(max(max(stage) for stage in lengths))]
    first = 0
    for chunk in zip(*lengths, strict=True):
        for length in chunk:
            for place in range(length):
                places[place].append(first + place)
            first += length
    return tuple(tuple(layers) for layers in places)


# --- rules -------------------------------------------------------------------------------------------------------


class _Misfit(Exception):
    """A broken rule, before anyone has looked for a way out."""

    def __init__(
        self, what: str, fields: tuple[str, ...], expected: str, rule: str, found: str = "", *, search: bool = True
    ):
        super().__init__(what)
        self.what, self.fields, self.expected, self.rule, self.found = what, fields, expected, rule, found
        self.search = search

    def error(self, split: LayerSplit) -> ConfigError:
        """Returns the message: the numbers of the fields concerned, and what to write instead."""
        values = [f"{_OPTION[field]} {_text(getattr(split, field))}" for field in self.fields]
        return problem(
            self.what,
            where=tuple(_OPTION[field] for field in self.fields),
            got=", ".join([*values, *([self.found] if self.found else [])]),
            expected=self.expected,
            fix=(_ways_out(split) if self.search else "") or self.rule,
        )


def _text(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _given(split: LayerSplit, *fields: str) -> tuple[str, ...]:
    """Returns the fields that are set, 0 included."""
    return tuple(field for field in fields if getattr(split, field) is not None and getattr(split, field) is not False)


def _checked_chunks(split: LayerSplit) -> int:
    """Applies every rule; returns the number of chunks a stage."""
    for field in _given(split, *(name for name in _OPTION if name not in (*_PLACES, "layout"))):
        if getattr(split, field) < 1:
            raise _Misfit(
                f"{_OPTION[field]} is out of range.",
                (field,),
                "at least 1",
                f"set {_flag(field)} to a value that is at least 1",
                search=False,
            )
    _check_exclusive(split)
    if split.layout is not None:
        chunks = _check_layout(split)
    elif split.layers_per_virtual_stage is not None:
        chunks = _check_layers_per_chunk(split)
    else:
        chunks = _check_chunks(split)
    if chunks > 1 and split.num_stages == 1:
        fields = ("num_stages", *_given(split, "num_chunks", "layers_per_virtual_stage", "layout"))
        raise _Misfit(
            "One stage is not cut into chunks: they shorten the bubble between stages, and there is none.",
            fields,
            "a pipeline_model_parallel_size above 1, or one chunk a stage",
            f"raise {_flag('num_stages')}",
            f"{chunks} chunks",
        )
    return chunks


def _check_exclusive(split: LayerSplit) -> None:
    """The reference's rules about options that say the same thing twice."""
    chunked = _given(split, "num_chunks", "layers_per_virtual_stage", "layout")
    uneven, places = _given(split, *_UNEVEN), _given(split, *_PLACES)
    if len(chunked) > 1:
        raise _Misfit(
            "The chunks of a stage are given in more than one way.", chunked, "one of them", "keep one of them"
        )
    if split.layout is not None and (uneven or places):
        raise _Misfit(
            "The layout says which stage holds which layer, and so do other options.",
            ("layout", *uneven, *places),
            "the layout alone",
            "keep the layout, or the other options",
        )
    if uneven and places:
        raise _Misfit(
            "Stages of a given length leave no place to account for.",
            (*uneven, *places),
            "lengths of the end stages, or places for the embedding and the output layer",
            "keep one kind",
        )
    if uneven and split.layers_per_virtual_stage is not None:
        raise _Misfit(
            "Chunks of a given length do not go with end stages of a given length.",
            ("layers_per_virtual_stage", *uneven),
            f"the number of chunks, {_flag('num_chunks')}, beside uneven stages",
            f"use {_flag('num_chunks')}",
        )


def _num_places(split: LayerSplit) -> int:
    return split.num_layers + split.account_for_embedding + split.account_for_loss


def _layers_text(split: LayerSplit) -> str:
    """Says what is divided: the layers, and what takes the place of a layer."""
    extra = [
        name
        for name, counted in (("embedding", split.account_for_embedding), ("output layer", split.account_for_loss))
        if counted
    ]
    if not extra:
        return f"{split.num_layers} layers"
    return f"{split.num_layers} layers with {' and '.join(extra)} ({_num_places(split)} places)"


def _stage_places(split: LayerSplit) -> tuple[int, int, int]:
    """Returns the places of the first, of each middle, and of the last stage."""
    uneven = _given(split, *_UNEVEN)
    if not uneven:
        if _num_places(split) % split.num_stages:
            raise _Misfit(
                f"{_layers_text(split)} cannot be divided over {split.num_stages} stages.",
                ("num_layers", "num_stages", *_given(split, *_PLACES)),
                "the same number for each stage, or the lengths of uneven ones",
                "change one of them",
            )
        return (_num_places(split) // split.num_stages,) * 3
    lengths = [getattr(split, field) for field in uneven]
    rest, between = split.num_layers - sum(lengths), split.num_stages - len(lengths)
    if rest < 0 or between < 0 or bool(rest) != bool(between) or (between and rest % between):
        left = f"{rest} layers are left for {between} stages" if rest >= 0 <= between else "that is too much"
        raise _Misfit(
            f"{len(lengths)} of {split.num_stages} stages take {sum(lengths)} of {split.num_layers} layers: {left}.",
            ("num_layers", "num_stages", *uneven),
            "the same number, at least 1, for each stage whose length is not given",
            "change one of them",
        )
    middle = rest // between if between else 0
    if split.num_stages == 1:
        return (split.num_layers,) * 3
    return split.first_stage_layers or middle, middle, split.last_stage_layers or middle


def _check_chunks(split: LayerSplit) -> int:
    """Every stage has as many layers as chunks, times a whole number."""
    chunks = split.num_chunks or 1
    for length in sorted(set(_stage_places(split))):
        if length % chunks:
            raise _Misfit(
                f"{length} {'places' if _given(split, *_PLACES) else 'layers'} of a stage cannot be divided over its "
                f"{chunks} chunks: {_layers_text(split)}, {split.num_stages} stages.",
                ("num_layers", "num_stages", "num_chunks", *_given(split, *_UNEVEN, *_PLACES)),
                "each stage's length to be a multiple of num_virtual_stages_per_pipeline_rank",
                "change one of them",
            )
    return chunks


def _check_layers_per_chunk(split: LayerSplit) -> int:
    """Returns the number of chunks that chunks of the given length make of a stage."""
    length, per_chunk = _stage_places(split)[0], split.layers_per_virtual_stage
    assert per_chunk is not None
    if length % per_chunk:
        raise _Misfit(
            f"{length} {'places' if _given(split, *_PLACES) else 'layers'} of a stage cannot be divided into chunks of "
            f"{per_chunk}: {_layers_text(split)}, {split.num_stages} stages.",
            ("num_layers", "num_stages", "layers_per_virtual_stage", *_given(split, *_PLACES)),
            "each stage's length to be a multiple of num_layers_per_virtual_pipeline_stage",
            "change one of them",
        )
    return length // per_chunk


# --- layout string -----------------------------------------------------------------------------------------------


def _check_layout(split: LayerSplit) -> int:
    """Checks Megatron's layout string; returns the number of chunks a stage."""
    assert split.layout is not None
    entries = _layout_entries(split.layout)
    letters = "".join(entries)
    if wrong := sorted(set(letters) - set("EtmL")):
        raise _layout_misfit(
            f"The layout has {', '.join(map(repr, wrong))} in it.",
            "the letters E, t and L, | between two entries, x*n or (...)*n to repeat without a group inside a group",
        )
    if "m" in letters:
        raise _layout_misfit("The layout places multi-token prediction, which is not implemented yet.", "no m in it")
    if letters.count("E") != 1 or not entries[0].startswith("E"):
        raise _layout_misfit("The layout does not begin with the embedding.", "one E, at the start of the first entry")
    if letters.count("L") != 1 or not entries[-1].endswith("L"):
        raise _layout_misfit("The layout does not end with the loss.", "one L, at the end of the last entry")
    if letters.count("t") != split.num_layers:
        raise _Misfit(
            f"The layout places {letters.count('t')} layers of {split.num_layers}.",
            ("layout", "num_layers"),
            "as many t as num_layers",
            "change one of them",
        )
    if len(entries) % split.num_stages:
        raise _Misfit(
            f"The {len(entries)} entries of the layout cannot be dealt to {split.num_stages} stages.",
            ("layout", "num_stages"),
            "a multiple of pipeline_model_parallel_size, | between two of them",
            "change one of them",
        )
    return len(entries) // split.num_stages


def _layout_misfit(what: str, expected: str) -> _Misfit:
    return _Misfit(what, ("layout",), expected, "correct the layout")


def _layout_entries(text: str) -> tuple[str, ...]:
    """Returns the entries with repetitions written out; entry k belongs to stage k % p, chunk k // p."""

    def repeated(match: re.Match[str]) -> str:
        group, times = match.group(1), match.group(2)
        if len(times) > 7 or len(group) * int(times) > _LONGEST_LAYOUT:
            raise _layout_misfit(f"The layout repeats {group!r} {times} times.", "a layout for this model")
        return group * int(times)

    bare = re.sub(r"[,\s]", "", text)
    # Groups first: (t*2|)*3 becomes t*2|t*2|t*2|, then the letters.
    for pattern in (r"\(([^()]+)\)\*([0-9]+)", r"(.)\*([0-9]+)"):
        bare = re.sub(pattern, repeated, bare)
        if len(bare) > _LONGEST_LAYOUT:
            raise _layout_misfit(f"The layout has {len(bare)} letters.", "a layout for this model")
    return tuple(bare.split("|"))


def _balanced_layout(num_layers: int, num_entries: int) -> str:
    """Returns a layout string of this many entries, the longer ones first."""
    short, longer = divmod(num_layers, num_entries)
    entries = [f"t*{short + (k < longer)}" for k in range(num_entries)]
    return "E" + "|".join(entries) + "L"


# --- ways out ----------------------------------------------------------------------------------------------------


def _ways_out(split: LayerSplit) -> str:
    """Returns changes of the options that make the split fit, each of them tried; empty if none was found."""
    found: list[str] = []
    for candidates in (_candidates(split), _last_resorts(split)):
        for changes in candidates:
            new = {field: value for field, value in changes.items() if value != getattr(split, field)}
            text = " ".join(_change_text(field, value) for field, value in new.items())
            if new and text not in found and _fits(dataclasses.replace(split, **new)):
                found.append(text)
            if len(found) == _MOST_WAYS:
                break
        if found:
            return "use " + ", or ".join(found)
    return ""


def _fits(split: LayerSplit) -> bool:
    try:
        _checked_chunks(split)
    except _Misfit:
        return False
    return True


def _flag(field: str) -> str:
    return flag_of(_OPTION[field])


def _change_text(field: str, value: Any) -> str:
    """Returns a change as it is written on the command line."""
    if value is False:
        return "--no-" + _flag(field)[2:]
    if value is None:
        return f"{_flag(field)} null"
    return f"{_flag(field)} '{value}'" if field == "layout" else f"{_flag(field)} {value}"


def _candidates(split: LayerSplit) -> Iterator[dict[str, Any]]:
    """Yields changes of few options that might help, the likeliest first."""
    yield from _without_conflicts(split)
    if split.layout is not None:
        yield from _other_layouts(split)
        return
    ends = list(_other_ends(split))
    yield from ends[:1]
    yield from _other_num_layers(split)
    yield from _other_chunks(split)
    yield from ends[1:]
    if split.num_stages == 1:
        yield from ({"num_stages": stages} for stages in (2, 3, 4))


def _last_resorts(split: LayerSplit) -> Iterator[dict[str, Any]]:
    """Yields changes that give up all that shapes the stages; some number of layers then always fits."""
    shapes = (*_UNEVEN, *_PLACES, "num_chunks", "layers_per_virtual_stage", "layout")
    plain: dict[str, Any] = {field: False if field in _PLACES else None for field in _given(split, *shapes)}
    yield plain
    for changes in _other_num_layers(dataclasses.replace(split, **plain)):
        yield {**plain, **changes}


def _without_conflicts(split: LayerSplit) -> Iterator[dict[str, Any]]:
    """Yields what to leave out where two options exclude each other."""
    off = {
        field: False if field in _PLACES else None
        for field in _given(split, *_UNEVEN, *_PLACES, "num_chunks", "layers_per_virtual_stage", "layout")
    }
    for kept in (("layout",), ("num_chunks", *_UNEVEN), ("num_chunks", *_PLACES), ("layers_per_virtual_stage",)):
        if set(kept) & set(off) and not set(off) <= set(kept):
            yield {field: value for field, value in off.items() if field not in kept}
    if split.layers_per_virtual_stage and set(_UNEVEN) & set(off):
        for chunks in range(2, 9):
            yield {"layers_per_virtual_stage": None, "num_chunks": chunks}


def _other_layouts(split: LayerSplit) -> Iterator[dict[str, Any]]:
    """Yields the numbers that the layout was written for, and a layout for the numbers."""
    assert split.layout is not None
    try:
        entries = _layout_entries(split.layout)
    except _Misfit:
        entries = ()
    if entries:
        yield {"num_layers": "".join(entries).count("t")}
        yield from ({"num_stages": s} for s in range(min(split.num_stages, 64), 0, -1) if not len(entries) % s)
        yield {"num_stages": len(entries)}
    if split.num_stages <= 16:
        chunks = min(max(1, round(len(entries) / split.num_stages)), 8) if split.num_stages > 1 else 1
        yield {"layout": _balanced_layout(split.num_layers, split.num_stages * chunks)}
    yield {"layout": None}


def _other_ends(split: LayerSplit) -> Iterator[dict[str, Any]]:
    """Yields lengths of one end stage that leave the other stages equally long."""
    chunks = split.num_chunks or 1
    for field, other in (_UNEVEN[::-1], _UNEVEN):
        rest = split.num_layers - (getattr(split, other) or 0)
        between = split.num_stages - 1 - (getattr(split, other) is not None)
        if between < 0:
            continue
        rounded_down = rest // ((between + 1) * chunks) * chunks
        for length in (rounded_down + chunks, rounded_down):
            if rest - between * length >= 1:
                yield {field: rest - between * length}


def _other_num_layers(split: LayerSplit) -> Iterator[dict[str, Any]]:
    """Yields the next smaller and the next larger number of layers that the stages can share."""
    fixed = sum(getattr(split, field) or 0 for field in _UNEVEN) - split.account_for_embedding - split.account_for_loss
    sharing = split.num_stages - len(_given(split, *_UNEVEN))
    unit = max(0, sharing) * (split.layers_per_virtual_stage or split.num_chunks or 1)
    shared = max(0, split.num_layers - fixed)
    for number in (shared // unit * unit, shared // unit * unit + unit) if unit else (0,):
        if fixed + number >= 1:
            yield {"num_layers": fixed + number}


def _other_chunks(split: LayerSplit) -> Iterator[dict[str, Any]]:
    """Yields the nearest number, or length, of chunks that divides the stages."""
    try:
        length = math.gcd(*_stage_places(split))
    except _Misfit:
        return
    chunks, per_chunk = split.num_chunks, split.layers_per_virtual_stage
    if chunks:
        yield from ({"num_chunks": d} for d in range(min(chunks, 64), 0, -1) if length % d == 0)
    if per_chunk:
        below = (d for d in range(min(per_chunk, length), max(0, min(per_chunk, length) - 64), -1) if length % d == 0)
        above = (d for d in range(per_chunk + 1, min(length, per_chunk + 64) + 1) if length % d == 0)
        for nearest in (next(below, None), next(above, None), length):
            if nearest:
                yield {"layers_per_virtual_stage": nearest}
