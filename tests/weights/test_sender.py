import numpy as np
import pytest

from ajgrpo.weights.sender import SharedSlots, copy_row_major


@pytest.mark.parametrize("shape", [(5, 3), (64, 48), (7, 33), (1, 9), (9, 1), (0, 4)])
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_matrices_are_copied_row_by_row_whatever_their_layout(shape, dtype):
    values = np.arange(np.prod(shape), dtype=dtype).reshape(shape)
    for source in (values, np.asfortranarray(values), np.repeat(values, 2, axis=0)[::2]):
        target = np.full(shape, 99, dtype)
        assert copy_row_major(source, target) is target
        np.testing.assert_array_equal(target, values)


def test_other_ranks_are_copied_too():
    values = np.arange(24.0).reshape(2, 3, 4).T
    np.testing.assert_array_equal(copy_row_major(values, np.empty((4, 3, 2))), values)


def test_slots_alternate_and_closing_outlives_views():
    slots = SharedSlots(8, b"token")
    first, second, third = (slots.slot(number, 8) for number in range(3))
    first[:] = 1
    second[:] = 2
    assert third.tolist() == [1] * 8
    slots.close()
    slots.close()
    assert first.tolist() == [1] * 8
