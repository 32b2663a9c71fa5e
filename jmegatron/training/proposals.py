"""Changes with which a step fits a card that it does not fit as it stands, by the formulas. No communication."""

import dataclasses
from collections.abc import Iterator

from jmegatron.config import Config
from jmegatron.errors import ConfigError
from jmegatron.planner import cards, layouts
from jmegatron.planner.costs import Layout
from jmegatron.training.build import formula_layout
from jmegatron.training.planning import option_words, request_of, with_layout


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A change.

    Attributes:
      flags: what to add to the command line.
      note: what to take out of it, or "".
      changes: what is changed, in words.
      config: with the change, checked.
      step_s: estimated seconds of a step.
      peak: estimated bytes of a GPU.
    """

    flags: str
    note: str
    changes: tuple[str, ...]
    config: Config
    step_s: float
    peak: float


def candidates(config: Config, num_gpus: int, data_parallel_size: int) -> Iterator[Proposal]:
    """Yields changes, estimated to fit, in the order in which they should be tried.

    First those of which no part alone is enough, each set of options once and with its fastest values, the fastest set
    first; then what else fits, the fastest first.

    Args:
      config: resolved.
      num_gpus: devices.
      data_parallel_size: as it stands.
    """
    card = cards.card(config.hardware.target_gpu)
    free = dataclasses.replace(config, fixed_options=())
    current = formula_layout(config, data_parallel_size, config.hardware.gpus_per_node)
    ranked = layouts.plan(request_of(free, num_gpus, card)).ranked
    fastest: dict[frozenset[str], layouts.Candidate] = {}
    for one in ranked:
        fastest.setdefault(changes(current, one.layout), one)
    minimal = [one for what, one in fastest.items() if not any(other < what for other in fastest)]
    chosen = {id(one) for one in minimal}
    rest = [one for one in fastest.values() if id(one) not in chosen]
    rest += [one for one in ranked if id(one) not in {id(other) for other in fastest.values()}]
    for one in [*minimal, *rest]:
        try:
            changed = with_layout(config, one)
        except ConfigError:
            continue  # what the formulas do not know of
        note = ""
        if current.recompute == "selective" and one.layout.recompute != "selective":
            note = "without --recompute-activations"
        what = tuple(sorted(changes(current, one.layout)))
        flags = " ".join(option_words(one, config))
        yield Proposal(flags, note, what, changed, one.time.total, one.memory.total)


def changes(before: Layout, after: Layout) -> frozenset[str]:
    """Returns in which respects two layouts differ; what follows from another change is none of its own."""
    of = {
        "tensor parallelism": lambda one: one.tp,
        "pipeline parallelism": lambda one: one.pp,
        "context parallelism": lambda one: one.cp,
        "chunks": lambda one: one.num_chunks,
        "micro-batch": lambda one: one.micro_batch_size,
        "low-memory schedule": lambda one: one.schedule_name == "1f1b-low-memory" and one.pp > 1,
        "recompute": lambda one: one.recompute,
        "sharded optimizer": lambda one: (one.distributed_optimizer, one.overlap_grad_reduce, one.overlap_param_gather),
    }
    found = {name for name, part in of.items() if part(before) != part(after)}
    if before.tp == after.tp and before.sequence_parallel != after.sequence_parallel:
        found.add("sequence parallelism")
    if after.pp == 1:
        found.discard("chunks")
    return frozenset(found)
