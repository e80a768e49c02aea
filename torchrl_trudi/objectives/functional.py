"""Functional forms of the returns."""

from __future__ import annotations

import torch
from torchrl.objectives.value.functional import td_lambda_return_estimate

__all__ = ["soft_td_lambda_return"]


def soft_td_lambda_return(
    gamma: float | torch.Tensor,
    lmbda: float | torch.Tensor,
    temperature: float | torch.Tensor,
    next_value: torch.Tensor,
    next_log_prob: torch.Tensor,
    reward: torch.Tensor,
    done: torch.Tensor,
    terminated: torch.Tensor,
    *,
    mask_terminal_entropy: bool = True,
    time_dim: int = -2,
) -> torch.Tensor:
    r"""Soft TD(:math:`\lambda`) returns (arXiv 2507.11019, 2606.15260).

    With :math:`V'_t = Q(s'_t, a'_t)` and :math:`L'_t` the log-probability of
    :math:`a'_t \sim \pi(\cdot | s'_t)` at the true next state,

    .. math::
        \tilde r_t &= r_t - \gamma\, (1 - \mathrm{terminated}_t)\, \alpha\, L'_t \\
        G_t &= \tilde r_t + \gamma \begin{cases}
            0 & \text{terminated} \\
            V'_t & \text{truncated, or the last row} \\
            \lambda G_{t+1} + (1 - \lambda) V'_t & \text{otherwise}
        \end{cases}

    Termination wins over truncation. Values and log-probabilities at terminal steps are not read, so
    they may be NaN there (with ``mask_terminal_entropy=False`` only the values may).

    Args:
        gamma (float or torch.Tensor): discount.
        lmbda (float or torch.Tensor): trace decay.
        temperature (float or torch.Tensor): entropy temperature ``alpha``.
        next_value (torch.Tensor): ``V'``, ``[*B, T, 1]``.
        next_log_prob (torch.Tensor): ``L'``, ``[*B, T, 1]``.
        reward (torch.Tensor): ``[*B, T, 1]``.
        done (torch.Tensor): end of an episode for any reason, boolean, ``[*B, T, 1]``.
        terminated (torch.Tensor): end in a terminal state, boolean, ``[*B, T, 1]``.

    Keyword Args:
        mask_terminal_entropy (bool, optional): drop the entropy term on terminal steps, where there
            is no next action. ``False`` is the published variant. Defaults to ``True``.
        time_dim (int, optional): the time dimension. Defaults to ``-2``.

    Returns:
        torch.Tensor: returns, ``[*B, T, 1]``.

    Raises:
        RuntimeError: the shapes differ.

    Examples:
        >>> import torch
        >>> from torchrl_trudi.objectives import soft_td_lambda_return
        >>> one, no = torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.bool)
        >>> soft_td_lambda_return(0.5, 1.0, 0.0, 4 * one, one, one, no, no)  # 1 + 0.5 * (1 + 0.5 * 4)
        tensor([[2.5000],
                [3.0000]])
    """
    # Selected rather than multiplied: 0 * NaN is NaN.
    next_value = next_value.masked_fill(terminated, 0.0)
    if mask_terminal_entropy:
        next_log_prob = next_log_prob.masked_fill(terminated, 0.0)
    soft_reward = reward - gamma * temperature * next_log_prob
    return td_lambda_return_estimate(
        gamma, lmbda, next_value, soft_reward, done | terminated, terminated, time_dim=time_dim
    )
