"""Rows of plain memory, and numpy's array of them for whoever asks."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from unspool.ops.cpu.float_rows import FloatRows


@pytest.fixture
def rows() -> FloatRows:
    return FloatRows(memoryview(array("f", range(12))), 4)


def test_rows_and_slices_of_rows(rows: FloatRows) -> None:
    assert len(rows) == 3
    assert [row.tolist() for row in rows] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert rows[-1].tolist() == [8, 9, 10, 11]
    assert [row.tolist() for row in rows[1:]] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert [row.tolist() for row in rows[-1:]] == [[8, 9, 10, 11]]
    assert len(rows[3:]) == len(rows[2:1]) == 0


@pytest.mark.parametrize("index", [3, -4])
def test_a_row_that_is_not_there(rows: FloatRows, index: int) -> None:
    with pytest.raises(IndexError, match=f"row {index} of 3"):
        rows[index]
    with pytest.raises(IndexError, match="step 1, not 2"):
        rows[::2]


def test_an_array_for_whoever_asks(rows: FloatRows) -> None:
    array_of = np.asarray(rows)
    assert array_of.shape == (3, 4)
    assert array_of.dtype == np.float32
    array_of[1, 0] = -1
    assert rows[1][0] == -1, "the same memory"
    copied = np.array(rows)
    copied[1, 1] = -2
    assert rows[1][1] == 5
    assert np.asarray(rows, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(rows, np.float64, copy=False)
    assert np.asarray(FloatRows(memoryview(array("f")), 4)).shape == (0, 4)
