"""Rows of a key in its slices: against indexing the whole array."""

from __future__ import annotations

import numpy as np
import pytest

from p3 import rows
from p3.slicing import cut


@pytest.mark.parametrize("shape", [(7, 3), (7, 1), (5, 2, 2), (9,), (1, 20)])
@pytest.mark.parametrize("slice_elems", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("ids", [[], [0], [0, 1, 4], [2, 3], [4]])
def test_rows_come_through_slices_as_they_are(shape, slice_elems, ids):
    ids = np.array([i for i in ids if i < shape[0]], np.int64)
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1
    row_elems = int(np.prod(shape[1:]))
    values = whole[ids].ravel()
    result = np.zeros(whole.size, np.float32)
    for part in cut(whole.size, slice_elems, 0, 1, False):
        low, high, first, last = rows.span(ids, row_elems, part.start, part.stop)
        payload = rows.encode(ids[low:high], values[first:last].tobytes())
        got = rows.decode(payload, "float32", row_elems, part.start, part.stop, True)
        assert len(got.offsets) == last - first
        result[part.start : part.stop][got.offsets] = got.values
    expected = np.zeros_like(whole)
    expected[ids] = whole[ids]
    np.testing.assert_array_equal(result.reshape(shape), expected)


def test_sums_are_in_order_and_keep_what_only_one_has():
    first = rows.Rows(np.array([0, 2]), np.array([1e8, 1.0], np.float32), 4)
    second = rows.Rows(np.array([0, 3]), np.array([1.0, 5.0], np.float32), 4)
    third = rows.Rows(np.array([0]), np.array([-1e8], np.float32), 4)
    total = rows.add_up([first, second, third], "float32")
    assert total.offsets.tolist() == [0, 2, 3]
    assert total.values.tolist() == [0.0, 1.0, 5.0]  # 1e8 + 1 - 1e8, in this order


def test_half_precision_is_summed_in_single():
    parts = [rows.Rows(np.array([1]), np.array([30000], np.float16), 2)] * 2
    parts.append(rows.Rows(np.array([1]), np.array([-30000], np.float16), 2))
    assert rows.add_up(parts, "float16").values.tolist() == [30000]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\1\0\0\0\0\0\0\0",
        rows.encode(np.array([3, 1], np.int64), bytes(16)),
        rows.encode(np.array([1, 1], np.int64), bytes(16)),
        rows.encode(np.array([-1], np.int64), bytes(8)),
        rows.encode(np.array([9], np.int64), bytes(8)),
        rows.encode(np.array([1], np.int64), bytes(4)),
        b"\xff\xff\xff\xff\xff\xff\xff\xff",
    ],
)
def test_damaged_payloads_are_refused(payload):
    with pytest.raises(ValueError, match="rows"):
        rows.decode(payload, "float32", 2, 0, 8, True)


def test_neighbouring_slices_are_joined():
    first = rows.Rows(np.array([1]), np.array([5.0]), 4)
    joined = rows.join([first, rows.Rows(np.array([0]), np.array([6.0]), 3)])
    assert joined.size == 7
    assert joined.offsets.tolist() == [1, 4]
    assert joined.values.tolist() == [5.0, 6.0]
