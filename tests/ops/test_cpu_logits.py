"""A step's logits: rows of plain memory, and numpy's array of them for whoever asks."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from unspool.ops.cpu.logits import Logits


@pytest.fixture
def logits() -> Logits:
    return Logits(memoryview(array("f", range(12))), 4)


def test_rows_and_slices_of_rows(logits: Logits) -> None:
    assert len(logits) == 3
    assert [row.tolist() for row in logits] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert logits[-1].tolist() == [8, 9, 10, 11]
    assert [row.tolist() for row in logits[1:]] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert [row.tolist() for row in logits[-1:]] == [[8, 9, 10, 11]]
    assert len(logits[3:]) == len(logits[2:1]) == 0


@pytest.mark.parametrize("index", [3, -4])
def test_a_row_that_is_not_there(logits: Logits, index: int) -> None:
    with pytest.raises(IndexError, match=f"row {index} of 3"):
        logits[index]
    with pytest.raises(IndexError, match="steps of 2"):
        logits[::2]


def test_an_array_for_whoever_asks(logits: Logits) -> None:
    assert np.asarray(logits).shape == logits.shape == (3, 4)
    assert logits.dtype == np.float32
    assert logits.copy().sum() == 66
    logits.array[1, 0] = -1
    assert logits[1][0] == -1, "the same memory"
    assert Logits(memoryview(array("f")), 4).array.shape == (0, 4)
