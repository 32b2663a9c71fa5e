"""One stage's work on one micro-batch: a chunk of layers forward and backward, the embedding, the loss.

Talks on the pipeline axis where all stages work together (embedding and loss); the rest is the model's own.

The layers of a chunk are a scan here and not in the model, so that what a layer's backward needs goes straight into its
place in a ring buffer and comes straight from there, and a layer's gradients are added where they belong: no copy of a
whole chunk's residuals, parameters or gradients is ever made.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool

from jmegatron.collectives import axis_rank, sum_over, vary, vary_like, varying_axes
from jmegatron.partition import Tree
from jmegatron.pipeline.schedule import NONE

Carry = dict[str, Any]
"""What goes from tick to tick, see `executor`."""
Rings = list[Array] | None
"""One ring buffer [places, layers of a chunk, ...] for each residual of a layer; None: nothing is kept."""


@dataclasses.dataclass(frozen=True)
class PipelineModel:
    """The parts of a model that a pipeline runs. Functions of plain arrays, to be differentiated here.

    `embed_parameters` and `loss_parameters` pick the sub-trees that the functions take out of the whole tree of
    parameters; gradients are put back at the same paths (added where a parameter is in both of them).
    """

    embed: Callable[[Tree, Any], Array]
    """(parameters, micro-batch) -> x [batch, seq_local, hidden], the same on all stages."""
    layer: Callable[[Tree, Array, Tree, Array], Array]
    """(parameters of one layer, x, context, global layer number) -> y like x. Number -1: no layer."""
    loss: Callable[[Tree, Array, Any], tuple[Array, Tree]]
    """(parameters, y, micro-batch) -> (objective, tree of sums to report), the same on all stages."""
    context: Callable[[Any], Tree]
    """micro-batch -> what every layer needs to know of it (a pytree that has no gradient)."""
    embed_parameters: Callable[[Tree], Tree]
    loss_parameters: Callable[[Tree], Tree]
    layers: str
    """Key of the stacked layers in the tree of parameters. Leaves [layers of this stage, ...]; with several chunks
    [chunks, layers of one, ...]."""
    places: tuple[tuple[int, ...], ...]
    """Global layer number of each place, [chunks, stages * layers of one], see `PipelineLayout.places`."""


# ---- small parts --------------------------------------------------------------------------------------------------
def at(tree: Any, *index: Any) -> Any:
    """Returns the entry at `index` of the leading dims of every leaf."""

    def leaf(a: Array) -> Array:
        rest = a.shape[len(index) :]
        start = [*index, *[0] * len(rest)]
        if jnp.issubdtype(a.dtype, jax.dtypes.extended):
            return a[tuple(index)]
        return lax.dynamic_slice(a, start, (*[1] * len(index), *rest)).reshape(rest)

    return jax.tree.map(leaf, tree)


def put(buffer: Array, value: Array, *index: Any) -> Array:
    """Returns the buffer with `value` at `index` of its leading dims."""
    value = vary_like(value, buffer).reshape(*[1] * len(index), *value.shape)
    return lax.dynamic_update_slice(buffer, value, [*index, *[0] * (buffer.ndim - len(index))])


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def _dependent(jaxpr: Any, roots: list[bool]) -> list[bool]:
    """Returns for each output of a closed jaxpr whether it depends on an input that is a root."""
    variables = {v for v, root in zip(jaxpr.jaxpr.invars, roots, strict=True) if root}
    for equation in jaxpr.jaxpr.eqns:
        inputs = [not hasattr(v, "val") and v in variables for v in equation.invars]
        # Into jitted functions, as jnp.where is one; whatever else calls a jaxpr mixes its inputs.
        called = equation.params.get("jaxpr") if equation.primitive.name in ("jit", "pjit") else None
        outputs = [any(inputs)] * len(equation.outvars) if called is None else _dependent(called, inputs)
        variables.update(v for v, depends in zip(equation.outvars, outputs, strict=True) if depends)
    return [not hasattr(v, "val") and v in variables for v in jaxpr.jaxpr.outvars]


def _add_at_paths(total: Tree, part: Tree) -> Tree:
    """Returns `total` with the leaves of `part` added at their paths, in the dtype of `total`."""
    if not isinstance(part, dict):
        return total + part.astype(total.dtype)
    return {**total, **{name: _add_at_paths(total[name], value) for name, value in part.items()}}


def select_if(flag: Bool[Array, ""], tree: Tree) -> Tree:
    """Returns the tree where the flag holds, else zeros."""
    return jax.tree.map(lambda leaf: jnp.where(flag, leaf, jnp.zeros((), leaf.dtype)), tree)


def _fixed(context: Tree) -> Tree:
    """Returns the context cut from the gradient."""
    cut = lambda leaf: lax.stop_gradient(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf  # noqa: E731
    return jax.tree.map(cut, context)


class StageRunner:
    """The work of one stage; every method may be called with values that differ from stage to stage.

    Args:
      model: what is run.
      num_stages: p.
      parameters: this rank's.
      microbatches: see `executor.run_pipeline`.
      axis: mesh axis of the stages, or None.
      stale: what buffers hold at first.
      reduce_layer: see `executor.run_pipeline`.
      gather_layer: see `executor.run_pipeline`.
    """

    def __init__(
        self,
        model: PipelineModel,
        num_stages: int,
        parameters: Tree,
        microbatches: Any,
        axis: str | None,
        stale: float,
        reduce_layer: Callable[[Tree], Tree] | None = None,
        gather_layer: Callable[[Tree], Tree] | None = None,
    ):
        self.reduce_layer, self.gather_layer = reduce_layer, gather_layer
        self.model, self.axis, self.num_stages = model, axis, num_stages
        self.parameters, self.microbatches, self.stale = parameters, microbatches, stale
        self.stage = axis_rank(axis)
        self.stages = (axis,) if axis is not None else ()
        places = np.asarray(model.places, np.int32)
        self.num_chunks = len(places)
        self.numbers = places.reshape(self.num_chunks, num_stages, -1).transpose(1, 0, 2)
        self.layers_per_chunk = self.numbers.shape[2]
        self._find_types()

    # ---- buffers ----
    def layer_buffers(self, how: Callable[[Tree], Tree]) -> Tree:
        """Returns zeros for what `how` makes of the parameters of each layer of this stage."""
        lead = (self.layers_per_chunk,) if self.num_chunks == 1 else (self.num_chunks, self.layers_per_chunk)
        one = jax.eval_shape(lambda: how(self._one_layer()))
        return jax.tree.map(lambda t: vary_like(jnp.zeros((*lead, *t.shape), t.dtype), t), one)

    def gradient_buffers(self) -> Tree:
        """Returns zeros for the gradients of all parameters of this rank, whole ones."""
        zeros = lambda p: vary_like(jnp.zeros(p.shape, jnp.float32), p)  # noqa: E731
        rest = {name: tree for name, tree in self.parameters.items() if name != self.model.layers}
        layers = self.layer_buffers(lambda layer: jax.tree.map(zeros, layer))
        return {**jax.tree.map(zeros, rest), self.model.layers: layers}

    def reduced_buffers(self) -> Tree:
        """Returns zeros for the reduced gradients of all layers of this stage."""
        reduce_layer = self.reduce_layer
        assert reduce_layer is not None
        zeros = lambda p: vary_like(jnp.zeros(p.shape, jnp.float32), p)  # noqa: E731
        return self.layer_buffers(lambda layer: reduce_layer(jax.tree.map(zeros, layer)))

    def layers_of(self, carry: Carry) -> Tree:
        """Returns the stacked parameters of this stage's layers, those that have been gathered so far."""
        return carry["layers"] if "layers" in carry else self.parameters[self.model.layers]

    def _one_layer(self) -> Tree:
        """Returns the whole parameters of this stage's first layer."""
        first = jnp.int32(0)
        layer = self._layer_at(self.parameters[self.model.layers], first, first)
        return layer if self.gather_layer is None else self.gather_layer(layer)

    # ---- types ----
    def _find_types(self) -> None:
        """Finds shapes, dtypes and varying axes of what goes from tick to tick, without computing anything."""
        first = jnp.int32(0)
        self.x_type = jax.eval_shape(lambda: vary(self._lookup(first), self.stages))
        # A layer's output may vary over more axes than the embeddings do; one pass through a layer tells.
        one_layer = lambda: self._layer_vjp(self._one_layer(), self.like_x(0.0), self.context(first), first)  # noqa: E731
        output = jax.eval_shape(lambda: one_layer()[0])
        self.x_type = jax.eval_shape(lambda: vary_like(self.like_x(0.0), output))
        self.embedding_axes = tuple(sorted(varying_axes(self.x_type) - set(self.stages)))
        self.kept = self._find_kept()
        residuals, x = jax.eval_shape(lambda: one_layer()[1][:2])
        kept = [leaf for leaf, keep in zip(residuals, self.kept, strict=True) if keep]
        self.input_needed = x is not None
        self.residual_types = kept + ([x] if self.input_needed else [])
        self.report_type = jax.eval_shape(lambda: self.loss_value(first, self.like_x(0.0))[1])

    def _find_kept(self) -> list[bool]:
        """Returns which residuals of a layer go into the ring.

        What depends neither on activations nor on parameters (masks, angles) is computed again in the backward. What
        depends on a random key is kept: drawing numbers is dear.
        """
        first = jnp.int32(0)
        arguments = jax.eval_shape(lambda: (self._one_layer(), self.like_x(0.0), self.context(first)))
        residuals = lambda parameters, x, context: self._layer_vjp(parameters, x, context, first)[1][0]  # noqa: E731
        jaxpr = jax.make_jaxpr(residuals)(*arguments)
        leaves = jax.tree.leaves(arguments)
        num_differentiated = len(jax.tree.leaves(arguments[:2]))
        roots = [i < num_differentiated or _is_key(leaf) for i, leaf in enumerate(leaves)]
        return [
            dependent and not _is_key(aval)
            for dependent, aval in zip(_dependent(jaxpr, roots), jaxpr.out_avals, strict=True)
        ]

    def like_x(self, fill: float) -> Array:
        """Returns an array like a stage's activations, filled."""
        return vary_like(jnp.full(self.x_type.shape, fill, self.x_type.dtype), self.x_type)

    # ---- the model's parts ----
    def microbatch(self, index: Array) -> Any:
        """Returns a micro-batch; that of NONE is any."""
        return at(self.microbatches, jnp.maximum(index, 0))

    def context(self, microbatch: Array) -> Tree:
        """Returns what the layers need to know of a micro-batch."""
        return self.model.context(self.microbatch(microbatch))

    def _lookup(self, index: Array) -> Array:
        return self.model.embed(self.model.embed_parameters(self.parameters), self.microbatch(index))

    def _embedding(self, parameters: Tree, index: Array) -> Array:
        """Returns the embeddings, marked as varying like the activations (but for the stages)."""
        return vary(self.model.embed(parameters, self.microbatch(index)), self.embedding_axes)

    def embed(self, index: Array) -> Array:
        """Returns the embeddings of a micro-batch, the same on all stages. Communication: that of the model's embed."""
        return self._embedding(self.model.embed_parameters(self.parameters), index)

    def embed_vjp(self, index: Array) -> tuple[Array, Callable[[Array], tuple[Tree]]]:
        """Returns (embeddings, gradient of them -> gradient of the embedding's parameters)."""
        embed = lambda parameters: self._embedding(parameters, index)  # noqa: E731
        return jax.vjp(embed, self.model.embed_parameters(self.parameters))

    def _layer_place(self, chunk: Array, layer: Array) -> tuple[Array, ...]:
        """Returns where a layer stands in the stacked parameters."""
        return (layer,) if self.num_chunks == 1 else (chunk, layer)

    def _layer_at(self, layers: Tree, chunk: Array, layer: Array) -> Tree:
        return at(layers, *self._layer_place(chunk, layer))

    def _layer_vjp(
        self, parameters: Tree, x: Array, context: Tree, number: Array
    ) -> tuple[Array, tuple[Any, Any, Any]]:
        """Returns (output of one layer, (residuals, x or None if the backward does not need it, vjp))."""

        def layer(parameters: Tree, x: Array, context: Tree) -> Array:
            return self.model.layer(parameters, x, _fixed(context), number)

        vjp: Any
        # The context is an argument so that the vjp refers to it and makes no residual of it.
        y, vjp = jax.vjp(layer, parameters, x, context)
        needed = bool(jax.tree.leaves(vjp.args_res[1]))
        return y, (list(vjp.opaque_residuals), x if needed else None, vjp)

    def chunk_forward(
        self,
        carry: Carry,
        x: Array,
        microbatch: Array,
        chunk: Array,
        place: Any,
        *,
        count: Array | None = None,
        gather_chunk: Array | None = None,
    ) -> tuple[Array, Carry]:
        """Returns (output of a chunk, carry with its residuals at `place`).

        Communication: the model's; with `gather_chunk` also that of `gather_layer`, once a layer.

        Args:
          carry: with `residuals`, if there is to be a backward.
          x: its input.
          microbatch: number of the micro-batch.
          chunk: number of the chunk.
          place: place in the rings.
          count: layers to run, each stage its own number (0: x and the rings as they are); None: all.
          gather_chunk: a chunk, the same on all stages, whose parameters are gathered into `carry["layers"]`, a layer's
            beside the layer before: no stage has run this chunk before.
        """
        numbers, context = self.own(jnp.asarray(self.numbers), chunk), self.context(microbatch)

        def layer(layers: Tree, layer: Array, carry: tuple[Array, Rings]) -> tuple[Array, Rings]:
            x, residuals = carry
            y, (new, needed, _) = self._layer_vjp(self._layer_at(layers, chunk, layer), x, context, at(numbers, layer))
            if residuals is not None:
                new = [leaf for leaf, keep in zip(new, self.kept, strict=True) if keep]
                new += [needed] if self.input_needed else []
                residuals = [put(ring, leaf, place, layer) for ring, leaf in zip(residuals, new, strict=True)]
            return y, residuals

        start: tuple[Array, Rings] = (x, carry.get("residuals"))
        if gather_chunk is None:
            layers = self.layers_of(carry)
            y, residuals = self._over_layers(lambda number, inner: layer(layers, number, inner), start, count)
        else:
            y, residuals, layers = self._gathering(layer, start, carry["layers"], gather_chunk)
            carry = {**carry, "layers": layers}
        return y, carry if residuals is None else {**carry, "residuals": residuals}

    def _gathering(
        self,
        layer: Callable[[Tree, Array, tuple[Array, Rings]], tuple[Array, Rings]],
        start: tuple[Array, Rings],
        layers: Tree,
        chunk: Array,
    ) -> tuple[Array, Rings, Tree]:
        """Runs a chunk's layers forward and gathers each one's parameters beside the one before."""
        gather_layer = self.gather_layer
        assert gather_layer is not None

        def gather(number: Array, layers: Tree) -> Tree:
            where = self._layer_place(chunk, number)
            whole = gather_layer(at(self.parameters[self.model.layers], *where))
            return jax.tree.map(lambda t, p: put(t, p, *where), layers, whole)

        def body(carry: tuple[tuple[Array, Rings], Tree], number: Array) -> tuple[tuple[Any, Tree], None]:
            inner, layers = carry
            return (layer(layers, number, inner), gather(number + 1, layers)), None

        last = self.layers_per_chunk - 1
        layers = gather(jnp.int32(0), layers)
        inner, layers = lax.scan(body, (start, layers), jnp.arange(last, dtype=jnp.int32))[0]
        y, residuals = layer(layers, jnp.int32(last), inner)
        return y, residuals, layers

    def chunk_backward(
        self,
        carry: Carry,
        gradient: Array,
        microbatch: Array,
        chunk: Array,
        place: Any,
        *,
        count: Array | None = None,
        reduce_chunk: Array | None = None,
    ) -> tuple[Array, Carry]:
        """Returns (gradient of a chunk's input, carry with the gradients of its parameters added).

        Communication: the model's; with `reduce_chunk` also that of `reduce_layer`, once a layer.

        Args:
          carry: with `residuals` and `gradients`.
          gradient: of the chunk's output.
          microbatch: number of the micro-batch; NONE: the gradients of parameters are dropped.
          chunk: number of the chunk.
          place: place in the rings.
          count: see `chunk_forward`.
          reduce_chunk: a chunk, the same on all stages, whose gradients are complete once this one's are added: they
            are reduced into `carry["reduced"]` layer by layer, so that a layer's reduction runs beside the next layer.
        """
        numbers, context = self.own(jnp.asarray(self.numbers), chunk), self.context(microbatch)
        residuals, layers = carry["residuals"], self.layers_of(carry)

        def layer(number: Array, carry: tuple[Array, Tree]) -> tuple[Array, Tree]:
            gradient, total = carry
            layer = self.layers_per_chunk - 1 - number
            saved = [at(ring, place, layer) for ring in residuals]
            x = saved.pop() if self.input_needed else self.like_x(0.0)
            # Traced for its structure: of its forward only what was not kept is computed.
            _, (fresh, _, vjp) = self._layer_vjp(self._layer_at(layers, chunk, layer), x, context, at(numbers, layer))
            left = iter(saved)
            vjp.opaque_residuals = [next(left) if keep else leaf for leaf, keep in zip(fresh, self.kept, strict=True)]
            own, gradient, _ = vjp(gradient)
            if self.num_stages > 1:
                own = select_if(microbatch != NONE, own)
            where = self._layer_place(chunk, layer)
            add = lambda t, g: put(t, at(t, *where) + g.astype(t.dtype), *where)  # noqa: E731
            return gradient, jax.tree.map(add, total, own)

        start = (gradient, carry["gradients"][self.model.layers])
        if reduce_chunk is None:
            gradient, total = self._over_layers(layer, start, count)
        else:
            gradient, total, reduced = self._reducing(layer, start, carry["reduced"], reduce_chunk)
            carry = {**carry, "reduced": reduced}
        return gradient, {**carry, "gradients": {**carry["gradients"], self.model.layers: total}}

    def _reducing(
        self, layer: Callable[[Array, Any], Any], start: tuple[Array, Tree], reduced: Tree, chunk: Array
    ) -> tuple[Array, Tree, Tree]:
        """Runs a chunk's layers backward and reduces each one's gradients beside the next one's backward."""
        reduce_layer = self.reduce_layer
        assert reduce_layer is not None

        def reduce(number: Any, total: Tree, reduced: Tree) -> Tree:
            where = self._layer_place(chunk, jnp.int32(self.layers_per_chunk - 1 - number))
            return jax.tree.map(lambda t, g: put(t, g, *where), reduced, reduce_layer(at(total, *where)))

        def body(carry: tuple[tuple[Array, Tree], Tree], number: Array) -> tuple[tuple[tuple[Array, Tree], Tree], None]:
            inner, reduced = carry
            reduced = reduce(number - 1, inner[1], reduced)
            return (layer(number, inner), reduced), None

        first = layer(jnp.int32(0), start)
        numbers = jnp.arange(1, self.layers_per_chunk, dtype=jnp.int32)
        (gradient, total), reduced = lax.scan(body, (first, reduced), numbers)[0]
        return gradient, total, reduce(self.layers_per_chunk - 1, total, reduced)

    def _over_layers(self, layer: Callable[[Array, Any], Any], start: Any, count: Array | None) -> Any:
        if count is not None:
            return lax.fori_loop(jnp.zeros_like(count), count, layer, start)
        numbers = jnp.arange(self.layers_per_chunk, dtype=jnp.int32)
        return lax.scan(lambda carry, number: (layer(number, carry), None), start, numbers)[0]

    def loss_value(self, microbatch: Array, y: Array) -> tuple[Array, Tree]:
        """Returns (objective, report) of the last stage's y. Communication: `from_last_stage` and the model's loss."""
        y = self.from_last_stage(y)
        return self.model.loss(self.model.loss_parameters(self.parameters), y, self.microbatch(microbatch))

    def from_last_stage(self, y: Array) -> Array:
        """Returns the last stage's y on all stages. Communication: an all-reduce of y over the stages."""
        if self.axis is None:
            return y
        return sum_over(select_if(self.stage == self.num_stages - 1, y), self.axis)

    def buffer(self, t: Any, *lead: int) -> Array:
        """Returns a buffer [*lead, ...] that holds what nobody may read yet."""
        fill = self.stale if jnp.issubdtype(t.dtype, jnp.floating) else 0
        return vary(vary_like(jnp.full((*lead, *t.shape), fill, t.dtype), t), self.stages)

    def own(self, values: Array, *more: Array) -> Array:
        """Returns this stage's entry of a table."""
        return at(values, self.stage, *more)

    def add_report(self, carry: Carry, report: Tree) -> Carry:
        """Returns the carry with a micro-batch's report added."""
        total = jax.tree.map(lambda total, new: total + new.astype(total.dtype), carry["report"], report)
        return {**carry, "report": total}

    def add_gradients(self, carry: Carry, gradients: Tree) -> Carry:
        """Returns the carry with gradients added at their paths."""
        return {**carry, "gradients": _add_at_paths(carry["gradients"], gradients)}
