from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives._parts import literal_return

from torchrl_trudi.objectives import soft_td_lambda_return


def column(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype).unsqueeze(-1)


def returns(
    value=(10.0, 20.0, 30.0),
    log_prob=(0.5, -1.0, 1.5),
    reward=(1.0, 2.0, 3.0),
    terminated=(),
    truncated=(),
    rates=(0.5, 0.5, 2.0),
    **kwargs,
):
    """The returns of one sequence, with the steps that end it given by number."""
    steps = range(len(reward))
    ends = column([t in (*terminated, *truncated) for t in steps], torch.bool)
    ends_terminal = column([t in terminated for t in steps], torch.bool)
    out = soft_td_lambda_return(
        *rates, column(value), column(log_prob), column(reward), ends, ends_terminal, **kwargs
    )
    return out.squeeze(-1).tolist()


class TestByHand:
    """gamma = lambda = 1/2 and alpha = 2: soft rewards 0.5, 3, 1.5, by pencil."""

    def test_continuing(self):
        # 1.5 + 30/2; 3 + (16.5/2 + 20/2)/2; 0.5 + (12.125/2 + 10/2)/2
        assert returns() == [6.03125, 12.125, 16.5]

    def test_terminated(self):
        assert returns(terminated=[1]) == [3.5, 2.0, 16.5]

    def test_terminated_at_the_last_row(self):
        assert returns(terminated=[2]) == [0.5 + (0.5 * 8.75 + 5) / 2, 3 + (1.5 + 10) / 2, 3.0]

    def test_truncated(self):
        assert returns(truncated=[1]) == [6.25, 13.0, 16.5]

    def test_termination_wins_over_truncation(self):
        assert returns(terminated=[1], truncated=[1]) == [3.5, 2.0, 16.5]

    def test_entropy_of_a_terminal_step(self):
        """The published variant keeps the term, also for the steps before."""
        assert returns(terminated=[1], mask_terminal_entropy=False) == [3.75, 3.0, 16.5]

    def test_entropy_of_a_truncated_step_stays(self):
        assert returns(truncated=[1], mask_terminal_entropy=True) == returns(
            truncated=[1], mask_terminal_entropy=False
        )

    def test_the_last_row_bootstraps_whether_flagged_or_not(self):
        assert returns(truncated=[2]) == returns()

    def test_one_row(self):
        assert returns(value=[4.0], log_prob=[1.0], reward=[1.0]) == [1 - 1 + 2]


class TestNaN:
    def test_value_and_log_prob_of_a_terminal_step_are_not_read(self):
        nan = math.nan
        assert returns([10.0, nan, 30.0], [0.5, nan, 1.5], terminated=[1]) == [3.5, 2.0, 16.5]

    def test_value_of_a_terminal_step_without_the_entropy_mask(self):
        out = returns([10.0, math.nan, 30.0], terminated=[1], mask_terminal_entropy=False)
        assert out == [3.75, 3.0, 16.5]

    def test_value_of_a_truncated_step_is(self):
        """A missing value must not be taken for zero."""
        assert math.isnan(returns([10.0, math.nan, 30.0], truncated=[1])[1])

    def test_gradient_is_finite(self):
        value = column([10.0, math.nan, 30.0]).requires_grad_()
        ends = column([False, True, False], torch.bool)
        out = soft_td_lambda_return(
            0.5, 0.5, 2.0, value, column([0.5, math.nan, 1.5]), column([1.0, 2.0, 3.0]), ends, ends
        )
        out.sum().backward()
        # d(G0)/dV0 = 1/4; V1 is not read; d(G2)/dV2 = 1/2, and the end cuts it off from G0.
        assert value.grad.squeeze(-1).tolist() == [0.25, 0.0, 0.5]


finite = st.floats(-10, 10)
rate = st.floats(0, 1)


@st.composite
def sequences(draw):
    length = draw(st.integers(1, 7))

    def some(element):
        return draw(st.lists(element, min_size=length, max_size=length))

    return {
        "value": some(finite),
        "log_prob": some(finite),
        "reward": some(finite),
        "terminated": some(st.booleans()),
        "truncated": some(st.booleans()),
    }


def numbers(flags):
    return [t for t, flag in enumerate(flags) if flag]


def of_sequence(sequence, rates, **kwargs):
    flags = {key: numbers(sequence[key]) for key in ("terminated", "truncated")}
    return returns(**{**sequence, **flags}, rates=rates, **kwargs)


