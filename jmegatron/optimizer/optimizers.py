"""adam, sgd, lion and muon from stock optax parts, on global arrays; the norm, the clip, and where the state lies.

The norm of sharded gradients talks on the axes that divide them; muon gathers what a matrix's product needs (XLA adds
it). Source: Megatron-LM core/optimizer/__init__.py:76-128 and 546-620, emerging_optimizers.py, clip_grads.py:107-191.
Order: norm -> clip -> direction and decay -> minus the learning rate -> fp32 master weights -> cast.

    adam, lion, muon   direction, then + decay * p (decoupled), then * -lr
    sgd                gradient + decay * p, then momentum, then * -lr

Clipping is here because the reference's coefficient is clip / (norm + 1e-6), and because inside shard_map optax would
see one rank's norm only. What a parameter is (its `ParameterSpec`) says whether it decays, whether it is a matrix for
muon, and whose learning rate it has; its number of dims says nothing, as layers are stacked.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Integer

from jmegatron import partition
from jmegatron.optimizer.schedules import LearningRateSchedule, WeightDecaySchedule
from jmegatron.partition import ParameterSpec, Tree

OPTIMIZERS = ("adam", "sgd", "lion", "muon")
# The reference's "quintic" coefficients of muon's five Newton-Schulz steps.
_QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """Plain numbers of the optimizer."""

    name: str = "adam"
    beta1: float = 0.9
    """adam's two betas serve muon's other parameters as well."""
    beta2: float = 0.999
    eps: float = 1e-8
    """Added to the root."""
    sgd_momentum: float = 0.9
    lion_beta1: float = 0.95
    lion_beta2: float = 0.98
    muon_momentum: float = 0.9
    muon_scale: float = 1.0
    """Factor of muon's update beside sqrt(max(inputs, outputs)); 0.2 gives it the size of adam's (arXiv:2502.16982)."""
    weight_decay: float | WeightDecaySchedule = 0.01
    clip_grad: float = 1.0
    """Largest global gradient norm; 0: no clipping."""

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ValueError(f"optimizer: got {self.name!r}, expected one of {', '.join(OPTIMIZERS)}")


def build_optimizer(
    settings: OptimizerSettings,
    schedule: LearningRateSchedule,
    specs: Tree,
    decoupled_schedule: LearningRateSchedule | None = None,
) -> optax.GradientTransformation:
    """Returns the optimizer of parameters declared by `specs`.

    The state's structure follows from `settings.name` and `specs` alone, so that rates, decay and their schedules may
    change between a checkpoint and the run that goes on from it. Each counter in it counts updates.

    Args:
      settings: its numbers.
      schedule: learning rate of all parameters but those that the next one serves.
      specs: declarations of the parameters.
      decoupled_schedule: learning rate of word embedding and output layer; None: the same as of all.
    """
    decay = _decayed_weights(settings.weight_decay, specs)
    parts = {
        "adam": (_adam(settings), decay),
        "sgd": (decay, optax.trace(settings.sgd_momentum)),
        "lion": (optax.scale_by_lion(settings.lion_beta1, settings.lion_beta2), decay),
        "muon": (_muon(settings, specs), decay),
    }[settings.name]
    vocabulary = partition.map_specs(lambda s: s.vocabulary, specs)
    others = partition.map_specs(lambda s: not s.vocabulary, specs)
    return optax.chain(
        *parts,
        optax.masked(optax.scale_by_learning_rate(schedule), others),
        optax.masked(optax.scale_by_learning_rate(decoupled_schedule or schedule), vocabulary),
    )


def _adam(settings: OptimizerSettings) -> optax.GradientTransformation:
    return optax.scale_by_adam(settings.beta1, settings.beta2, settings.eps)


def _decayed_weights(weight_decay: float | WeightDecaySchedule, specs: Tree) -> optax.GradientTransformation:
    constant = lambda _: weight_decay  # noqa: E731
    schedule = weight_decay if isinstance(weight_decay, WeightDecaySchedule) else constant
    return optax.add_decayed_weights(schedule, partition.weight_decay_mask(specs))


def _muon(settings: OptimizerSettings, specs: Tree) -> optax.GradientTransformation:
    """Returns muon for the matrices, each layer's by itself, and adam for all else."""
    numbers = partition.map_specs(
        lambda s: optax.MaskedNode() if s.matrix is None else optax.contrib.MuonDimensionNumbers(*s.matrix), specs
    )
    factors = partition.map_specs(
        lambda s: optax.MaskedNode() if s.matrix is None else settings.muon_scale * max(_matrix_shape(s)) ** 0.5, specs
    )
    orthogonal = optax.contrib.scale_by_muon(
        _QUINTIC,
        ns_steps=len(_QUINTIC),
        beta=settings.muon_momentum,
        nesterov=False,
        weight_dimension_numbers=numbers,
    )
    scale = optax.stateless(lambda updates, _: jax.tree.map(lambda u, factor: u * factor, updates, factors))
    labels = partition.map_specs(lambda s: "other" if s.matrix is None else "matrix", specs)
    return optax.partition({"matrix": optax.chain(orthogonal, scale), "other": _adam(settings)}, labels)


