"""Pipeline schedules as tables, and what they cost. numpy only, no communication.

A schedule says for every tick and stage which chunk of which micro-batch runs forward and which runs backward. All
stages run the same program, so a tick has at most one forward slot and then at most one backward slot, on all stages
alike; a stage with nothing to do in a slot computes on stale data, and its results are dropped.

    1f1b             every stage runs micro-batches in order, stage r delayed by r ticks; the backward slots mirror that
    interleaved      the same with v chunks a stage (arXiv:2104.04473 section 2.2, Megatron-LM get_schedule_table)
    gpipe            all forward slots, then all backward slots (arXiv:1811.06965)
    1f1b-low-memory  half ticks: a stage runs forward or backward, at most p micro-batches in flight

Order of work, for m micro-batches in groups: forward, a group's micro-batches through chunk 0, then chunk 1, ...;
backward the same with the chunks from last to first. Stage r runs forward entry k at tick r + k and backward entry k at
tick f + (p - 1 - r) + k, with f the tick of the first backward: p - 1 + (v - 1) g for groups of g micro-batches.

Sources: Megatron-LM pipeline_parallel/schedules.py:949-1016 (warm-up counts and order), :1160-1180 (groups).
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from jmegatron.errors import ConfigError

SCHEDULES = ("1f1b", "interleaved", "1f1b-low-memory", "gpipe")
NONE = -1
"""Stands for no micro-batch in a table."""

_GROUP_FLAG = "--microbatch-group-size-per-virtual-pipeline-stage"


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The work of every stage at every tick. Tables are int32 [ticks, stages], read-only; NONE where a slot is idle."""

    name: str
    num_stages: int
    num_chunks: int
    num_microbatches: int
    forward_microbatch: np.ndarray
    forward_chunk: np.ndarray
    backward_microbatch: np.ndarray
    backward_chunk: np.ndarray
    loss_delay: int = 0
    """Ticks from a micro-batch's last forward chunk to its loss."""

    @property
    def num_ticks(self) -> int:
        """Ticks from the first forward to the last backward."""
        return len(self.forward_microbatch)

    @property
    def half_ticks(self) -> bool:
        """Whether a stage runs forward or backward in a tick, instead of forward and then backward."""
        return self.name == "1f1b-low-memory"

    @property
    def forward_slots(self) -> np.ndarray:
        """Bool [ticks]: whether the program has a forward slot there."""
        return _span((self.forward_microbatch != NONE).any(1))

    @property
    def backward_slots(self) -> np.ndarray:
        """Bool [ticks]: whether the program has a backward slot there."""
        return _span((self.backward_microbatch != NONE).any(1))

    @property
    def forward_tick(self) -> np.ndarray:
        """Int [stages, microbatches, chunks]: tick of each forward."""
        return self._ticks(self.forward_microbatch, self.forward_chunk)

    @property
    def backward_tick(self) -> np.ndarray:
        """Int [stages, microbatches, chunks]: tick of each backward."""
        return self._ticks(self.backward_microbatch, self.backward_chunk)

    def _ticks(self, microbatch: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        ticks = np.full((self.num_stages, self.num_microbatches, self.num_chunks), NONE)
        tick, stage = np.nonzero(microbatch != NONE)
        ticks[stage, microbatch[tick, stage], chunk[tick, stage]] = tick
        return ticks

    def order(self, stage: int) -> list[tuple[str, int, int]]:
        """Returns ("F" or "B", micro-batch, chunk) in the order in which a stage runs them, idle slots left out."""
        work = []
        for tick in range(self.num_ticks):
            for letter, microbatch, chunk in (
                ("F", self.forward_microbatch, self.forward_chunk),
                ("B", self.backward_microbatch, self.backward_chunk),
            ):
                if microbatch[tick, stage] != NONE:
                    work.append((letter, int(microbatch[tick, stage]), int(chunk[tick, stage])))
        return work


def _span(used: np.ndarray) -> np.ndarray:
    """Returns `used` with the gaps between the first and the last True filled."""
    places = np.flatnonzero(used)
    span = np.zeros_like(used)
    if len(places):
        span[places[0] : places[-1] + 1] = True
    return span


# ---- building -----------------------------------------------------------------------------------------------------
def group_sizes(num_microbatches: int, num_stages: int, group_size: int | None = None) -> list[int]:
    """Returns how many micro-batches go through a chunk before the next chunk follows.

    A group must have at least p micro-batches, or the next chunk's first input is not there in time. By default the
    sizes are as equal as they can be and as near to p (all p where p divides m, which is the reference's default); with
    fewer than p micro-batches there is one group.

    Args:
      num_microbatches: m, of a step and data-parallel rank.
      num_stages: p.
      group_size: what `--microbatch-group-size-per-virtual-pipeline-stage` asks for.

    Raises:
      ConfigError: the group size does not fit.
    """
    m, p = num_microbatches, num_stages
    if group_size is None:
        groups = max(m // p, 1)
        return [m // groups + (i < m % groups) for i in range(groups)]
    rest = m % group_size if group_size > 0 else 0
    if not p <= group_size <= max(m, p) or 0 < rest < p <= m:
        raise ConfigError(
            f"{_GROUP_FLAG}: got {group_size} with {m} micro-batches and {p} stages (a last group of {rest}); expected"
            f" {p} .. {max(m, p)}, and a last group of {p} or more; fix: leave it out (groups of"
            f" {', '.join(map(str, sorted(set(group_sizes(m, p)))))}), or give {max(m, p)}"
        )
    return [min(group_size, m - first) for first in range(0, m, group_size)]


def build_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    group_size: int | None = None,
    loss_delay: int = 0,
) -> Schedule:
    """Returns a schedule, checked by `check_schedule`.

    Args:
      name: one of SCHEDULES.
      num_stages: p.
      num_microbatches: m, of a step and data-parallel rank.
      num_chunks: v, chunks a stage.
      group_size: see `group_sizes`; for several chunks.
      loss_delay: 1 computes each loss one tick after the micro-batch's last forward, beside the next forward: one more
        chunk in flight (not for 1f1b-low-memory).

    Raises:
      ConfigError: a number is below 1, or the schedule does not exist for these numbers.
    """
    p, m, v = num_stages, num_microbatches, num_chunks
    if name not in SCHEDULES:
        raise ConfigError(f"--pipeline-schedule: got {name!r}, expected one of {', '.join(SCHEDULES)}")
    if min(p, m, v) < 1:
        raise ConfigError(
            f"pipeline schedule: got {p} stages, {m} micro-batches, {v} chunks a stage; expected 1 or more of each;"
            " fix: --pipeline-model-parallel-size, --global-batch-size, --num-virtual-stages-per-pipeline-rank"
        )
    if v > 1 and name in ("1f1b", "1f1b-low-memory"):
        raise ConfigError(
            f"--pipeline-schedule {name}: got {v} chunks a stage, expected 1; fix: --pipeline-schedule interleaved, or"
            " leave --num-virtual-stages-per-pipeline-rank out"
        )
    if loss_delay not in (0, 1):
        raise ConfigError(f"pipeline schedule: got a loss {loss_delay} ticks after its forward, expected 0 or 1")
    if group_size is not None and v == 1:
        raise ConfigError(f"{_GROUP_FLAG} {group_size}: expected several chunks a stage; fix: leave it out")
    if name == "1f1b-low-memory":
        schedule = _half_ticks(p, m)
    else:
        schedule = _lock_step(name, p, m, v, group_sizes(m, p, group_size) if v > 1 else [m], loss_delay)
    check_schedule(schedule)
    return schedule


def _entries(groups: list[int], num_stages: int, num_chunks: int) -> list[tuple[int, int]]:
    """Returns the forward work (micro-batch, chunk) of a stage, one entry a tick; micro-batch NONE: idle."""
    entries, first = [], 0
    for size in groups:
        idle = max(num_stages - size, 0) if num_chunks > 1 else 0  # the next chunk's input comes p ticks later
        for chunk in range(num_chunks):
            entries += [(first + i, chunk) for i in range(size)]
            if chunk < num_chunks - 1:
                entries += [(NONE, 0)] * idle
        first += size
    return entries


def _lock_step(name: str, p: int, m: int, v: int, groups: list[int], loss_delay: int) -> Schedule:
    forward = _entries(groups, p, v)
    backward = [(microbatch, v - 1 - chunk if microbatch != NONE else 0) for microbatch, chunk in forward]
    length = len(forward)
    first_backward = p - 1 + (v - 1) * max(max(groups), p if v > 1 else 0) + loss_delay
    if name == "gpipe":
        first_backward = length + p - 1
    ticks = first_backward + p - 1 + length
    tables = np.zeros((4, ticks, p), np.int32)
    tables[0::2] = NONE
    for stage in range(p):
        tables[0:2, stage : stage + length, stage] = np.array(forward).T
        start = first_backward + p - 1 - stage
        tables[2:4, start : start + length, stage] = np.array(backward).T
    return _frozen(name, p, m, v, tables, loss_delay)


def _half_ticks(p: int, m: int) -> Schedule:
    """Stage s runs forward at half ticks s, s + 2, ..., backward at 2p - 1 - s, 2p + 1 - s, ..."""
    tables = np.zeros((4, 2 * (m + p - 1), p), np.int32)
    tables[0::2] = NONE
    for stage in range(p):
        tables[0, stage : stage + 2 * m : 2, stage] = np.arange(m)
        start = 2 * p - 1 - stage
        tables[2, start : start + 2 * m : 2, stage] = np.arange(m)
    return _frozen("1f1b-low-memory", p, m, 1, tables, 0)


def _frozen(name: str, p: int, m: int, v: int, tables: np.ndarray, loss_delay: int) -> Schedule:
    tables.flags.writeable = False
    forward_microbatch, forward_chunk, backward_microbatch, backward_chunk = tables
    return Schedule(
        name, p, v, m, forward_microbatch, forward_chunk, backward_microbatch, backward_chunk, loss_delay=loss_delay
    )


def check_schedule(schedule: Schedule) -> None:
    """Checks that every chunk of every micro-batch runs once each way on every stage, after what it needs.

    A message takes the step between two ticks. Within a tick the forward slot comes first, then the loss, then the
    backward slot.

    Raises:
      ValueError: it does not hold; the first place is named.
    """
    p, v, m = schedule.num_stages, schedule.num_chunks, schedule.num_microbatches
    for name, microbatch, chunk in (
        ("forward", schedule.forward_microbatch, schedule.forward_chunk),
        ("backward", schedule.backward_microbatch, schedule.backward_chunk),
    ):
        counts = np.zeros((p, m, v), int)
        tick, stage = np.nonzero(microbatch != NONE)
        place = (stage, microbatch[tick, stage], chunk[tick, stage])
        for index, size in zip(place, counts.shape, strict=True):
            if (index < 0).any() or (index >= size).any():
                raise ValueError(f"{schedule.name}: {name} work outside {m} micro-batches and {v} chunks")
        np.add.at(counts, place, 1)
        for r, i, c in np.argwhere(counts != 1)[:1].tolist():
            times = counts[r, i, c]
            raise ValueError(f"{schedule.name}: {name} of micro-batch {i}, chunk {c} runs {times} times on stage {r}")
    # Path of a micro-batch: chunk 0 on stages 0 .. p - 1, chunk 1 on stages 0 .. p - 1, ...
    path = lambda ticks: ticks.transpose(1, 2, 0).reshape(m, v * p)  # noqa: E731
    forward, backward = path(schedule.forward_tick), path(schedule.backward_tick)
    turn = backward[:, -1:] - forward[:, -1:] - schedule.loss_delay
    late_forward = np.diff(forward, axis=1, prepend=-1) < 1
    late_backward = np.append(-np.diff(backward, axis=1), turn + (not schedule.half_ticks), axis=1) < 1
    for name, late in (("forward", late_forward), ("backward", late_backward)):
        for i, place in np.argwhere(late)[:1].tolist():
            where = f"chunk {place // p} on stage {place % p}"
            raise ValueError(f"{schedule.name}: {name} of micro-batch {i}, {where}, runs before what it needs")
    both = (schedule.forward_microbatch != NONE) & (schedule.backward_microbatch != NONE)
    if schedule.half_ticks and both.any():
        raise ValueError(f"{schedule.name}: half tick {np.argwhere(both)[0, 0]} has a forward and a backward")


# ---- what the reference runs --------------------------------------------------------------------------------------
def num_warmup(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1, group_size: int | None = None
) -> int:
    """Returns the forward chunks that a stage of the reference runs before its first pair of forward and backward.

    Source: Megatron-LM schedules.py:949-978 and 2276-2279.
    """
    p, m, v = num_stages, num_microbatches, num_chunks
    if v == 1:
        return min(p - stage - 1, m)
    return min((p - stage - 1) * 2 + (v - 1) * (group_size or p), m * v)


def reference_order(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1, group_size: int | None = None
) -> list[tuple[str, int, int]]:
    """Returns ("F" or "B", micro-batch, chunk) in the order in which a stage of the reference runs them.

    The forward order and the backward order are those of `Schedule.order`; the reference starts its backward earlier
    or later because its stages do not wait for one another at every tick. Source: as `num_warmup`.
    """
    p, m, v = num_stages, num_microbatches, num_chunks
    groups = [m] if v == 1 else group_sizes(m, p, group_size)
    forward = [entry for entry in _entries(groups, p, v) if entry[0] != NONE]
    backward = [(microbatch, v - 1 - chunk) for microbatch, chunk in forward]
    warmup = num_warmup(stage, p, m, v, max(groups) if v > 1 else None)
    order = [("F", *entry) for entry in forward[:warmup]]
    for k in range(len(forward) - warmup):
        order += [("F", *forward[warmup + k]), ("B", *backward[k])]
    return order + [("B", *entry) for entry in backward[len(forward) - warmup :]]


# ---- simulation ---------------------------------------------------------------------------------------------------
class Simulation(NamedTuple):
    """What a step costs under a schedule."""

    total: float
    """Time from the first slot to the last, in units of the given costs."""
    ideal: float
    """Time of the work alone: m v (forward + backward)."""
    bubble: float
    """(total - ideal) / ideal."""
    bubble_of_total: float
    """(total - ideal) / total."""
    num_ticks: int
    """Ticks (half ticks for 1f1b-low-memory)."""
    num_forward_slots: int
    """Forward slots that every stage executes, idle ones included."""
    num_backward_slots: int
    """Backward slots that every stage executes, idle ones included."""
    in_flight: np.ndarray
    """int [stages]: the most chunks of micro-batches between their forward and the end of their backward."""
    messages: np.ndarray
    """int [2, stages]: sends from each stage to the next (forward) and to the previous (backward), idle ones left out."""  # noqa: E501


def slot_costs(schedule: Schedule, forward_cost: float, backward_cost: float) -> np.ndarray:
    """Returns float [2, ticks]: what the forward slot and the backward slot of each tick take, 0 where there is none.

    In lock step a tick takes their sum, with half ticks the larger one.
    """
    costs = np.stack([schedule.forward_slots * float(forward_cost), schedule.backward_slots * float(backward_cost)])
    if schedule.half_ticks:
        costs[0] *= (schedule.forward_microbatch != NONE).any(1)
        costs[1] *= (schedule.backward_microbatch != NONE).any(1)
    return costs


def simulate(schedule: Schedule, forward_cost: float = 1.0, backward_cost: float = 2.0) -> Simulation:
    """Returns the cost of a schedule, slot by slot; times of messages are not counted.

    In lock step a tick takes what its slots take on any stage. With half ticks each stage waits for its neighbour's
    half tick to end, so every half tick takes the longer of forward and backward that runs anywhere.

    Args:
      schedule: the table.
      forward_cost: of one chunk.
      backward_cost: of one chunk.
    """
    forward, backward = schedule.forward_slots, schedule.backward_slots
    costs = slot_costs(schedule, forward_cost, backward_cost)
    total = float((costs.max(0) if schedule.half_ticks else costs.sum(0)).sum())
    ideal = schedule.num_microbatches * schedule.num_chunks * (forward_cost + backward_cost)
    p, v = schedule.num_stages, schedule.num_chunks
    messages = np.zeros((2, p), int)
    for stage in range(p):
        work = schedule.forward_chunk[:, stage][schedule.forward_microbatch[:, stage] != NONE]
        messages[0, stage] = len(work) if stage < p - 1 else int((work < v - 1).sum()) * (p > 1)
        work = schedule.backward_chunk[:, stage][schedule.backward_microbatch[:, stage] != NONE]
        messages[1, stage] = len(work) if stage > 0 else int((work > 0).sum()) * (p > 1)
    return Simulation(
        total=total,
        ideal=ideal,
        bubble=(total - ideal) / ideal,
        bubble_of_total=(total - ideal) / total,
        num_ticks=schedule.num_ticks,
        num_forward_slots=int(forward.sum()),
        num_backward_slots=int(backward.sum()),
        in_flight=in_flight(schedule),
        messages=messages,
    )


def in_flight(schedule: Schedule) -> np.ndarray:
    """Returns int [stages]: the most chunks whose activations a stage keeps at a time."""
    counts = np.zeros((schedule.num_ticks + 1, schedule.num_stages), int)
    for stage in range(schedule.num_stages):
        np.add.at(counts[:, stage], schedule.forward_tick[stage].ravel(), 1)
        np.add.at(counts[:, stage], schedule.backward_tick[stage].ravel() + 1, -1)
    return counts.cumsum(0).max(0)


# ---- rings --------------------------------------------------------------------------------------------------------
class Ring(NamedTuple):
    """Places of a ring buffer: where each tick writes and where it reads. int32 [ticks, stages].

    A tick without anything to keep writes to a place that holds nothing wanted; one without anything to read reads
    from any place.
    """

    size: int
    write: np.ndarray
    read: np.ndarray
    immediate: bool
    """Every value is read in the tick that writes it: no buffer is needed."""


class Rings(NamedTuple):
    """The buffers that a lock-step executor needs."""

    residuals: Ring
    """Inputs and residuals of chunks, from their forward to their backward."""
    inputs: Ring
    """Activations from the stage before, from their arrival to their forward."""
    gradients: Ring
    """Gradients of outputs from the stage after, from their arrival to their backward."""
    losses: Ring
    """Gradients of outputs from the loss, on the last stage, from the loss to their backward."""


def rings(schedule: Schedule) -> Rings:
    """Returns the buffers of a lock-step schedule, each of the smallest size that serves every stage."""
    forward, backward = schedule.forward_tick, schedule.backward_tick
    p, v, ticks = schedule.num_stages, schedule.num_chunks, schedule.num_ticks
    input_from, input_to = [], []
    gradient_from, gradient_to = [], []
    for stage in range(p):
        first = int(stage == 0)  # chunk 0 of stage 0 comes from the embedding
        arrival = forward[stage - 1, :, : v - first] + 1
        input_from.append(arrival.ravel())
        input_to.append(forward[stage, :, first:].ravel())
        last = int(stage == p - 1)  # chunk v - 1 of stage p - 1 comes from the loss
        arrival = backward[(stage + 1) % p, :, last:] + 1
        gradient_from.append(arrival.ravel())
        gradient_to.append(backward[stage, :, : v - last].ravel())
    loss_from: list[np.ndarray] = [np.empty(0, int)] * p
    loss_to = list(loss_from)
    loss_from[-1] = forward[-1, :, -1] + schedule.loss_delay
    loss_to[-1] = backward[-1, :, -1]
    always = np.ones(ticks, bool)
    forward_writes = schedule.forward_slots
    if schedule.half_ticks:
        # A stage without a forward runs no layer and writes nothing.
        forward_writes = schedule.forward_microbatch != NONE
    per_stage = lambda table: [table[stage].ravel() for stage in range(p)]  # noqa: E731
    return Rings(
        residuals=_allocate(per_stage(forward), per_stage(backward), forward_writes),
        inputs=_allocate(input_from, input_to, always),
        gradients=_allocate(gradient_from, gradient_to, always),
        losses=_allocate(loss_from, loss_to, always),
    )


def _allocate(written: list[np.ndarray], read: list[np.ndarray], writes: np.ndarray) -> Ring:
    """Returns the places of a ring buffer.

    Args:
      written: for each stage int [values], the tick at which each value is written, all different.
      read: for each stage int [values], the tick at which it is read for the last time, at or after `written`.
      writes: bool [ticks]: ticks at which the program writes, wanted or not.
    """
    place_written = np.zeros((len(writes), len(written)), np.int32)
    place_read = np.zeros_like(place_written)
    size = 1
    writes = np.broadcast_to(writes.reshape(len(writes), -1), place_written.shape)
    for stage, (begins, ends) in enumerate(zip(written, read, strict=True)):
        due = dict(zip(begins.tolist(), ends.tolist(), strict=True))
        assert len(due) == len(begins), "two values in one tick"
        free_from: list[int] = []  # the tick from which each place is free
        for tick in np.flatnonzero(writes[:, stage]).tolist():
            place = next((i for i, free in enumerate(free_from) if free <= tick), len(free_from))
            if place == len(free_from):
                free_from.append(0)
            free_from[place] = due.get(tick, tick) + 1
            place_written[tick, stage] = place
            if tick in due:
                place_read[due[tick], stage] = place
        size = max(size, len(free_from))
    immediate = all(bool((begins == ends).all()) for begins, ends in zip(written, read, strict=True))
    return Ring(size, place_written, place_read, immediate)
