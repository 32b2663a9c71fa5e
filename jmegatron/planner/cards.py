"""The GPUs that a run can be planned for: peaks, memory and links, from NVIDIA's public data sheets.

No communication, no jax. What the compiler needs to know of a GPU stands in `gpus/*.textproto`; this table is what the
formulas need (MFU, expected times).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from jmegatron.errors import UsageError


@dataclass(frozen=True)
class Card:
    """One GPU model in its SXM form.

    Attributes:
        name: as on the command line (`--target-gpu`).
        peak_bf16_flops: dense BF16 FLOP/s of the tensor cores, without sparsity.
        memory_bytes: device memory as the driver reports it.
        memory_bytes_per_s: bandwidth of the device memory.
        nvlink_bytes_per_s: NVLink, one direction, all links of a GPU together.
        network_bytes_per_s: network card of a GPU, one direction, in NVIDIA's own eight-GPU systems.
    """

    name: str
    peak_bf16_flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    network_bytes_per_s: float


# Sources: data sheets of A100 80GB SXM, H100 SXM, H200 SXM, and HGX B200 (per GPU); networks of DGX A100 (200 Gb/s a
# GPU), DGX H100, H200 and B200 (400 Gb/s a GPU). Data sheets give BF16 with sparsity: half of it is dense.
CARDS = {
    card.name: card
    for card in (
        Card("a100", 312e12, 85_100_068_864, 2.039e12, 300e9, 25e9),
        Card("h100", 989e12, 84_929_347_584, 3.35e12, 450e9, 50e9),
        Card("h200", 989e12, 151_397_597_184, 4.8e12, 450e9, 50e9),
        Card("b200", 2250e12, 191_514_411_008, 7.7e12, 900e9, 50e9),
    )
}


def card(name: str) -> Card:
    """The card called `name`.

    Raises:
        UsageError: no such card is described here.
    """
    if name in CARDS:
        return CARDS[name]
    near = difflib.get_close_matches(name.lower(), CARDS, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UsageError(f"--target-gpu: unknown GPU {name!r}, expected one of {', '.join(sorted(CARDS))}{hint}")


def card_of_device_kind(device_kind: str) -> Card | None:
    """The card that a `jax.Device.device_kind` such as `NVIDIA H100 80GB HBM3` names.

    None when it is not in the table; slower forms of a card (PCIe, NVL, MIG slices) are not.
    """
    words = re.split(r"[\s-]+", device_kind.lower())
    if {"pcie", "nvl", "mig"} & set(words):
        return None
    return next((CARDS[word] for word in words if word in CARDS), None)
