"""Runs a schedule's ticks inside shard_map: forward, loss and backward of every micro-batch, gradients added in fp32.

Talks on the pipeline axis: a ring permute of one micro-batch's activations for each forward slot and of their gradient
for each backward slot, and for every micro-batch the sum of its embeddings, of its last activations and of their
gradients over the stages, each of the activation's bytes. What the model's functions talk about comes on top.

In lock step all stages run the same slots, so there is no conditional; a stage that is idle in a slot computes on stale
data, and `where` drops what it computes (never a multiplication: stale data may be infinite). With half ticks a stage
runs its loop over layers for a forward, or the one for a backward, and neither talks to other stages. See README.md.

Source: Megatron-LM pipeline_parallel/schedules.py, arXiv:2104.04473 section 2.2.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jmegatron.collectives import sum_over, vary, vary_like
from jmegatron.partition import Tree
from jmegatron.pipeline.loops import Kind, Loop, embedding_lead, loop_nest, tick_tables
from jmegatron.pipeline.schedule import NONE, Ring, Schedule, rings
from jmegatron.pipeline.stage import Carry, PipelineModel, StageRunner, at, put, select_if

Row = dict[str, Any]
"""What a tick needs to know: entries for all stages, or [stages]."""


def run_pipeline(
    model: PipelineModel,
    schedule: Schedule,
    parameters: Tree,
    microbatches: Any,
    *,
    axis: str | None = None,
    reduce_layer: Callable[[Tree], Tree] | None = None,
    gather_layer: Callable[[Tree], Tree] | None = None,
    stale: float = 0.0,
) -> tuple[Tree, Tree]:
    """Returns (sums of the reported tree, fp32 sums of the gradients of the objective) over micro-batches.

    Communication: see above; for each micro-batch that of `model.embed` and `model.loss`, for each slot that of
    `model.runs` for each layer of a chunk. Nothing over axes that the parameters already vary over.

    Args:
      model: what is run.
      schedule: for as many stages as `axis` has ranks.
      parameters: this rank's, in the compute dtype; gradients come in it and are accumulated in fp32.
      microbatches: pytree whose leaves have a leading dim `num_microbatches`; the same on all stages.
      axis: mesh axis of the stages; None: one stage.
      reduce_layer: fp32 gradients of one layer -> the same reduced over other axes (perhaps to this rank's part). If
        given, it runs for each layer inside the backward loop of the last micro-batch of each chunk, where the next
        layer's backward hides it, and the gradients of layers come back reduced. Not with half ticks.
      gather_layer: this rank's part of one layer's parameters -> the whole ones. If given, `parameters` holds parts of
        the layers; each layer is gathered inside the forward loop of the first micro-batch of its chunk, where the
        layer before hides it. Not with half ticks.
      stale: what buffers hold before anything is written to them (tests put garbage there).
    """
    if schedule.half_ticks and not (reduce_layer is gather_layer is None):
        raise ValueError(
            f"schedule {schedule.name}: its loops do not run on all stages, no reduction or gather fits there"
        )
    kind = _HalfTicks if schedule.half_ticks else _LockStep
    carry = kind(
        model,
        schedule,
        parameters,
        microbatches,
        axis,
        stale=stale,
        reduce_layer=reduce_layer,
        gather_layer=gather_layer,
    ).run()
    if reduce_layer is None:
        return carry["report"], carry["gradients"]
    return carry["report"], {**carry["gradients"], model.layers: carry["reduced"]}


def run_forward(
    model: PipelineModel, schedule: Schedule, parameters: Tree, microbatches: Any, *, axis: str | None = None
) -> Tree:
    """Returns the sums of the reported tree over micro-batches, without gradients. Arguments as `run_pipeline`."""
    kind = _HalfTicks if schedule.half_ticks else _LockStep
    return kind(model, schedule, parameters, microbatches, axis, backward=False).run()["report"]


class _Ticks(StageRunner):
    """One run of a schedule. `carry` holds what goes from tick to tick:

    report, gradients     sums so far
    embedded              embeddings that stage 0 takes next
    residuals             of chunks in flight, for each run of layers [places, units of the run, ...]
    input_gradient        gradient of the input of the last backward

    and what the kind of schedule adds.
    """

    def __init__(
        self,
        model: PipelineModel,
        schedule: Schedule,
        parameters: Tree,
        microbatches: Any,
        axis: str | None,
        *,
        backward: bool = True,
        stale: float = 0.0,
        reduce_layer: Callable[[Tree], Tree] | None = None,
        gather_layer: Callable[[Tree], Tree] | None = None,
    ):
        super().__init__(model, schedule.num_stages, parameters, microbatches, axis, stale, reduce_layer, gather_layer)
        self.schedule, self.backward = schedule, backward
        self.tables = tick_tables(
            schedule, backward=backward, reduce=reduce_layer is not None, gather=gather_layer is not None
        )
        self.rings = rings(schedule)

    def run(self) -> Carry:
        """Runs all ticks and returns the last carry."""
        # Named so that a traced step tells what goes from tick to tick (`planner.buffers`); no operation.
        carry = {
            name: jax.tree.map(lambda x, name=name: checkpoint_name(x, f"carry/{name}"), part)
            for name, part in self.start().items()
        }
        first = 0
        for loop in loop_nest(self.tables.kinds):
            carry = self._run_loop(loop, carry, self._rows(first, first + loop.num_ticks))
            first += loop.num_ticks
        if self.backward and embedding_lead(self.schedule):
            last = int(self.schedule.backward_microbatch[-1, 0])
            carry = self.embed_gradient(carry, jnp.int32(last))
        return carry

    def start(self) -> Carry:
        """Returns the carry before the first tick."""
        carry: Carry = {"report": jax.tree.map(lambda t: vary_like(jnp.zeros(t.shape, t.dtype), t), self.report_type)}
        if self.num_stages > 1:
            carry["embedded"] = self.embed(jnp.int32(self.schedule.forward_microbatch[0, 0]))
        if self.gather_layer is not None:
            carry["layers"] = self.layer_buffers(lambda layer: layer)
        if self.backward:
            carry["gradients"] = self.gradient_buffers()
            size = self.rings.residuals.size
            carry["residuals"] = [[self.buffer(t, size, run.num_units) for t in run.types] for run in self.runs]
            if self.reduce_layer is not None:
                carry["reduced"] = self.reduced_buffers()
            if self.num_stages > 1:
                carry["input_gradient"] = self.buffer(self.x_type)
        return carry

    def tick(self, carry: Carry, row: Row, kind: Kind) -> Carry:
        """Returns the carry after one tick."""
        raise NotImplementedError

    def _rows(self, begin: int, end: int) -> Row:
        """Returns what the ticks begin .. end - 1 need to know, [ticks] for all stages or [ticks, stages]."""
        schedule, tables = self.schedule, self.tables
        places = lambda ring: {"write": ring.write, "read": ring.read}  # noqa: E731
        every: Row = {
            "embed": tables.embed_microbatch,
            "embed_gradient": tables.embed_gradient_microbatch,
            "loss": tables.loss_microbatch,
            "gather": tables.gather_chunk,
            "reduce": tables.reduce_chunk,
            "forward": {"microbatch": schedule.forward_microbatch, "chunk": schedule.forward_chunk},
            "backward": {"microbatch": schedule.backward_microbatch, "chunk": schedule.backward_chunk},
            "rings": {name: places(ring) for name, ring in self.rings._asdict().items()},
        }
        return jax.tree.map(lambda table: jnp.asarray(table[begin:end]), every)

    def _run_loop(self, loop: Loop, carry: Carry, rows: Row) -> Carry:
        part = loop.parts[0]
        if isinstance(part, Kind):
            if loop.repeats == 1:
                return self.tick(carry, jax.tree.map(lambda table: table[0], rows), part)
            return lax.scan(lambda carry, row: (self.tick(carry, row, part), None), carry, rows)[0]

        def body(carry: Carry, rows: Row) -> tuple[Carry, None]:
            first = 0
            for part in loop.parts:
                assert isinstance(part, Loop)
                own = jax.tree.map(lambda table, a=first, b=first + part.num_ticks: table[a:b], rows)
                carry = self._run_loop(part, carry, own)
                first += part.num_ticks
            return carry, None

        return lax.scan(body, carry, jax.tree.map(lambda t: t.reshape(loop.repeats, -1, *t.shape[1:]), rows))[0]

    # ---- what all stages do together ----
    def loss(self, carry: Carry, microbatch: Array, y: Array) -> tuple[Array | None, Carry]:
        """Adds the loss of the last stage's y, and returns its gradient with respect to that y (the same everywhere).

        Communication: that of `from_last_stage` and of the model's loss.
        """
        if not self.backward:
            return None, self.add_report(carry, self.loss_value(microbatch, y)[1])
        y = self.from_last_stage(y)
        one = self.microbatch(microbatch)
        loss = lambda parameters, y: self.model.loss(parameters, y, one)  # noqa: E731
        gradients, report = jax.grad(loss, (0, 1), has_aux=True)(self.model.loss_parameters(self.parameters), y)
        return vary(gradients[1], self.stages), self.add_gradients(self.add_report(carry, report), gradients[0])

    def embed_gradient(self, carry: Carry, microbatch: Array) -> Carry:
        """Adds the gradient of the embeddings of the micro-batch that stage 0 ran backward in the last tick.

        Communication: an all-reduce of an activation over the stages.
        """
        wanted = (self.stage == 0) & (microbatch != NONE)
        gradient = sum_over(select_if(wanted, carry["input_gradient"]), self.axis)
        return self.add_gradients(carry, self.embed_vjp(microbatch)[1](gradient)[0])


class _LockStep(_Ticks):
    """All stages run a forward slot and then a backward slot. In the carry also:

    received       activations that came from the stage before at the end of the last tick
    output         activations of the last forward, where the loss comes a tick later
    waiting_*      ring buffers for messages that are not used in the tick in which they arrive

    `input_gradient` is sent at the start of the next tick: it is needed only after that tick's forward, which hides the
    permute.
    """

    def start(self) -> Carry:
        """Returns the carry before the first tick."""
        carry = super().start()
        if self.num_stages == 1:
            return carry
        carry["received"] = self.buffer(self.x_type)
        if self.schedule.loss_delay:
            carry["output"] = self.buffer(self.x_type)
        waiting = {"inputs": self.rings.inputs}
        if self.backward:
            waiting |= {"gradients": self.rings.gradients, "losses": self.rings.losses}
        for name, ring in waiting.items():
            if not ring.immediate:
                carry[f"waiting_{name}"] = self.buffer(self.x_type, ring.size)
        return carry

    def tick(self, carry: Carry, row: Row, kind: Kind) -> Carry:
        """Returns the carry after one tick."""
        if self.num_stages == 1:
            return self._tick_of_one_stage(carry, row, kind)
        embedded, previous, gradient = carry["embedded"], carry.get("output"), None
        if kind.backward:
            gradient = self._permute(carry["input_gradient"], -1)
        if kind.embed_gradient:
            carry = self.embed_gradient(carry, row["embed_gradient"])
        if kind.embed:
            carry = {**carry, "embedded": self.embed(row["embed"])}
        y, loss_gradient = None, None
        if kind.forward:
            y, gradient, carry = self._forward(carry, row, kind, embedded, gradient)
        if kind.loss:
            y = previous if self.schedule.loss_delay else y
            assert y is not None
            loss_gradient, carry = self.loss(carry, row["loss"], y)
        if self.backward and (kind.backward or kind.loss):
            carry = self._backward(carry, row, kind, gradient, loss_gradient)
        return carry

    def _tick_of_one_stage(self, carry: Carry, row: Row, kind: Kind) -> Carry:
        """Forward, loss and backward of one micro-batch: nothing has to be kept for another tick."""
        if self.rings.residuals.size > 1:
            raise ValueError(f"schedule {self.schedule.name}: expected 1f1b with one stage")
        microbatch, chunk, place = row["forward"]["microbatch"][0], jnp.int32(0), 0
        embedded, embed_vjp = self.embed_vjp(microbatch)
        gather_chunk = row["gather"] if kind.gather else None
        y, carry = self.chunk_forward(carry, embedded, microbatch, chunk, place, gather_chunk=gather_chunk)
        gradient, carry = self.loss(carry, row["loss"], y)
        if gradient is None:
            return carry
        reduce_chunk = row["reduce"] if kind.reduce else None
        gradient, carry = self.chunk_backward(carry, gradient, microbatch, chunk, place, reduce_chunk=reduce_chunk)
        return self.add_gradients(carry, embed_vjp(gradient)[0])

    def _permute(self, x: Array, direction: int) -> Array:
        """Returns the neighbour's x: the stage before's (+1) or the stage after's (-1); a ring with several chunks."""
        p = self.num_stages
        pairs = [(stage, stage + direction) for stage in range(p)]
        if self.num_chunks > 1:
            pairs = [(a, b % p) for a, b in pairs]
        assert self.axis is not None
        return lax.ppermute(x, self.axis, [(a, b) for a, b in pairs if 0 <= b < p])

    def _through_ring(self, carry: Carry, name: str, ring: Ring, row: Row, value: Array) -> tuple[Array, Carry]:
        """Writes what has arrived and returns what is read in this tick."""
        if ring.immediate:
            return value, carry
        buffer = put(carry[f"waiting_{name}"], value, self.own(row["rings"][name]["write"]))
        return at(buffer, self.own(row["rings"][name]["read"])), {**carry, f"waiting_{name}": buffer}

    def _forward(
        self, carry: Carry, row: Row, kind: Kind, embedded: Array, gradient: Array | None
    ) -> tuple[Array, Array | None, Carry]:
        """Returns (output, the gradient as it was, carry)."""
        microbatch, chunk = self.own(row["forward"]["microbatch"]), self.own(row["forward"]["chunk"])
        received, carry = self._through_ring(carry, "inputs", self.rings.inputs, row, carry["received"])
        from_embedding = (self.stage == 0) & (chunk == 0)
        x = jnp.where(from_embedding, vary(embedded, self.stages), received)
        place = self.own(row["rings"]["residuals"]["write"])
        gather_chunk = row["gather"] if kind.gather else None
        y, carry = self.chunk_forward(carry, x, microbatch, chunk, place, gather_chunk=gather_chunk)
        if gradient is not None:
            # Nothing goes on from this chunk before the gradient has come: so its permute starts before the chunk.
            y, gradient = lax.optimization_barrier((y, gradient))
        carry = {**carry, "received": self._permute(y, 1)}
        if "output" in carry:
            carry["output"] = y
        return y, gradient, carry

    def _backward(
        self, carry: Carry, row: Row, kind: Kind, gradient: Array | None, loss_gradient: Array | None
    ) -> Carry:
        """Runs a chunk's backward; without a backward slot only stores the loss's gradient."""
        if loss_gradient is None:
            loss_gradient = self.like_x(0.0)
        loss_gradient, carry = self._through_ring(carry, "losses", self.rings.losses, row, loss_gradient)
        if not kind.backward:
            return carry
        assert gradient is not None
        gradient, carry = self._through_ring(carry, "gradients", self.rings.gradients, row, gradient)
        microbatch, chunk = self.own(row["backward"]["microbatch"]), self.own(row["backward"]["chunk"])
        from_loss = (self.stage == self.num_stages - 1) & (chunk == self.num_chunks - 1)
        gradient = jnp.where(from_loss, loss_gradient, gradient)
        place = self.own(row["rings"]["residuals"]["read"])
        reduce_chunk = row["reduce"] if kind.reduce else None
        gradient, carry = self.chunk_backward(carry, gradient, microbatch, chunk, place, reduce_chunk=reduce_chunk)
        return {**carry, "input_gradient": gradient}


class _HalfTicks(_Ticks):
    """A stage runs forward where its number has the tick's parity, and backward where not. In the carry also:

    received       what the neighbour sent at the end of the last half tick: activations before a forward, the gradient
                   of the output before a backward (of the last stage: from the loss)

    After half tick t the stages (s, s + 1) with s of parity t swap activations and gradient in one permute. A stage
    chooses its work by how often its loops over layers run: in such a loop only collectives over other axes may stand,
    since a permute that some stages do not reach would wait for ever. Embedding and loss stand outside, on all stages.
    (A conditional does the same, but XLA copies the buffers that pass through it: 40 % more memory than 1f1b.)
    """

    def start(self) -> Carry:
        """Returns the carry before the first half tick."""
        return {**super().start(), "received": self.buffer(self.x_type)}

    def tick(self, carry: Carry, row: Row, kind: Kind) -> Carry:
        """Returns the carry after one half tick."""
        embedded = carry["embedded"]
        if kind.embed_gradient:
            carry = self.embed_gradient(carry, row["embed_gradient"])
        if kind.embed:
            carry = {**carry, "embedded": self.embed(row["embed"])}
        output, carry = self._work(carry, row, kind, embedded)
        loss_gradient = None
        if kind.loss:
            loss_gradient, carry = self.loss(carry, row["loss"], output)
        received = self._swap(output, kind.parity)
        if loss_gradient is not None:
            received = jnp.where(self.stage == self.num_stages - 1, loss_gradient, received)
        carry = {**carry, "received": received}
        return {**carry, "input_gradient": output} if self.backward else carry

    def _work(self, carry: Carry, row: Row, kind: Kind, embedded: Array) -> tuple[Array, Carry]:
        """Returns (activations after a forward, gradient of the input after a backward; carry).

        The loops over layers run as many times as there are layers, or not at all.
        """
        chunk = jnp.int32(0)
        forward = self.own(row["forward"]["microbatch"])
        x = jnp.where(self.stage == 0, vary(embedded, self.stages), carry["received"])
        place = self.own(row["rings"]["residuals"]["write"])
        output, carry = self.chunk_forward(carry, x, forward, chunk, place, active=forward != NONE)
        if kind.backward:
            backward = self.own(row["backward"]["microbatch"])
            place = self.own(row["rings"]["residuals"]["read"])
            active = backward != NONE
            gradient, carry = self.chunk_backward(carry, carry["received"], backward, chunk, place, active=active)
            output = jnp.where(active, gradient, output)
        return output, carry

    def _swap(self, x: Array, parity: int) -> Array:
        """Returns the neighbour's x, where stages (s, s + 1) with s of the parity are neighbours."""
        firsts = range(parity, self.num_stages - 1, 2)
        assert self.axis is not None
        return lax.ppermute(x, self.axis, [pair for s in firsts for pair in ((s, s + 1), (s + 1, s))])
