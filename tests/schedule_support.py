"""Arguments of `build_schedule` drawn at random, for tests."""

from typing import Any

from hypothesis import strategies as st

LOCK_STEP = ("1f1b", "interleaved", "gpipe")


def valid_group_sizes(num_microbatches: int, num_stages: int) -> list[int]:
    """Returns every group size that exists for these numbers."""
    m, p = num_microbatches, num_stages
    return [n for n in range(p, max(m, p) + 1) if not (0 < m % n < p <= m)]


@st.composite
def schedule_arguments(
    draw,
    names: tuple[str, ...] = (*LOCK_STEP, "1f1b-low-memory"),
    max_stages: int = 8,
    max_chunks: int = 4,
    max_microbatches: int = 40,
) -> dict[str, Any]:
    """Draws arguments of any schedule, with the default groups or any that exist.

    Tests build the schedule themselves: beartype draws random numbers, which hypothesis refuses while it draws.
    """
    name = draw(st.sampled_from(names))
    p, m = draw(st.integers(1, max_stages)), draw(st.integers(1, max_microbatches))
    v = draw(st.integers(1, max_chunks)) if name in ("interleaved", "gpipe") else 1
    group_size = draw(st.none() | st.sampled_from(valid_group_sizes(m, p))) if v > 1 else None
    return {
        "name": name,
        "num_stages": p,
        "num_microbatches": m,
        "num_chunks": v,
        "group_size": group_size,
        "loss_delay": draw(st.integers(0, 1)),
    }
