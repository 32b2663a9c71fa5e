"""What a traced step keeps from tick to tick of its pipeline, on one device, by name.

No communication. The executor names what goes from tick to tick (`checkpoint_name`, "carry/residuals" and so on);
inside `shard_map` the shapes are a device's own. XLA may hold more for a while (copies), never less.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

PREFIX = "carry/"


def carried_bytes(jaxpr: Any) -> dict[str, int]:
    """Returns bytes by name, such as `residuals` (activations for the backward), `gradients`, `reduced`, `layers`
    (gathered parameters).

    Args:
        jaxpr: of a traced step (`step.trace(...).jaxpr`).
    """
    found: dict[str, int] = {}
    for equation in _equations(getattr(jaxpr, "jaxpr", jaxpr)):
        name = str(equation.params.get("name", ""))
        if equation.primitive.name == "name" and name.startswith(PREFIX):
            name = name.removeprefix(PREFIX)
            avals = [variable.aval for variable in equation.invars]
            found[name] = found.get(name, 0) + sum(aval.size * aval.dtype.itemsize for aval in avals)
    return found


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)
