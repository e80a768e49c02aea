from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_trudi.envs import FiniteCheck


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_names_key_and_rows(value, shape):
    x = torch.zeros(4, *shape)
    x[1] = x[3] = value
    tensordict = TensorDict({"nested": {"x": x}, "fine": torch.zeros(4, 1)}, [4])
    check = FiniteCheck(["fine", ("nested", "x")])
    with pytest.raises(FloatingPointError, match=r"\('nested', 'x'\) in 2 of 4 rows: 1, 3\."):
        check(tensordict)


def test_opposite_infinities_and_one_bad_entry_are_seen():
    for values in ([torch.inf, -torch.inf], [0.0, torch.nan]):
        with pytest.raises(FloatingPointError, match="'x' in 1 of 1 rows: 0"):
            FiniteCheck(["x"])(TensorDict({"x": torch.tensor([values])}, [1]))


def test_large_finite_values_pass():
    x = torch.full((2, 3), 3e38)
    assert x.sum().isinf()
    FiniteCheck(["x"])(TensorDict({"x": x}, [2]))


def test_absent_key_passes_and_many_rows_are_abridged():
    FiniteCheck(["reward"])(TensorDict({}, [2]))
    with pytest.raises(FloatingPointError, match=r"in 20 of 20 rows: 0, 1, .*8, 9, \.\.\."):
        FiniteCheck(["x"])(TensorDict({"x": torch.full((20, 1), torch.nan)}, [20]))


def test_without_batch_dimension():
    with pytest.raises(FloatingPointError, match="non-finite 'x'"):
        FiniteCheck(["x"])(TensorDict({"x": torch.tensor([torch.nan])}, []))
