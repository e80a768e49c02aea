"""DenoisingPath and the Gaussian closed forms against torch.distributions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributions as D
from torch.distributions import kl_divergence
from torchrl.testing import get_default_devices

from torchrl_trudi.modules import (
    DenoisingPath,
    gaussian_entropy,
    gaussian_kl,
    gaussian_log_prob,
)

N, A = 4, 2
EVENT_DIMS = [1, 2]


def draw(*shape, seed=0, device=None):
    generator = torch.Generator().manual_seed(seed)
    loc = torch.randn(*shape, N, A, dtype=torch.float64, generator=generator)
    scale = torch.rand(N, A, dtype=torch.float64, generator=generator) + 0.2
    return loc.to(device), scale.to(device)


def independent(loc, scale, event_dims):
    return D.Independent(D.Normal(loc, scale.expand_as(loc)), event_dims)


def assert_close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", get_default_devices())
@pytest.mark.parametrize("event_dims", EVENT_DIMS)
@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
class TestAgainstTorch:
    def test_shapes(self, batch, event_dims, device):
        path = DenoisingPath(*draw(*batch, device=device), event_dims)
        assert path.batch_shape == (batch if event_dims == 2 else (*batch, N))
        assert path.event_shape == ((N + 1, A) if event_dims == 2 else (A,))
        assert path.mean.shape == path.variance.shape == (*batch, N, A)

    def test_log_prob(self, batch, event_dims, device):
        loc, scale = draw(*batch, device=device)
        chain = torch.randn(*batch, N + 1, A, dtype=torch.float64, device=device)
        expected = independent(loc, scale, event_dims).log_prob(chain[..., 1:, :])
        assert_close(DenoisingPath(loc, scale, event_dims).log_prob(chain), expected)

    def test_moments_and_entropy(self, batch, event_dims, device):
        loc, scale = draw(*batch, device=device)
        path, expected = (
            DenoisingPath(loc, scale, event_dims),
            independent(loc, scale, event_dims),
        )
        assert_close(path.mean, expected.mean)
        assert_close(path.variance, expected.variance)
        assert_close(path.stddev, expected.stddev)
        assert path.entropy().shape == path.batch_shape
        assert_close(path.entropy(), expected.entropy())

    def test_kl(self, batch, event_dims, device):
        old = draw(*batch, seed=1, device=device)
        new = draw(*batch, seed=2, device=device)
        expected = kl_divergence(independent(*old, event_dims), independent(*new, event_dims))
        p, q = DenoisingPath(*old, event_dims), DenoisingPath(*new, event_dims)
        assert_close(p.kl(q), expected)
        assert_close(kl_divergence(p, q), expected)
        # simplified: the other's scale replaced by one's own
        same_scale = independent(new[0], old[1], event_dims)
        expected = kl_divergence(independent(*old, event_dims), same_scale)
        torch.testing.assert_close(p.kl(q, "simplified"), expected, atol=0, rtol=2e-7)


class TestDenoisingPath:
    def test_default_is_the_whole_path(self):
        assert DenoisingPath(*draw(5)).event_dims == 2

    def test_path_is_the_sum_of_its_steps(self):
        loc, scale = draw(5)
        chain = torch.randn(5, N + 1, A, dtype=torch.float64)
        path, steps = DenoisingPath(loc, scale, 2), DenoisingPath(loc, scale, 1)
        other = DenoisingPath(*draw(5, seed=2), 2), DenoisingPath(*draw(5, seed=2), 1)
        assert_close(path.log_prob(chain), steps.log_prob(chain).sum(-1))
        assert_close(path.entropy(), steps.entropy().sum(-1))
        assert_close(path.kl(other[0]), steps.kl(other[1]).sum(-1))

    def test_the_prior_sample_is_left_out(self):
        path = DenoisingPath(*draw(5))
        chain = torch.randn(5, N + 1, A, dtype=torch.float64)
        other = chain.clone()
        other[:, 0] += 1
        assert torch.equal(path.log_prob(chain), path.log_prob(other))
        other[:, 1] += 1
        assert (path.log_prob(chain) != path.log_prob(other)).all()

    def test_mixed_scale_shapes(self):
        loc, scale = draw(5)
        full = DenoisingPath(loc, scale.expand_as(loc))
        assert_close(
            full.kl(DenoisingPath(loc + 1, scale)),
            DenoisingPath(loc, scale).kl(DenoisingPath(loc + 1, scale.expand_as(loc))),
        )
        assert_close(full.entropy(), DenoisingPath(loc, scale).entropy())

    @pytest.mark.parametrize("event_dims", EVENT_DIMS)
    def test_expand(self, event_dims):
        loc, scale = draw(5)
        path = DenoisingPath(loc, scale, event_dims)
        chain = torch.randn(3, 5, N + 1, A, dtype=torch.float64)
        expanded = path.expand((3, *path.batch_shape))
        assert isinstance(expanded, DenoisingPath) and expanded.event_dims == event_dims
        assert expanded.batch_shape == (3, *path.batch_shape)
        assert expanded.event_shape == path.event_shape
        assert_close(expanded.log_prob(chain), torch.stack([path.log_prob(c) for c in chain]))
        assert_close(expanded.entropy(), path.entropy().expand(expanded.batch_shape))

    @pytest.mark.parametrize("method", ["sample", "rsample"])
    def test_sampling_needs_the_network(self, method):
        with pytest.raises(NotImplementedError, match="DiffusionActor or DenoisingModel.sample"):
            getattr(DenoisingPath(*draw(5)), method)()
        assert not DenoisingPath.has_rsample

    @pytest.mark.parametrize("length", [1, N, N + 2])
    def test_wrong_chain_length(self, length):
        with pytest.raises(ValueError, match=rf"4 steps has 5 states.*\(5, {length}, 2\)"):
            DenoisingPath(*draw(5)).log_prob(torch.zeros(5, length, A))

    def test_construction_errors(self):
        loc, scale = draw(5)
        with pytest.raises(ValueError, match="event_dims must be 1 .* or 2 .*got 3"):
            DenoisingPath(loc, scale, 3)
        with pytest.raises(ValueError, match=r"loc must have shape .*got \(2,\)"):
            DenoisingPath(loc[0, 0], scale[0])

    def test_differentiable(self):
        loc, scale = draw(3)
        chain = torch.randn(3, N + 1, A, dtype=torch.float64)
        old = DenoisingPath(*draw(3, seed=4))

        def outputs(loc, scale):
            path = DenoisingPath(loc, scale)
            kls = old.kl(path), path.kl(old), old.kl(path, "simplified")
            return path.log_prob(chain), path.entropy(), *kls

        assert torch.autograd.gradcheck(outputs, (loc.requires_grad_(), scale.requires_grad_()))


means = st.floats(-1e3, 1e3)
scales = st.floats(1e-2, 1e2)


def scalar(*values):
    return (torch.tensor([value], dtype=torch.float64) for value in values)


class TestGaussianKL:
    @given(means, scales, means, scales)
    def test_never_negative(self, loc_p, scale_p, loc_q, scale_q):
        args = tuple(scalar(loc_p, scale_p, loc_q, scale_q))
        full, simplified = gaussian_kl(*args), gaussian_kl(*args, "simplified")
        assert full >= -1e-12 and simplified >= 0
        expected = kl_divergence(D.Normal(args[0], args[1]), D.Normal(args[2], args[3]))[0]
        torch.testing.assert_close(full, expected, atol=1e-9, rtol=1e-9)

    @given(means, scales)
    def test_zero_for_the_same(self, loc, scale):
        args = tuple(scalar(loc, scale, loc, scale))
        assert gaussian_kl(*args) == 0 and gaussian_kl(*args, "simplified") == 0

    @given(means, scales, st.floats(1e-3, 1e3), st.floats(1.001, 1e3))
    def test_positive_for_others(self, loc, scale, shift, factor):
        p = tuple(scalar(loc, scale))
        moved, scaled = p[0] + shift, p[1] * factor
        assert gaussian_kl(*p, moved, p[1]) > 0
        assert gaussian_kl(*p, moved, p[1], "simplified") > 0
        assert gaussian_kl(*p, p[0], scaled) > 0
        assert gaussian_kl(*p, p[0], p[1] / factor) > 0
        # the simplified form does not see the scale of the other
        assert gaussian_kl(*p, p[0], scaled, "simplified") == 0

    @given(means, means, scales)
    def test_full_is_simplified_for_equal_scales(self, loc_p, loc_q, scale):
        args = tuple(scalar(loc_p, scale, loc_q, scale))
        full, simplified = gaussian_kl(*args), gaussian_kl(*args, "simplified")
        # the published form guards its denominator 2 s^2 with 1e-8
        guard = 1 / (1 + 1e-8 / (2 * scale**2))
        torch.testing.assert_close(simplified, full * guard, atol=1e-12, rtol=1e-12)

    def test_simplified_by_hand(self):
        loc_p, scale_p, loc_q, scale_q = scalar(1.0, 2.0, 4.0, 77.0)
        # 3^2 / (2 * 2^2) = 1.125
        value = gaussian_kl(loc_p, scale_p, loc_q, scale_q, "simplified")
        assert value.item() == pytest.approx(1.125, rel=1e-8)

    def test_a_vanishing_scale_stays_finite_in_the_simplified_form(self):
        loc_p, scale_p, loc_q, scale_q = scalar(0.0, 0.0, 1e-4, 1.0)
        value = gaussian_kl(loc_p, scale_p, loc_q, scale_q, "simplified")
        assert value.item() == pytest.approx(1.0, rel=1e-12)  # 1e-8 / 1e-8

    def test_unknown_kind(self):
        with pytest.raises(ValueError, match="'reverse'.*'full' or 'simplified'"):
            gaussian_kl(*scalar(0.0, 1.0, 0.0, 1.0), "reverse")


def test_log_prob_and_entropy_reduce_the_last_dimension():
    loc, scale = draw(5)
    value = torch.randn_like(loc)
    expected = independent(loc, scale, 1)
    assert_close(gaussian_log_prob(value, loc, scale), expected.log_prob(value))
    assert_close(gaussian_entropy(scale.expand_as(loc)), expected.entropy())
