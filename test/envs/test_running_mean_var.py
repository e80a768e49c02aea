from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_trudi.envs import RunningMeanVar

GOLDEN = Path(__file__).parents[1] / "golden" / "rl_f64.npz"


@pytest.mark.parametrize(("inside", "name"), [(False, "std_plus_eps"), (True, "sqrt_var_plus_eps")])
def test_golden(inside, name):
    arrays = {
        key: torch.from_numpy(value) for key, value in np.load(GOLDEN).items() if "norm/" in key
    }
    stats = RunningMeanVar(
        (6,), eps=arrays["norm/eps"].item(), eps_inside_sqrt=inside, exact_variance=False
    )
    for i in range(3):
        x = arrays[f"norm/x{i}"]
        stats.update(x)
        close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-9)
        close(stats.mean, arrays[f"norm/mean{i}"])
        close(stats.var, arrays[f"norm/var{i}"])
        close(stats.normalize(x), arrays[f"norm/y{i}_{name}"])


def test_golden_variance_is_below_that_of_its_data():
    # Why `exact_variance` exists: from the second batch on, the published variance is not that of
    # the rows it was fed, by up to 6 %. Ours is.
    arrays = np.load(GOLDEN)
    batches = [torch.from_numpy(arrays[f"norm/x{i}"]) for i in range(3)]
    stats = RunningMeanVar((6,))
    for i, batch in enumerate(batches):
        stats.update(batch)
        exact = torch.cat(batches[: i + 1]).var(0, correction=0)
        torch.testing.assert_close(stats.var, exact, rtol=1e-12, atol=0)
        published = torch.from_numpy(arrays[f"norm/var{i}"])
        if i == 0:
            torch.testing.assert_close(published, exact, rtol=1e-12, atol=0)
        else:
            assert (published < exact).all()


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    offset=st.floats(-1e3, 1e3),
    seed=st.integers(0, 10**6),
)
def test_any_split_gives_the_statistics_of_the_whole(sizes, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(n, 2, 3, generator=generator).double() + offset for n in sizes]
    stats = RunningMeanVar((3,))
    for batch in batches:
        stats.update(batch)
    rows = torch.cat(batches).flatten(0, 1)
    assert stats.count.item() == len(rows)
    if len(rows):
        torch.testing.assert_close(stats.mean, rows.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(stats.var, rows.var(0, correction=0), rtol=1e-8, atol=1e-12)


def test_first_batch_replaces_initial_values_exactly():
    x = torch.tensor([[1e6], [1e6 + 1e-3]], dtype=torch.float64)
    stats = RunningMeanVar((1,))
    stats.update(x)
    assert torch.equal(stats.mean, x.mean(0))
    assert torch.equal(stats.var, (x - x.mean(0)).square().mean(0))


def test_offset_data_in_float32_keeps_its_variance():
    # E[x^2] - E[x]^2 in float32 would lose it: 1e4^2 has a spacing of 8.
    x = 1e4 + torch.arange(1000.0)[:, None] % 2
    stats = RunningMeanVar((1,))
    for part in x.split(10):
        stats.update(part)
    assert stats.mean.dtype == stats.var.dtype == torch.float64
    torch.testing.assert_close(stats.var.item(), 0.25, rtol=1e-9, atol=0)


def test_mask_is_the_same_as_selecting_rows():
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([True, False, False, True, True, False])
    masked, selected = RunningMeanVar((3,)), RunningMeanVar((3,))
    for stats in (masked, selected):
        stats.update(x)
    masked.update(x.masked_fill(~mask[:, None], torch.nan), mask[:, None])
    selected.update(x[mask])
    assert masked.count == selected.count == 9
    torch.testing.assert_close(masked.mean, selected.mean)
    torch.testing.assert_close(masked.var, selected.var)


@pytest.mark.parametrize("fed", [False, True])
def test_empty_updates_change_nothing(fed):
    stats = RunningMeanVar((2,))
    if fed:
        stats.update(torch.randn(4, 2))
    before = {key: value.clone() for key, value in stats.state_dict().items()}
    stats.update(torch.randn(0, 2))
    stats.update(torch.randn(3, 2), torch.zeros(3, dtype=torch.bool))
    for key, value in stats.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_scalar_samples_clip_and_dtype():
    stats = RunningMeanVar((), clip=0.5)
    stats.update(torch.tensor([-1.0, 1.0]))
    y = stats(torch.tensor([-9.0, 0.0, 9.0]))
    assert y.dtype == torch.float32
    assert y.tolist() == [-0.5, 0.0, 0.5]


def test_constant_feature_stays_finite():
    stats = RunningMeanVar((1,))
    stats.update(torch.full((5, 1), 3.0))
    y = stats.normalize(torch.tensor([[3.0], [3.01]]))
    torch.testing.assert_close(y, torch.tensor([[0.0], [1.0]]), rtol=0, atol=1e-4)


def test_state_dict_round_trip_is_in_place():
    source, target = RunningMeanVar((2,)), RunningMeanVar((2,))
    source.update(torch.randn(7, 2))
    buffer = target.mean
    target.load_state_dict(source.state_dict())
    assert set(source.state_dict()) == {"count", "mean", "var"}
    assert target.mean is buffer
    x = torch.randn(3, 2)
    assert torch.equal(source.normalize(x), target.normalize(x))


def test_normalize_passes_gradients_and_update_does_not():
    stats = RunningMeanVar((2,))
    x = torch.randn(4, 2, requires_grad=True)
    stats.update(x)
    assert not stats.mean.requires_grad
    stats.normalize(x).sum().backward()
    expected = (1 / stats.scale).float().expand(4, 2)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("kwargs", [{"eps": -1.0}, {"eps": float("nan")}, {"clip": 0.0}])
def test_bad_options(kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        RunningMeanVar((1,), **kwargs)


def test_bad_tensors():
    stats = RunningMeanVar((3,))
    with pytest.raises(TypeError, match=r"torch\.int64"):
        stats.update(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\[\*B, 3\], got \(2, 4\)"):
        stats.normalize(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="one entry per row"):
        stats.update(torch.zeros(2, 3), torch.ones(3, dtype=torch.bool))