def _matrix_shape(spec: ParameterSpec) -> tuple[int, int]:
    """Returns (inputs, outputs) of one of the matrices that a parameter holds."""
    assert spec.matrix is not None
    inputs, outputs = (int(np.prod([spec.shape[dim] for dim in dims])) for dims in spec.matrix)
    return inputs, outputs


def num_updates(state: Any) -> Integer[Array, ""]:
    """Returns the updates that an optimizer's state has seen; what skips a step must leave the state alone."""
    return optax.tree.get_all_with_path(state, "count")[0][1]


# ---- norm and clip ------------------------------------------------------------------------------------------------
def squared_norms(gradients: Tree) -> Float[Array, "leaves"]:
    """Returns the fp32 squared L2 norm of each gradient, in tree order, each global element once.

    Communication: on global arrays, one scalar all-reduce a leaf over the axes that divide it, added by XLA.
    """
    return jnp.stack([jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients)])


def global_norm(gradients: Tree) -> Float[Array, ""]:
    """Returns the fp32 L2 norm over all gradients. Communication: see `squared_norms`."""
    return jnp.sqrt(squared_norms(gradients).sum())


def clip_by_norm(gradients: Tree, norm: Float[Array, ""], limit: float) -> Tree:
    """Returns gradients times limit / (norm + 1e-6) where that is below 1 (limit 0: unchanged). Communication: none."""
    if limit <= 0:
        return gradients
    coefficient = jnp.minimum(1.0, limit / (norm + 1e-6))
    return jax.tree.map(lambda g: g * coefficient, gradients)


# ---- where the state lies -----------------------------------------------------------------------------------------
def state_shardings(
    optimizer: optax.GradientTransformation, parameters: Tree, parameter_shardings: Tree, mesh: Mesh
) -> Any:
    """Returns the shardings of the optimizer's state: moments lie as their parameters, counters on every device.

    A counter needs a sharding on the mesh, too: on a single device a resumed step would refuse it.

    Args:
      optimizer: whose state it is.
      parameters: arrays or ShapeDtypeStructs.
      parameter_shardings: NamedSharding of each.
      mesh: the mesh.
    """
    return map_parameters(
        optimizer,
        lambda sharding, _: sharding,
        jax.eval_shape(optimizer.init, parameters),
        parameter_shardings,
        others=lambda _: NamedSharding(mesh, PartitionSpec()),
    )


def map_parameters(
    optimizer: optax.GradientTransformation,
    function: Callable[[Any, Any], Any],
    state: Any,
    tree: Tree,
    *,
    others: Callable[[Any], Any] | None = None,
) -> Any:
    """Returns the optimizer's state with function(leaf of `tree`, value) in place of what belongs to a parameter.

    Args:
      optimizer: whose state it is.
      function: of a parameter's leaf and, for instance, its moment.
      state: the state.
      tree: shaped as the parameters.
      others: what becomes of the rest, such as counters; None: it stays.
    """
    absent = lambda value: isinstance(value, optax.MaskedNode)  # noqa: E731
    return optax.tree.map_params(
        optimizer,
        lambda value, leaf: value if absent(value) else function(leaf, value),
        state,
        tree,
        transform_non_params=others,
        is_leaf=absent,
    )
