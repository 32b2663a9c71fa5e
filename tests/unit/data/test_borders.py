"""What ends with a document inside a sample, against a loop that follows the words."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jmegatron.data.borders import Borders

ALL = Borders(0, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)


def test_the_worked_example():
    found = ALL.arrays(np.array([5, 0, 7, 8, 0, 9, 9, 9], np.int32))
    assert found["position_ids"].tolist() == [0, 1, 0, 1, 2, 0, 1, 2]
    assert found["segment_ids"].tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert found["loss_mask"].tolist() == [1, 0, 1, 1, 0, 1, 1, 1]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_every_pattern_of_ends_equals_a_plain_walk(tokens):
    found = ALL.arrays(np.array(tokens, np.int32))
    position, segment = 0, 0
    for place, token in enumerate(tokens):
        assert found["position_ids"][place] == position
        assert found["segment_ids"][place] == segment
        assert found["loss_mask"][place] == (token != 0)
        position, segment = (0, segment + 1) if token == 0 else (position + 1, segment)


def test_nothing_ends_by_default():
    assert Borders(0).arrays(np.array([1, 0, 1], np.int32)) == {}


@given(st.lists(st.lists(st.integers(0, 2), min_size=7, max_size=7), min_size=1, max_size=5), st.sampled_from("Hi"))
def test_rows_at_once_equal_each_row_alone(rows, dtype):
    tokens = np.array(rows, dtype)
    found = ALL.arrays(tokens)
    assert {name: values.dtype for name, values in found.items()} == {
        "loss_mask": np.bool_,
        "position_ids": np.int32,
        "segment_ids": np.int32,
    }
    for row, values in enumerate(tokens):
        for name, expected in ALL.arrays(values).items():
            np.testing.assert_array_equal(found[name][row], expected)
