"""One stage's work on one micro-batch: a chunk of layers forward and backward, the embedding, the loss.

Talks on the pipeline axis where all stages work together (embedding and loss); the rest is the model's own.

The layers of a chunk are scans here and not in the model, so that what a layer's backward needs goes straight into its
place in a ring buffer and comes straight from there, and a layer's gradients are added where they belong: no copy of a
whole chunk's residuals, parameters or gradients is ever made. Consecutive layers that one function computes are a run,
one scan; every chunk of every stage has the same runs, so that one program serves them all.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool

from jmegatron.collectives import axis_rank, sum_over, vary, vary_like, varying_axes
from jmegatron.partition import Tree
from jmegatron.pipeline.schedule import NONE

T = TypeVar("T")

Carry = dict[str, Any]
"""What goes from tick to tick, see `executor`."""
Rings = list[Array] | None
"""One ring buffer [places, units of a run, ...] for each residual of a unit; None: nothing is kept."""
Backward = tuple[Array, Tree, Tree | None]
"""(gradient of x, gradients of the layers' parameters, those of them that are reduced or None)."""


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """Consecutive places of a chunk whose layers are computed by one function."""

    layer: Callable[[Tree, Array, Tree, Array], Array]
    """(parameters of one layer, x, context, global layer number) -> y like x. Number -1: no layer."""
    num_places: int
    places_per_unit: int = 1
    """Over 1: of so many layers the input of the first is all that is kept. The backward runs the unit forward again,
    now keeping what `layer` needs, and then goes back through its layers."""

    @property
    def num_units(self) -> int:
        """Units of the run."""
        return self.num_places // self.places_per_unit


@dataclasses.dataclass(frozen=True)
class PipelineModel:
    """The parts of a model that a pipeline runs. Functions of plain arrays, to be differentiated here.

    `embed_parameters` and `loss_parameters` pick the sub-trees that the functions take out of the whole tree of
    parameters; gradients are put back at the same paths (added where a parameter is in both of them).
    """

    embed: Callable[[Tree, Any], Array]
    """(parameters, micro-batch) -> x [batch, seq_local, hidden], the same on all stages."""
    runs: tuple[LayerRun, ...]
    """The layers of a chunk, in order."""
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
    stacks: Mapping[str, tuple[bool, ...]] = dataclasses.field(default_factory=dict)
    """Keys in a layer's tree that not all layers have: whether each place of a chunk does. Their leaves are stacked
    over those places alone, the same number in each chunk and stage."""


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


def _one_by_one(add: Callable[[Array, Array, Any], Array], totals: Tree, parts: Tree, slots: list[Any]) -> Tree:
    """Returns add(total, part, slot) of each leaf, the last one first, each after the one that varies over its axes.

    Where sums are independent XLA computes several in one kernel, which writes them next to the buffers first: 4 bytes
    more for each parameter of a layer. (One that varies over other axes would be marked alike by jax 0.10's barrier.)
    """
    totals, treedef = jax.tree.flatten(totals)
    sums: list[Array] = []
    last: dict[frozenset[str], int] = {}
    for total, part, slot in reversed(list(zip(totals, jax.tree.leaves(parts), slots, strict=True))):
        axes = varying_axes(total)
        if axes in last:
            sums[last[axes]], total = lax.optimization_barrier((sums[last[axes]], total))
        last[axes] = len(sums)
        sums.append(add(total, part, slot))
    return jax.tree.unflatten(treedef, sums[::-1])


def select_if(flag: Bool[Array, ""], tree: Tree) -> Tree:
    """Returns the tree where the flag holds, else zeros."""
    return jax.tree.map(lambda leaf: jnp.where(flag, leaf, jnp.zeros((), leaf.dtype)), tree)


def _repeat(num: int, step: Callable[[Array, T], T], start: T, *, first: int = 0, active: Array | None = None) -> T:
    """Returns the state after step(number, state) for number = first .. num - 1; without a step if it is not active."""
    if active is not None:
        assert first == 0
        count = jnp.where(active, num, 0)
        return lax.fori_loop(jnp.zeros_like(count), count, step, start)
    numbers = jnp.arange(first, num, dtype=jnp.int32)
    return lax.scan(lambda state, number: (step(number, state), None), start, numbers)[0]


def _last_first(
    num: int,
    step: Callable[[Array, Backward, bool], Backward],
    state: Backward,
    pending: bool,
    *,
    active: Array | None = None,
) -> Backward:
    """Returns the state after step(number, state, pending) for number = num - 1 .. 0.

    `pending`: whether gradients of the layer behind are left to be reduced beside the step. Where that differs between
    the first step and the others, the first one stands alone.
    """
    alone = not pending and state[2] is not None
    if alone:
        state = step(jnp.int32(num - 1), state, False)
    turned = lambda number, state: step(num - 1 - number, state, True)  # noqa: E731
    return _repeat(num, turned, state, first=int(alone), active=active)


def _fixed(context: Tree) -> Tree:
    """Returns the context cut from the gradient."""
    cut = lambda leaf: lax.stop_gradient(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf  # noqa: E731
    return jax.tree.map(cut, context)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptRun(LayerRun):
    """A run with what is kept of it for the backward."""

    first: int
    """Its first place in the chunk."""
    kept: list[bool]
    """Which residuals of a layer are kept; the others are computed again."""
    input_needed: bool
    """Whether a layer's input is kept as well."""
    types: list[Any]
    """What goes into the rings of a unit."""


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

    Raises:
      ValueError: the runs are not as many places as a chunk has, or a run is no whole number of units.
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
        self._check_runs()
        # Of each key that not all places have: the index in its own stack, at the others that of the place before (what
        # is gathered or reduced for these is gathered or reduced at its own place as well).
        self.indices = {
            key: np.maximum(np.cumsum(present) - 1, 0).astype(np.int32) for key, present in model.stacks.items()
        }
        self._find_types()

    def _check_runs(self) -> None:
        lengths = [run.num_places for run in self.model.runs]
        if sum(lengths) != self.layers_per_chunk:
            raise ValueError(f"runs of {lengths} places: expected the {self.layers_per_chunk} places of a chunk")
        for run in self.model.runs:
            if run.num_places % run.places_per_unit:
                raise ValueError(f"a run of {run.num_places} places cannot be cut into units of {run.places_per_unit}")

    # ---- buffers ----
    def layer_buffers(self, how: Callable[[Tree], Tree]) -> Tree:
        """Returns zeros for what `how` makes of the parameters of each layer of this stage."""
        chunks = () if self.num_chunks == 1 else (self.num_chunks,)
        one = jax.eval_shape(lambda: how(self._one_layer()))

        def zeros(path: Any, t: Any) -> Array:
            key = self._partial_stack(path)
            places = self.layers_per_chunk if key is None else sum(self.model.stacks[key])
            return vary_like(jnp.zeros((*chunks, places, *t.shape), t.dtype), t)

        return jax.tree_util.tree_map_with_path(zeros, one)

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
        for run in self.model.runs:
            # A layer's output may vary over more axes than its input does; one pass through a layer tells.
            output = jax.eval_shape(lambda run=run: self._one_layer_vjp(run)[0])
            self.x_type = jax.eval_shape(lambda output=output: vary_like(self.like_x(0.0), output))
        self.embedding_axes = tuple(sorted(varying_axes(self.x_type) - set(self.stages)))
        starts = itertools.accumulate((run.num_places for run in self.model.runs), initial=0)
        self.runs = [self._kept_run(run, start) for run, start in zip(self.model.runs, starts, strict=False)]
        self.report_type = jax.eval_shape(lambda: self.loss_value(first, self.like_x(0.0))[1])

    def _one_layer_vjp(self, run: LayerRun) -> tuple[Array, tuple[Any, Any, Any]]:
        first = jnp.int32(0)
        return self._layer_vjp(run, self._one_layer(), self.like_x(0.0), self.context(first), first)

    def _kept_run(self, run: LayerRun, first: int) -> KeptRun:
        kept = self._find_kept(run)
        residuals, x = jax.eval_shape(lambda: self._one_layer_vjp(run)[1][:2])
        types = [leaf for leaf, keep in zip(residuals, kept, strict=True) if keep] + ([] if x is None else [x])
        return KeptRun(
            run.layer,
            run.num_places,
            run.places_per_unit,
            first=first,
            kept=kept,
            input_needed=x is not None,
            types=types if run.places_per_unit == 1 else [self.x_type],
        )

    def _find_kept(self, run: LayerRun) -> list[bool]:
        """Returns which residuals of a layer are kept.

        What depends neither on activations nor on parameters (masks, angles) is computed again in the backward. What
        depends on a random key is kept: drawing numbers is dear.
        """
        first = jnp.int32(0)
        arguments = jax.eval_shape(lambda: (self._one_layer(), self.like_x(0.0), self.context(first)))
        residuals = lambda parameters, x, context: self._layer_vjp(run, parameters, x, context, first)[1][0]  # noqa: E731
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

    def _partial_stack(self, path: Any) -> str | None:
        """Returns the key of the leaf at `path` if not all layers have it, else None."""
        keys = [getattr(entry, "key", None) for entry in path]
        return next((key for key in keys if key in self.indices), None)

    def _layer_place(self, path: Any, chunk: Array, layer: Array) -> tuple[Array, ...]:
        """Returns where a layer stands in the stacked leaf at `path`."""
        key = self._partial_stack(path)
        index = layer if key is None else at(jnp.asarray(self.indices[key]), layer)
        return (index,) if self.num_chunks == 1 else (chunk, index)

    def _layer_at(self, layers: Tree, chunk: Array, layer: Array) -> Tree:
        one = lambda path, leaf: at(leaf, *self._layer_place(path, chunk, layer))  # noqa: E731
        return jax.tree_util.tree_map_with_path(one, layers)

    def _put_layer(self, layers: Tree, one: Tree, chunk: Array, layer: Array) -> Tree:
        """Returns the stacked leaves with those of one layer in their place."""
        write = lambda path, leaf, own: put(leaf, own, *self._layer_place(path, chunk, layer))  # noqa: E731
        return jax.tree_util.tree_map_with_path(write, layers, one)

    def _layer_vjp(
        self, run: LayerRun, parameters: Tree, x: Array, context: Tree, number: Array
    ) -> tuple[Array, tuple[Any, Any, Any]]:
        """Returns (output of one layer, (residuals, x or None if the backward does not need it, vjp))."""

        def layer(parameters: Tree, x: Array, context: Tree) -> Array:
            return run.layer(parameters, x, _fixed(context), number)

        vjp: Any
        # The context is an argument so that the vjp refers to it and makes no residual of it.
        y, vjp = jax.vjp(layer, parameters, x, context)
        needed = bool(jax.tree.leaves(vjp.args_res[1]))
        return y, (list(vjp.opaque_residuals), x if needed else None, vjp)

    def _layer_forward(
        self, run: KeptRun, parameters: Tree, x: Array, context: Tree, number: Array
    ) -> tuple[Array, list[Array]]:
        """Returns (output of one layer, what is kept for its backward)."""
        y, (residuals, needed, _) = self._layer_vjp(run, parameters, x, context, number)
        saved = [leaf for leaf, keep in zip(residuals, run.kept, strict=True) if keep]
        return y, saved + ([needed] if run.input_needed else [])

    def _layer_backward(
        self, run: KeptRun, parameters: Tree, saved: list[Array], context: Tree, number: Array, gradient: Array
    ) -> tuple[Tree, Array]:
        """Returns the gradients of (parameters, input) of one layer from what was kept of it."""
        x = saved.pop() if run.input_needed else self.like_x(0.0)
        # Traced for its structure: of its forward only what was not kept is computed.
        _, (fresh, _, vjp) = self._layer_vjp(run, parameters, x, context, number)
        left = iter(saved)
        vjp.opaque_residuals = [next(left) if keep else leaf for leaf, keep in zip(fresh, run.kept, strict=True)]
        own, gradient, _ = vjp(gradient)
        return own, gradient

    # ---- a chunk ----
    def chunk_forward(
        self,
        carry: Carry,
        x: Array,
        microbatch: Array,
        chunk: Array,
        place: Any,
        *,
        active: Array | None = None,
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
          active: whether the layers run, each stage its own answer (no: x and the rings as they are); None: they do.
          gather_chunk: a chunk, the same on all stages, whose parameters are gathered into `carry["layers"]`, a layer's
            beside the layer before: no stage has run this chunk before.
        """
        numbers, context = self.own(jnp.asarray(self.numbers), chunk), self.context(microbatch)

        def layer(run: KeptRun, layers: Tree, number: Array, inner: tuple[Array, Rings]) -> tuple[Array, Rings]:
            x, rings = inner
            where = run.first + number
            parameters = self._layer_at(layers, chunk, where)
            y, saved = self._layer_forward(run, parameters, x, context, at(numbers, where))
            if rings is None:
                return y, None
            unit = number // run.places_per_unit
            if run.places_per_unit > 1:
                # Written once a layer and not once a unit, so that a run is one loop whatever its units.
                saved = [jnp.where(number % run.places_per_unit == 0, x, at(rings[0], place, unit))]
            return y, [put(ring, leaf, place, unit) for ring, leaf in zip(rings, saved, strict=True)]

        layers = self.layers_of(carry)
        if gather_chunk is not None:
            layers = self._gather(gather_chunk, jnp.int32(0), layers)
        kept: list[Rings] = []
        for run, rings in zip(self.runs, carry.get("residuals") or [None] * len(self.runs), strict=True):
            of_run, start = functools.partial(layer, run), (x, rings)
            if gather_chunk is None:
                x, rings = _repeat(run.num_places, functools.partial(of_run, layers), start, active=active)
            else:
                (x, rings), layers = self._gathering(run, of_run, start, layers, gather_chunk)
            kept.append(rings)
        changed = {"residuals": kept} if "residuals" in carry else {}
        return x, {**carry, **changed, **({} if gather_chunk is None else {"layers": layers})}

    def _gather(self, chunk: Array, place: Array, layers: Tree) -> Tree:
        """Returns the layers with the parameters of one place gathered into them."""
        assert self.gather_layer is not None
        whole = self.gather_layer(self._layer_at(self.parameters[self.model.layers], chunk, place))
        return self._put_layer(layers, whole, chunk, place)

    def _gathering(
        self,
        run: KeptRun,
        layer: Callable[[Tree, Array, tuple[Array, Rings]], tuple[Array, Rings]],
        start: tuple[Array, Rings],
        layers: Tree,
        chunk: Array,
    ) -> tuple[tuple[Array, Rings], Tree]:
        """Runs a run's layers forward, and gathers the parameters of each next one beside it."""

        def body(number: Array, carry: tuple[tuple[Array, Rings], Tree]) -> tuple[tuple[Array, Rings], Tree]:
            inner, layers = carry
            return layer(layers, number, inner), self._gather(chunk, run.first + number + 1, layers)

        # The chunk's last layer stands alone: none is next.
        last = run.num_places - 1
        ends_chunk = run.first + last == self.layers_per_chunk - 1
        inner, layers = _repeat(last if ends_chunk else last + 1, body, (start, layers))
        return (layer(layers, jnp.int32(last), inner) if ends_chunk else inner), layers

    def chunk_backward(
        self,
        carry: Carry,
        gradient: Array,
        microbatch: Array,
        chunk: Array,
        place: Any,
        *,
        active: Array | None = None,
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
          active: see `chunk_forward`.
          reduce_chunk: a chunk, the same on all stages, whose gradients are complete once this one's are added: they
            are reduced into `carry["reduced"]` layer by layer, so that a layer's reduction runs beside the next layer.
        """
        numbers, context = self.own(jnp.asarray(self.numbers), chunk), self.context(microbatch)
        layers = self.layers_of(carry)

        def layer(run: KeptRun, where: Array, saved: list[Array], state: Backward, pending: bool) -> Backward:
            gradient, total, reduced = state
            if pending and reduce_chunk is not None:
                reduced = self._reduce(reduce_chunk, where + 1, total, reduced)
            parameters = self._layer_at(layers, chunk, where)
            own, gradient = self._layer_backward(run, parameters, saved, context, at(numbers, where), gradient)
            if self.num_stages > 1:
                own = select_if(microbatch != NONE, own)
            return gradient, self._add_layer(total, own, chunk, where, run), reduced

        def again(run: KeptRun, first: Array, x: Array) -> list[Array]:
            """What is kept of the layers of a unit, [layers of the unit, ...]."""

            def body(x: Array, number: Array) -> tuple[Array, list[Array]]:
                where = first + number
                parameters = self._layer_at(layers, chunk, where)
                return self._layer_forward(run, parameters, x, context, at(numbers, where))

            return lax.scan(body, x, jnp.arange(run.places_per_unit, dtype=jnp.int32))[1]

        def unit(run: KeptRun, rings: list[Array], number: Array, state: Backward, pending: bool) -> Backward:
            saved = [at(ring, place, number) for ring in rings]
            first = run.first + number * run.places_per_unit
            if run.places_per_unit == 1:
                return layer(run, first, saved, state, pending)
            kept = again(run, first, saved[0])

            def of_unit(number: Array, state: Backward, pending: bool) -> Backward:
                return layer(run, first + number, [at(leaf, number) for leaf in kept], state, pending)

            return _last_first(run.places_per_unit, of_unit, state, pending)

        reduced = None if reduce_chunk is None else carry["reduced"]
        state: Backward = (gradient, carry["gradients"][self.model.layers], reduced)
        for run, rings in zip(reversed(self.runs), reversed(carry["residuals"]), strict=True):
            of_run = functools.partial(unit, run, rings)
            state = _last_first(run.num_units, of_run, state, run is not self.runs[-1], active=active)
        gradient, total, reduced = state
        carry = {**carry, "gradients": {**carry["gradients"], self.model.layers: total}}
        if reduce_chunk is not None:
            carry["reduced"] = self._reduce(reduce_chunk, jnp.int32(0), total, reduced)
        return gradient, carry

    def _add_layer(self, total: Tree, own: Tree, chunk: Array, where: Array, run: KeptRun) -> Tree:
        """Returns the stacked gradients with those of one layer of the run added."""
        stacks = self.model.stacks
        own = {key: tree for key, tree in own.items() if key not in stacks or stacks[key][run.first]}
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(own)[0]]
        slots = [self._layer_place(path, chunk, where) for path in paths]
        add = lambda t, g, slot: put(t, at(t, *slot) + g.astype(t.dtype), *slot)  # noqa: E731
        return {**total, **_one_by_one(add, {key: total[key] for key in own}, own, slots)}

    def _reduce(self, chunk: Array, place: Array, total: Tree, reduced: Tree) -> Tree:
        """Returns the reduced gradients with those of one place."""
        assert self.reduce_layer is not None
        return self._put_layer(reduced, self.reduce_layer(self._layer_at(total, chunk, place)), chunk, place)

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
