"""One random stream per row: NumPy's own, and states that can be put back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_trudi.envs.mujoco import RowGenerators

SEEDS = st.lists(st.integers(0, 2**31), min_size=1, max_size=4)
FINITE = st.floats(-1e6, 1e6)


@settings(max_examples=40, deadline=None)
@given(seeds=SEEDS, low=FINITE, high=FINITE, size=st.integers(0, 5))
def test_equal_to_numpys_default_generator(seeds, low, high, size):
    """To the last bit, call after call."""
    rows = RowGenerators.from_seeds(seeds)
    plain = [np.random.default_rng(seed) for seed in seeds]
    assert len(rows) == len(seeds)
    for _ in range(2):
        expected = [rng.uniform(low, max(low, high), size) for rng in plain]
        assert np.array_equal(rows.uniform(low, max(low, high), size), expected)
        expected = [rng.standard_normal(size) for rng in plain]
        assert np.array_equal(rows.standard_normal(size), expected)
        expected = [rng.integers(0, 10, 3) for rng in plain]
        assert np.array_equal(rows.each(lambda rng: rng.integers(0, 10, 3)), expected)


def test_bounds_for_each_number():
    low, high = np.array([-1.0, 0.0, 5.0]), np.array([1.0, 0.5, 5.0])
    draws = RowGenerators.from_seeds([3, 4]).uniform(low, high, 3)
    for row, seed in zip(draws, (3, 4), strict=True):
        assert np.array_equal(row, np.random.default_rng(seed).uniform(low, high))
    assert draws.shape == (2, 3)


def test_defaults_and_shapes():
    rows = RowGenerators.from_seeds([0, 1])
    assert rows.uniform().shape == rows.standard_normal().shape == (2, 1)
    assert 0 <= rows.uniform(size=100).min() < rows.uniform(size=100).max() < 1
    assert rows.each(lambda rng: 3).tolist() == [3, 3]
    assert rows.each(lambda rng: rng.random((2, 3))).shape == (2, 2, 3)


def draw(rows: RowGenerators) -> list[np.ndarray]:
    # 32-bit integers come in pairs: one of them waits in a buffer.
    return [
        rows.each(lambda rng: rng.integers(0, 2**32, dtype=np.uint32)),
        rows.uniform(-1, 1, 2),
        rows.each(lambda rng: rng.integers(0, 7, 3)),
        rows.standard_normal(3),
    ]


@settings(max_examples=30, deadline=None)
@given(seeds=SEEDS, before=st.integers(0, 3), odd=st.booleans(), data=st.data())
def test_states_are_put_back_bit_for_bit(seeds, before, odd, data):
    rows = RowGenerators.from_seeds(seeds)
    for _ in range(before):
        draw(rows)
    if odd:
        rows.each(lambda rng: rng.integers(0, 2**32, dtype=np.uint32))
    state = rows.get_state()
    assert state.shape == (len(seeds), 6)
    assert state.dtype == torch.int64
    expected = draw(rows)
    rows.set_state(state)
    other = RowGenerators.from_seeds([seed + 1 for seed in seeds])
    draw(other)
    other.set_state(state.clone())
    for each in (rows, other):
        for values, wanted in zip(draw(each), expected, strict=True):
            assert np.array_equal(values, wanted)
    assert torch.equal(rows.get_state(), other.get_state())
    # A state is a copy.
    kept = rows.get_state()
    rows.uniform()
    assert not torch.equal(rows.get_state(), kept)


def test_the_buffered_number_is_part_of_the_state():
    rows = RowGenerators.from_seeds([5])

    def integer():
        return rows.each(lambda rng: rng.integers(0, 2**32, dtype=np.uint32)).item()

    integer()
    state = rows.get_state()
    buffered = integer()  # without a step of the generator
    assert torch.equal(rows.get_state()[:, :4], state[:, :4])
    rows.uniform()
    integer()
    rows.set_state(state)
    assert integer() == buffered


def test_subsets_share_the_streams():
    rows, plain = RowGenerators.from_seeds([7, 8, 9]), [np.random.default_rng(s) for s in (7, 8, 9)]
    part = rows[np.array([2, 0])]
    assert len(part) == 2
    assert part.uniform()[:, 0].tolist() == [plain[2].uniform(), plain[0].uniform()]
    assert rows.uniform()[:, 0].tolist() == [rng.uniform() for rng in plain]
    part.set_state(RowGenerators.from_seeds([1, 2]).get_state())
    expected = [np.random.default_rng(2).uniform(), plain[1].uniform()]
    assert rows.uniform()[:2, 0].tolist() == expected
    assert len(rows[np.array([], int)]) == 0


def test_states_of_another_number_of_rows():
    with pytest.raises(ValueError, match="zip"):
        RowGenerators.from_seeds([0, 1]).set_state(RowGenerators.from_seeds([0]).get_state())
