from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_trudi.modules import gaussian_kl, project_gaussian, project_path

DTYPE = torch.float64
KINDS = ["full", "simplified"]
SHARES = ["uniform", "proportional"]


def literal_kl(loc_old, scale_old, loc, scale, kind):
    """In float64, ``[*B]``."""
    loc_old, scale_old, loc, scale = (x.double() for x in (loc_old, scale_old, loc, scale))
    if kind == "simplified":
        return ((loc - loc_old) ** 2 / (2 * scale_old**2 + 1e-8)).sum(-1)
    old, new = (torch.distributions.Normal(*pair) for pair in ((loc_old, scale_old), (loc, scale)))
    return torch.distributions.kl_divergence(old, new).sum(-1)


def draw(seed, *shape, distance=1.0, spread=0.5, dtype=DTYPE):
    """Old and new Gaussians: means ``distance`` scales apart, scales up to ``e^spread``-fold."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(4, *shape, generator=generator, dtype=DTYPE)
    loc_old, scale_old = 2 * draws[0], 0.3 * torch.exp(0.3 * draws[1].clamp(-2, 2))
    loc = loc_old + distance * scale_old * draws[2]
    scale = scale_old * torch.exp(spread * draws[3].clamp(-1, 1))
    return tuple(x.to(dtype) for x in (loc_old, scale_old, loc, scale))


class TestExact:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("share", SHARES)
    @settings(max_examples=30, deadline=None)
    @given(
        seed=st.integers(0, 2**16),
        distance=st.floats(-6, 4).map(lambda x: 10**x),
        spread=st.floats(0, math.log(1e3)),
        eps=st.floats(1e-3, 1.0),
        num_steps=st.integers(1, 8),
        size=st.integers(1, 20),
    )
    def test_within_the_bound_in_float32(
        self, kind, share, seed, distance, spread, eps, num_steps, size
    ):
        old_new = draw(
            seed, 5, num_steps, size, distance=distance, spread=spread, dtype=torch.float32
        )
        projected = project_path(*old_new, eps, kind=kind, share=share)
        assert all(part.isfinite().all() for part in projected)
        # In what was asked for, and as the library measures it, in float32 too.
        kl = literal_kl(*old_new[:2], *projected, kind)
        assert (kl.sum(-1) <= eps + 1e-6).all()
        measured = gaussian_kl(*old_new[:2], *projected, kind)
        assert (measured.sum(-1) <= eps + 2e-6).all()
        if share == "uniform":
            assert (kl <= eps / num_steps + 1e-6).all()

    @pytest.mark.parametrize("kind", KINDS)
    @settings(max_examples=30, deadline=None)
    @given(
        seed=st.integers(0, 2**16),
        distance=st.floats(-2, 4).map(lambda x: 10**x),
        spread=st.floats(0, math.log(1e3)),
        eps=st.floats(1e-4, 10.0),
    )
    def test_lands_on_the_bound(self, kind, seed, distance, spread, eps):
        old_new = draw(seed, 7, 3, distance=distance, spread=spread)
        kl = literal_kl(*old_new, kind)
        after = literal_kl(*old_new[:2], *project_gaussian(*old_new, eps, kind), kind)
        torch.testing.assert_close(after, kl.clamp(max=eps), rtol=1e-10, atol=1e-13)

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_extremes(self, kind):
        """1e4 away, a thousandth or a thousand times the scale."""
        for loc, ratio in ((1e4, 1e-3), (1e4, 1e3), (0.0, 1e-3), (0.0, 1e3), (-1e4, 1.0)):
            old = torch.zeros(4, 6), torch.full((6,), 0.1)
            new = torch.full((4, 6), loc, requires_grad=True), (0.1 * ratio * torch.ones(6))
            new[1].requires_grad_()
            projected = project_gaussian(*old, *new, 0.0125, kind)
            assert (literal_kl(*old, *projected, kind) <= 0.0125 + 1e-7).all()
            sum(part.square().sum() for part in projected).backward()
            assert all(part.grad.isfinite().all() for part in new)

    @pytest.mark.parametrize("kind", KINDS)
    def test_proportional(self, kind):
        """The total is the bound; every step keeps its part of what it asked for."""
        old_new = draw(0, 6, 5, 3, distance=2.0)
        asked = literal_kl(*old_new, kind)
        kl = literal_kl(
            *old_new[:2], *project_path(*old_new, 0.1, kind=kind, share="proportional"), kind
        )
        expected = 0.1 * asked / asked.sum(-1, keepdim=True)
        torch.testing.assert_close(kl, expected, rtol=1e-10, atol=0)

    @pytest.mark.parametrize("kind", KINDS)
    def test_proportional_with_a_step_that_has_not_moved(self, kind):
        loc_old, scale_old, loc, scale = draw(0, 6, 5, 3, distance=2.0)
        loc[:, 2], scale[:, 2] = loc_old[:, 2], scale_old[:, 2]
        old_new = [x.requires_grad_() for x in (loc_old, scale_old, loc, scale)]
        projected = project_path(*old_new, 0.1, kind=kind, share="proportional")
        assert torch.equal(projected[0][:, 2], loc[:, 2])
        assert torch.equal(projected[1][:, 2], scale[:, 2])
        kl = literal_kl(loc_old, scale_old, *projected, kind).sum(-1)
        torch.testing.assert_close(kl, torch.full_like(kl, 0.1), rtol=1e-10, atol=0)
        sum(part.square().sum() for part in projected).backward()
        assert all(x.grad.isfinite().all() for x in old_new if x.grad is not None)


class TestPath:
    def test_equal_scales_closed_form(self):
        """KL is the square of the distance: t = sqrt(bound / KL)."""
        loc_old, scale_old, loc, _ = draw(1, 5, 3, distance=2.0)
        kl = literal_kl(loc_old, scale_old, loc, scale_old, "full").unsqueeze(-1)
        expected = loc_old + (0.1 / kl).sqrt() * (loc - loc_old)
        for kind in KINDS:
            moved, scale = project_gaussian(loc_old, scale_old, loc, scale_old, 0.1, kind)
            torch.testing.assert_close(moved, expected, rtol=1e-7, atol=1e-9)
            torch.testing.assert_close(scale, scale_old)

    def test_is_a_geometric_mixture(self):
        """log q_t = (1 - t) log q_old + t log q + const, with one t for all dimensions."""
        loc_old, scale_old, loc, scale = draw(2, 5, 3, distance=2.0)
        moved, spread = project_gaussian(loc_old, scale_old, loc, scale, 0.1)
        change = spread**-2 - scale_old**-2
        t = change / (scale**-2 - scale_old**-2)
        torch.testing.assert_close(t, t[:, :1].expand_as(t))
        assert ((t > 0) & (t < 1)).all()
        mean = (1 - t) * loc_old / scale_old**2 + t * loc / scale**2
        torch.testing.assert_close(moved / spread**2, mean)

    def test_simplified_leaves_the_scale(self):
        old_new = draw(3, 5, 3, distance=10.0)
        assert project_gaussian(*old_new, 0.1, "simplified")[1] is old_new[3]

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("share", SHARES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_identity_inside_bit_by_bit(self, kind, share, dtype):
        old_new = draw(4, 9, 4, 3, distance=0.01, spread=0.01, dtype=dtype)
        loc, scale = project_path(*old_new, 0.1, kind=kind, share=share)
        assert torch.equal(loc, old_new[2]) and torch.equal(scale, old_new[3])
        loc, scale = project_path(*old_new[:2], *old_new[:2], 0.1, kind=kind, share=share)
        assert torch.equal(loc, old_new[0]) and torch.equal(scale, old_new[1])

    def test_scales_shared_by_the_batch(self):
        loc_old, _, loc, _ = draw(5, 6, 4, 3, distance=2.0)
        scale_old, scale = draw(6, 4, 3)[1::2]
        alone = project_path(loc_old, scale_old.expand_as(loc), loc, scale.expand_as(loc), 0.1)
        together = project_path(loc_old, scale_old, loc, scale, 0.1)
        for a, b in zip(alone, together, strict=True):
            torch.testing.assert_close(a, b)


class TestGradient:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("share", SHARES)
    @pytest.mark.parametrize("distance", [0.01, 3.0], ids=["inside", "outside"])
    def test_finite_differences(self, kind, share, distance):
        old_new = draw(7, 3, 4, 2, distance=distance, spread=0.3 * distance)
        beyond = literal_kl(*old_new, kind) > 0.1
        assert beyond.all() if distance > 1 else not beyond.any()

        def function(*parts):
            loc, scale = project_path(*parts, 0.1, kind=kind, share=share)
            return loc, scale

        inputs = [part.clone().requires_grad_() for part in old_new]
        assert torch.autograd.gradcheck(function, inputs, eps=1e-7, atol=1e-6)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("share", SHARES)
    def test_new_equals_old(self, kind, share):
        """The gradient is that of the identity."""
        loc_old, scale_old, _, _ = draw(8, 3, 4, 2)
        loc, scale = loc_old.clone().requires_grad_(), scale_old.clone().requires_grad_()
        projected = project_path(loc_old, scale_old, loc, scale, 0.1, kind=kind, share=share)
        (projected[0].sum() + 2 * projected[1].sum()).backward()
        assert (loc.grad == 1).all() and (scale.grad == 2).all()

    @pytest.mark.parametrize("kind", KINDS)
    def test_no_pull_outwards_beyond_the_bound(self, kind):
        """The projection does not change along its own path, so its derivative there is zero."""
        loc_old, scale_old, loc, _ = draw(9, 5, 3, distance=3.0)
        loc.requires_grad_()
        moved, _ = project_gaussian(loc_old, scale_old, loc, scale_old, 0.1, kind)
        moved.sum().backward()
        outwards = (loc.grad * (loc - loc_old)).sum(-1)
        torch.testing.assert_close(outwards, torch.zeros_like(outwards), rtol=0, atol=1e-9)


class TestTransforms:
    @pytest.mark.parametrize("kind", KINDS)
    def test_vmap(self, kind):
        old_new = draw(10, 3, 5, 4, 2)
        together = project_path(*old_new, 0.1, kind=kind)
        mapped = torch.vmap(lambda *parts: project_path(*parts, 0.1, kind=kind))(*old_new)
        for a, b in zip(together, mapped, strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize("kind, share", [("full", "proportional"), ("simplified", "uniform")])
    def test_traced_in_one_graph(self, kind, share):
        old_new = [part.requires_grad_() for part in draw(11, 3, 4, 2)]

        def function(*parts):
            return project_path(*parts, 0.1, kind=kind, share=share)

        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        grads = []
        for each in (function, compiled):
            loc, scale = each(*old_new)
            total = loc.square().sum() + scale.sum()
            grads.append(torch.autograd.grad(total, old_new))
            torch.testing.assert_close(loc, function(*old_new)[0])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("function", [project_gaussian, project_path])
def test_unknown_kl(function):
    with pytest.raises(ValueError, match="Unknown KL 'half'"):
        function(*draw(0, 2, 3, 2), 0.1, kind="half")


def test_unknown_share():
    with pytest.raises(ValueError, match="Unknown share 'fair'"):
        project_path(*draw(0, 2, 3, 2), 0.1, share="fair")