class TestInvariants:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(sequences(), rate, rate, st.floats(0, 3), st.booleans())
    def test_equals_the_literal_recursion(self, sequence, gamma, lmbda, alpha, mask):
        out = of_sequence(sequence, (gamma, lmbda, alpha), mask_terminal_entropy=mask)
        expected = literal_return(gamma, lmbda, alpha, **sequence, mask=mask)
        assert out == pytest.approx(expected, rel=1e-10, abs=1e-9)

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(sequences(), st.data())
    def test_nothing_crosses_an_end(self, sequence, data):
        length = len(sequence["reward"])
        cut = data.draw(st.integers(0, length - 1))
        sequence[data.draw(st.sampled_from(["terminated", "truncated"]))][cut] = True
        before = of_sequence(sequence, (0.9, 0.8, 0.5))
        for key in ("reward", "value", "log_prob"):
            sequence[key] = [x + 100 if t > cut else x for t, x in enumerate(sequence[key])]
        assert of_sequence(sequence, (0.9, 0.8, 0.5))[: cut + 1] == before[: cut + 1]

    @settings(max_examples=30, deadline=None, derandomize=True)
    @given(sequences(), rate, rate)
    def test_temperature_zero_ignores_log_probs(self, sequence, gamma, lmbda):
        other = {**sequence, "log_prob": [x + 1 for x in sequence["log_prob"]]}
        rates = (gamma, lmbda, 0.0)
        assert of_sequence(sequence, rates) == of_sequence(other, rates)


class TestLimits:
    def test_reward_one_for_ever_is_a_fixed_point(self):
        """With V' = 1 / (1 - gamma) everywhere, that is also the return, whatever lambda."""
        for lmbda in (0.0, 0.7, 1.0):
            out = returns([10.0] * 6, [0.0] * 6, [1.0] * 6, rates=(0.9, lmbda, 0.3))
            assert out == pytest.approx([10.0] * 6)

    def test_an_episode_of_ones_that_ends(self):
        out = returns([99.0] * 4, [5.0] * 4, [1.0] * 4, terminated=[3], rates=(0.9, 1.0, 0.0))
        assert out == pytest.approx([(1 - 0.9**k) / 0.1 for k in (4, 3, 2, 1)])

    def test_lambda_zero_is_one_step(self):
        assert returns(rates=(0.5, 0.0, 2.0)) == [0.5 + 5, 3 + 10, 1.5 + 15]

    def test_gamma_zero_is_the_reward(self):
        assert returns(rates=(0.0, 0.5, 2.0)) == [1.0, 2.0, 3.0]


class TestLayout:
    def arguments(self, *batch):
        floats = [torch.randn(*batch, 5, 1, dtype=torch.float64) for _ in range(3)]
        terminated = torch.rand(*batch, 5, 1) < 0.2
        return [*floats, terminated | (torch.rand(*batch, 5, 1) < 0.2), terminated]

    def test_batch_rows_are_independent(self):
        rows = self.arguments(2, 3)
        together = soft_td_lambda_return(0.9, 0.8, 0.5, *rows)
        for i in range(2):
            for j in range(3):
                alone = soft_td_lambda_return(0.9, 0.8, 0.5, *(x[i, j] for x in rows))
                torch.testing.assert_close(together[i, j], alone)

    def test_time_first(self):
        rows = self.arguments(4)
        expected = soft_td_lambda_return(0.9, 0.8, 0.5, *rows)
        out = soft_td_lambda_return(0.9, 0.8, 0.5, *(x.transpose(0, 1) for x in rows), time_dim=0)
        torch.testing.assert_close(out.transpose(0, 1), expected)

    def test_rates_may_be_tensors(self):
        rows = self.arguments(4)
        rates = [torch.tensor(x, dtype=torch.float64) for x in (0.9, 0.8, 0.5)]
        torch.testing.assert_close(
            soft_td_lambda_return(*rates, *rows), soft_td_lambda_return(0.9, 0.8, 0.5, *rows)
        )

    def test_shapes_that_differ_are_refused(self):
        value, *rest = self.arguments(4)
        with pytest.raises(RuntimeError):
            soft_td_lambda_return(0.9, 0.8, 0.5, value[:, :4], *rest)

    def test_inputs_are_not_changed(self):
        rows = self.arguments(4)
        before = [x.clone() for x in rows]
        soft_td_lambda_return(0.9, 0.8, 0.5, *rows)
        assert all(torch.equal(a, b) for a, b in zip(rows, before, strict=True))
