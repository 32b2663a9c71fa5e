"""What ends with a document inside a sample: positions, what a token sees, loss (no communication).

By default nothing does: samples run across documents (Megatron-LM core/datasets/gpt_dataset.py:800-875). With the
end-of-document token E, which belongs to the document it ends:

    tokens         5 E 7 8 E 9 9 9
    position_ids   0 1 0 1 2 0 1 2      --reset-position-ids
    segment_ids    0 0 1 1 1 2 2 2      --reset-attention-mask: a token sees only its own segment
    loss_mask      1 0 1 1 0 1 1 1      --eod-mask-loss: E does not learn what comes next
"""

from dataclasses import dataclass

import numpy as np

from jmegatron.errors import UsageError


@dataclass(frozen=True)
class Borders:
    """How a sample treats the documents in it.

    Attributes:
        eod_token: id that ends a document; None if the tokenizer has none.
        reset_position_ids: positions start at 0 again in each document.
        reset_attention_mask: tokens see their own document only.
        eod_mask_loss: no loss at places whose input is `eod_token`.

    Raises:
        UsageError: something is asked for that needs an `eod_token`, and there is none.
    """

    eod_token: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self) -> None:
        names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        asked = [f"--{name.replace('_', '-')}" for name in names if getattr(self, name)]
        if asked and self.eod_token is None:
            raise UsageError(
                f"{', '.join(asked)}: the tokenizer has no end-of-document token; fix: choose a tokenizer that has one"
            )

    @property
    def run_on(self) -> bool:
        """Whether nothing ends with a document."""
        return not (self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss)

    def arrays(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """Return `loss_mask` bool, `position_ids` and `segment_ids` int32, those that are asked for.

        Args:
            tokens: integer [..., seq]; the arrays have its shape.
        """
        if self.run_on:
            return {}
        ends = tokens == self.eod_token
        found = {}
        if self.eod_mask_loss:
            found["loss_mask"] = ~ends
        if self.reset_position_ids:
            found["position_ids"] = position_ids(ends)
        if self.reset_attention_mask:
            found["segment_ids"] = segment_ids(ends)
        return found


def segment_ids(ends: np.ndarray) -> np.ndarray:
    """Return the number of documents that end before each place: int32 [..., seq].

    Args:
        ends: bool [..., seq], True where a document ends.
    """
    return np.cumsum(ends, axis=-1, dtype=np.int32) - ends


def position_ids(ends: np.ndarray) -> np.ndarray:
    """Return each place's distance from the start of its document: int32 [..., seq].

    Args:
        ends: bool [..., seq], True where a document ends.
    """
    places = np.arange(ends.shape[-1], dtype=np.int32)
    starts = np.zeros(ends.shape, np.int32)
    starts[..., 1:] = np.where(ends[..., :-1], places[1:], 0)
    return places - np.maximum.accumulate(starts, axis=-1)
