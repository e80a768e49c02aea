"""Step-size schedules, fixed and learned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrl.testing import get_default_devices

from torchrl_trudi.modules import StepSizes, step_size_weights
from torchrl_trudi.modules.step_sizes import inverse_softplus

SCHEDULES = ("cosine", "linear", "constant")


class TestWeights:
    def test_cosine_published_numbers(self):
        expected = torch.tensor(
            [0.999845, 0.957698, 0.847034, 0.684436, 0.494273, 0.305043, 0.145105, 0.038429],
            dtype=torch.float64,
        )
        weights = step_size_weights(8, dtype=torch.float64)
        torch.testing.assert_close(weights, expected, atol=5e-7, rtol=0)

    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize("num_steps", [1, 2, 5, 8])
    def test_formula(self, schedule, num_steps, literal_weights):
        expected = torch.tensor(literal_weights(num_steps, schedule), dtype=torch.float64)
        weights = step_size_weights(num_steps, schedule, dtype=torch.float64)
        torch.testing.assert_close(weights, expected, atol=1e-15, rtol=1e-14)

    def test_linear_by_hand(self):
        weights = step_size_weights(4, "linear", minimum=0.2, dtype=torch.float64)
        torch.testing.assert_close(weights, torch.tensor([1.0, 0.8, 0.6, 0.4]).double())

    def test_cosine_arguments_by_hand(self):
        # offset 0, power 1, minimum 0: cos(pi/2 * n/N), here at 0 and 60 degrees.
        weights = step_size_weights(3, minimum=0.0, offset=0.0, power=1.0, dtype=torch.float64)
        expected = torch.tensor([1.0, 3**0.5 / 2, 0.5], dtype=torch.float64)
        torch.testing.assert_close(weights, expected)
        # offset 1: half of the quarter wave; minimum 0.5 maps [0, 1] to [0.5, 1].
        weights = step_size_weights(1, minimum=0.5, offset=1.0, power=2.0, dtype=torch.float64)
        torch.testing.assert_close(weights, torch.tensor([0.75], dtype=torch.float64))

    @given(
        num_steps=st.integers(1, 40),
        schedule=st.sampled_from(SCHEDULES),
        minimum=st.floats(1e-4, 0.9),
        offset=st.floats(0.0, 0.5),
        power=st.floats(0.5, 4.0),
    )
    def test_positive_and_never_growing(self, num_steps, schedule, minimum, offset, power):
        weights = step_size_weights(
            num_steps,
            schedule,
            minimum=minimum,
            offset=offset,
            power=power,
            dtype=torch.float64,
        )
        assert weights.shape == (num_steps,)
        assert (weights >= minimum * (1 - 1e-12)).all() and (weights <= 1 + 1e-12).all()
        assert (weights.diff() <= 1e-12).all()

    def test_computed_in_double_then_cast(self):
        exact = step_size_weights(8, dtype=torch.float64)
        assert torch.equal(step_size_weights(8, dtype=torch.float32), exact.float())
        assert step_size_weights(8).dtype == torch.get_default_dtype()

    def test_errors(self):
        with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
            step_size_weights(0)
        with pytest.raises(ValueError, match="'quadratic'.*cosine.*linear.*constant"):
            step_size_weights(8, "quadratic")


class TestStepSizes:
    @pytest.mark.parametrize("device", get_default_devices())
    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize("learn", ["none", "shared", "per_step"])
    def test_initial_sizes(self, learn, schedule, device, literal_weights):
        sizes = StepSizes(8, schedule=schedule, learn=learn, device=device, dtype=torch.float64)
        expected = torch.tensor(literal_weights(8, schedule), dtype=torch.float64) / 8
        out = sizes()
        assert out.device.type == torch.device(device).type
        torch.testing.assert_close(out.cpu(), expected, atol=0, rtol=1e-12)

    def test_default_is_the_fixed_cosine(self):
        torch.testing.assert_close(StepSizes(8)(), step_size_weights(8) / 8)
        assert not list(StepSizes(8).parameters())

    @pytest.mark.parametrize("learn, count", [("none", 0), ("shared", 1), ("per_step", 8)])
    def test_number_of_parameters(self, learn, count):
        assert sum(p.numel() for p in StepSizes(8, learn=learn).parameters()) == count

    def test_shared_scales_all_steps(self, literal_weights):
        sizes = StepSizes(5, learn="shared", dtype=torch.float64)
        with torch.no_grad():
            sizes.raw.fill_(0.7)
        expected = nn.functional.softplus(torch.tensor(0.7).double()) * torch.tensor(
            literal_weights(5, "cosine"), dtype=torch.float64
        )
        torch.testing.assert_close(sizes(), expected, check_dtype=False, atol=1e-7, rtol=0)

    def test_per_step_sizes_are_independent(self):
        sizes = StepSizes(5, learn="per_step", dtype=torch.float64)
        jacobian = torch.func.jacrev(
            lambda raw: torch.func.functional_call(sizes, {"raw": raw}, ())
        )(sizes.raw.detach())
        torch.testing.assert_close(jacobian, torch.diag(torch.sigmoid(sizes.raw.detach())))

    @pytest.mark.parametrize("learn", ["none", "shared", "per_step"])
    def test_state_dict_round_trip(self, learn, randomize):
        source = randomize(StepSizes(6, schedule="linear", learn=learn))
        # The schedule is part of the state: one of another schedule takes it over.
        target = StepSizes(6, schedule="cosine", learn=learn)
        target.load_state_dict(source.state_dict())
        assert torch.equal(target(), source())

    def test_learned_sizes_stay_positive(self):
        sizes = StepSizes(4, learn="per_step")
        optimizer = torch.optim.SGD(sizes.parameters(), lr=1.0)
        for _ in range(20):
            optimizer.zero_grad()
            sizes().sum().backward()
            optimizer.step()
        assert (sizes() > 0).all() and (sizes() < 0.05).all()

    def test_errors(self):
        with pytest.raises(ValueError, match="learn must be .*'yes'"):
            StepSizes(8, learn="yes")
        with pytest.raises(ValueError, match="num_steps"):
            StepSizes(0)
        with pytest.raises(ValueError, match="schedule"):
            StepSizes(8, schedule="exp")


@given(st.floats(1e-30, 1e4))
def test_inverse_softplus(value):
    value = torch.tensor(value, dtype=torch.float64)
    torch.testing.assert_close(
        nn.functional.softplus(inverse_softplus(value)), value, atol=0, rtol=1e-12
    )
