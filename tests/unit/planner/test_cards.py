"""The table of GPUs and the compiler's descriptions of them."""

import importlib.resources
import subprocess
import sys

import pytest

from jmegatron.errors import UsageError
from jmegatron.planner.cards import CARDS, card, card_of_device_kind


def description(name):
    return (importlib.resources.files("jmegatron.planner") / "gpus" / f"{name}.textproto").read_text()


@pytest.mark.parametrize("name", sorted(CARDS))
def test_table_and_description_agree(name):
    text = description(name)
    assert f"device_memory_size: {CARDS[name].memory_bytes}\n" in text
    bandwidth = float(text.split("memory_bandwidth: ")[1].split("\n")[0])
    assert bandwidth == pytest.approx(CARDS[name].memory_bytes_per_s, rel=1e-3)
    assert card_of_device_kind(text.split('device_description_str: "')[1].split('"')[0]) == CARDS[name]


def test_an_unknown_card_is_refused_with_the_nearest_name():
    with pytest.raises(UsageError, match=r"'H10O'.*did you mean 'h100'"):
        card("H10O")
    with pytest.raises(UsageError, match=r"expected one of a100, b200, h100, h200$"):
        card("?")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("cpu", None),
    ],
)
def test_a_device_is_recognised_only_when_its_peak_is_known(kind, name):
    found = card_of_device_kind(kind)
    assert (found.name if found else None) == name


def test_counting_needs_no_jax():
    code = (
        "import sys, jmegatron.planner.hlo, jmegatron.planner.formulas, jmegatron.planner.cards;"
        "sys.exit(any(name.split('.')[0] in ('jax', 'jaxlib', 'flax') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
