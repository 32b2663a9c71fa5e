"""How one framework's arrays correspond to ours, one tensor at a time and both ways. No communication, no jax arrays.

A `Piece` ties parts of our arrays (whole ones, or one layer of a stacked one) to another framework's tensors. It only
moves elements, so it maps gradients and optimizer moments as well as weights, and its two directions are inverse. A
converter is a loop over pieces: no more than one piece's tensors are in memory.

Torch keeps a linear layer as [out, in]; ours is [*in, *out] with heads as dims of their own.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from jmegatron.config.options import problem

Arrays = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, order=True)
class Slot:
    """A part of one of our arrays."""

    path: str
    """Such as "layers/mlp/up/kernel"."""
    layer: int | None = None
    """Index of the leading dim of a stacked array; None: the whole array."""

    def __str__(self) -> str:
        return self.path if self.layer is None else f"{self.path}[{self.layer}]"


@dataclasses.dataclass(frozen=True)
class Piece:
    """Parts of ours and the tensors of theirs that hold the same elements."""

    ours: tuple[Slot, ...]
    theirs: tuple[str, ...]
    their_shapes: tuple[tuple[int, ...], ...]
    """Shape that each of theirs must have."""
    to_ours: Callable[[Arrays], Arrays]
    """Theirs, in order -> ours, in order."""
    to_theirs: Callable[[Arrays], Arrays]
    """The inverse."""


# ---- the usual pieces ---------------------------------------------------------------------------------------------
def same(slot: Slot, name: str, shape: Sequence[int]) -> Piece:
    """Returns the piece of a tensor that both sides hold alike, such as a table of embeddings."""
    shape = tuple(shape)
    return _reshaped(slot, name, shape, shape)


def flat(slot: Slot, name: str, shape: Sequence[int]) -> Piece:
    """Returns the piece of a bias or scale: ours has `shape`, theirs is flat."""
    shape = tuple(shape)
    return _reshaped(slot, name, shape, (math.prod(shape),))


def _reshaped(slot: Slot, name: str, shape: tuple[int, ...], their_shape: tuple[int, ...]) -> Piece:
    return Piece(
        (slot,),
        (name,),
        (their_shape,),
        lambda theirs: (theirs[0].reshape(shape),),
        lambda ours: (ours[0].reshape(their_shape),),
    )


def linear(slot: Slot, name: str, shape: Sequence[int], num_inputs: int, *, transposed: bool = True) -> Piece:
    """Returns the piece of a linear layer's weight.

    Args:
      slot: ours, [*in, *out].
      name: theirs.
      shape: of ours.
      num_inputs: leading dims of `shape` that are inputs.
      transposed: theirs is [out, in]; else [in, out] (GPT-2's Conv1D).
    """
    shape = tuple(shape)
    matrix = (math.prod(shape[:num_inputs]), math.prod(shape[num_inputs:]))
    turn = (lambda a: a.T) if transposed else (lambda a: a)
    return Piece(
        (slot,),
        (name,),
        (matrix[::-1] if transposed else matrix,),
        lambda theirs: (turn(theirs[0]).reshape(shape),),
        lambda ours: (turn(ours[0].reshape(matrix)),),
    )


# ---- checks ---------------------------------------------------------------------------------------------------------
def check_finite(name: str, values: np.ndarray, where: object) -> None:
    """Checks that a tensor holds numbers: a run that starts from others ends at its first step, and says less.

    Raises:
      ConfigError: it holds NaN or infinities.
    """
    wrong = values.size - int(np.count_nonzero(np.isfinite(values)))
    if wrong:
        raise problem(
            "A tensor holds values that are no finite numbers.",
            where=f"{where}, tensor {name}",
            got=f"{wrong} of {values.size} values are NaN or infinite",
            expected="finite numbers",
            fix="get the files again from where they came, or take a checkpoint from before its run went wrong",
        )


def slots(pieces: Iterable[Piece]) -> list[Slot]:
    """Returns the parts of ours that pieces fill, in order."""
    return list(itertools.chain.from_iterable(piece.ours for piece in pieces))


def names(pieces: Iterable[Piece]) -> list[str]:
    """Returns the tensors of theirs that pieces use, in order."""
    return list(itertools.chain.from_iterable(piece.theirs for piece in pieces))


# ---- models that fit in memory ------------------------------------------------------------------------------------
def all_ours(pieces: Iterable[Piece], theirs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns our arrays by path, layers stacked, of all of theirs by name.

    Raises:
      KeyError: one of theirs is missing.
    """
    whole: dict[str, np.ndarray] = {}
    layers: dict[str, dict[int, np.ndarray]] = {}
    for piece in pieces:
        arrays = piece.to_ours(tuple(theirs[name] for name in piece.theirs))
        for slot, array in zip(piece.ours, arrays, strict=True):
            if slot.layer is None:
                whole[slot.path] = array
            else:
                layers.setdefault(slot.path, {})[slot.layer] = array
    return whole | {path: np.stack([own[n] for n in sorted(own)]) for path, own in layers.items()}


def all_theirs(pieces: Iterable[Piece], ours: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns their tensors by name, of all our arrays by path: the inverse of `all_ours`.

    Raises:
      KeyError: one of ours is missing.
    """
    found: dict[str, np.ndarray] = {}
    for piece in pieces:
        arrays = tuple(ours[slot.path] if slot.layer is None else ours[slot.path][slot.layer] for slot in piece.ours)
        found.update(zip(piece.theirs, piece.to_theirs(arrays), strict=True))
    return found
