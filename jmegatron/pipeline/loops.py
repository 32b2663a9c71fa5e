"""The loops in which a program runs a schedule's ticks. numpy only, no communication.

Ticks differ in what all stages do in them: forward, loss, backward, embedding. Which ones is known before anything is
traced, so a tick's kind is chosen when tracing, and no program holds a conditional. Runs of ticks of one kind become
one loop, and a sequence of such runs that repeats (the groups of an interleaved schedule) becomes a loop of loops:
the program's size does not depend on the number of micro-batches.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from jmegatron.pipeline.schedule import NONE, Schedule


class Kind(NamedTuple):
    """What all stages do in a tick, in this order."""

    embed: bool
    """Look up the embeddings that stage 0 needs next."""
    forward: bool
    loss: bool
    """Output layer and loss of what the last stage has computed."""
    backward: bool
    embed_gradient: bool
    """Add the gradient of embeddings that stage 0 has computed."""
    gather: bool = False
    """Gather the parameters of the chunk whose first forward stage 0 runs now."""
    reduce: bool = False
    """Reduce the gradients of the chunk whose last backward stage 0 runs now: all stages have finished that chunk."""
    parity: int = 0
    """With half ticks: the tick's number modulo 2; the stages of this parity run forward."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """`repeats` times the parts one after the other: ticks of one kind each, or loops."""

    repeats: int
    parts: "tuple[Kind | Loop, ...]"

    @property
    def num_ticks(self) -> int:
        """Ticks of all repeats."""
        return self.repeats * sum(part.num_ticks if isinstance(part, Loop) else 1 for part in self.parts)

    def count(self, field: str) -> int:
        """Returns the number of ticks whose kind has `field`."""
        one = sum(part.count(field) if isinstance(part, Loop) else int(getattr(part, field)) for part in self.parts)
        return self.repeats * one


class TickTables(NamedTuple):
    """What is done in each tick; leads and delays of the embedding included. bool or int32 [ticks]."""

    kinds: list[Kind]
    embed_microbatch: np.ndarray
    """Micro-batch whose embeddings are looked up, NONE: nobody's."""
    embed_gradient_microbatch: np.ndarray
    """Micro-batch whose embeddings get their gradient, NONE: nobody's."""
    loss_microbatch: np.ndarray
    """Micro-batch whose loss is computed, NONE: nobody's."""
    gather_chunk: np.ndarray
    """Chunk whose parameters are gathered, NONE: no one's."""
    reduce_chunk: np.ndarray
    """Chunk whose gradients are reduced, NONE: no one's."""


def embedding_lead(schedule: Schedule) -> int:
    """Returns how many ticks ahead embeddings are looked up (and behind, their gradients added): 1, or 0 at one stage.

    Looking up embeddings that are divided over the stages takes a reduction over them. A tick ahead it waits for
    nothing, and nothing in its tick waits for it.
    """
    return int(schedule.num_stages > 1)


def tick_tables(schedule: Schedule, *, backward: bool = True, gather: bool = False, reduce: bool = False) -> TickTables:
    """Returns the kind of each tick.

    Kinds that differ in the embedding alone are made one: a look-up that nobody needs is cheaper than one more loop to
    compile.

    Args:
      schedule: in lock step.
      backward: whether to run backward slots; without them only the ticks up to the last loss remain.
      gather: whether each chunk's parameters are gathered in the tick of its first forward on stage 0.
      reduce: whether each chunk's gradients are reduced in the tick of its last backward on stage 0.
    """
    lead, delay = embedding_lead(schedule), schedule.loss_delay
    ticks = schedule.num_ticks
    stage = schedule.num_stages - 1
    first_forward = np.where(schedule.forward_chunk[:, 0] == 0, schedule.forward_microbatch[:, 0], NONE)
    last_backward = np.where(schedule.backward_chunk[:, 0] == 0, schedule.backward_microbatch[:, 0], NONE)
    last_chunk = schedule.forward_chunk[:, stage] == schedule.num_chunks - 1
    last_forward = np.where(last_chunk, schedule.forward_microbatch[:, stage], NONE)
    embed, gradient, loss = _shift(first_forward, -lead), _shift(last_backward, lead), _shift(last_forward, delay)
    gather_chunk, reduce_chunk = np.full((2, ticks), NONE)
    for chunk in range(schedule.num_chunks):
        if gather:
            gather_chunk[schedule.forward_tick[0, :, chunk].min()] = chunk
        if reduce:
            reduce_chunk[schedule.backward_tick[0, :, chunk].max()] = chunk
    columns = [embed != NONE, schedule.forward_slots, loss != NONE, schedule.backward_slots, gradient != NONE]
    flags = np.stack([*columns, gather_chunk != NONE, reduce_chunk != NONE], axis=1)
    if not backward:
        flags[:, 3:] = False
        ticks = int(np.flatnonzero(flags.any(1))[-1]) + 1
        flags = flags[:ticks]
    parity = np.arange(ticks) % 2 if schedule.half_ticks else np.zeros(ticks, int)
    slots = np.column_stack([flags[:, 1:4], flags[:, 5:], parity])
    for one in np.unique(slots, axis=0):
        same = (slots == one).all(1)
        flags[same] |= flags[same].any(0)  # of the same slots only the embedding's flags can differ
    kinds = [Kind(*row)._replace(parity=odd) for row, odd in zip(flags.tolist(), parity.tolist(), strict=True)]
    return TickTables(kinds, embed[:ticks], gradient[:ticks], loss[:ticks], gather_chunk[:ticks], reduce_chunk[:ticks])


def _shift(values: np.ndarray, ticks: int) -> np.ndarray:
    """Returns the values `ticks` later (earlier if negative), NONE where nothing was."""
    shifted = np.full_like(values, NONE)
    if ticks >= 0:
        shifted[ticks:] = values[: len(values) - ticks]
    else:
        shifted[:ticks] = values[-ticks:]
    return shifted


def loop_nest(kinds: list[Kind]) -> list[Loop]:
    """Returns the loops that run the kinds in order, as few different bodies as greedy search finds."""
    runs: list[Loop] = []
    for kind in kinds:
        if runs and runs[-1].parts == (kind,):
            runs[-1] = Loop(runs[-1].repeats + 1, (kind,))
        else:
            runs.append(Loop(1, (kind,)))
    nest: list[Loop] = []
    while runs:
        length, repeats = _repetition(runs)
        nest.append(Loop(repeats, tuple(runs[:length])) if repeats > 1 else runs[0])
        runs = runs[length * repeats :]
    return nest


def _repetition(runs: list[Loop]) -> tuple[int, int]:
    """Returns (length, repeats) of the repeated beginning that covers the most runs; (1, 1): none repeats."""
    best = (1, 1)
    for length in range(2, len(runs) // 2 + 1):
        repeats = 1
        while runs[repeats * length : (repeats + 1) * length] == runs[:length]:
            repeats += 1
        if repeats > 1 and repeats * length > best[0] * best[1]:
            best = (length, repeats)
        if length >= 8:  # a period is two runs, or a few where group sizes differ
            break
    return best
