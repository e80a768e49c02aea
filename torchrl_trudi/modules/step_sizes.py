"""Step sizes of the denoising chain (arXiv 2606.15260)."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["StepSizes", "inverse_softplus", "step_size_weights"]

ScheduleName = Literal["cosine", "linear", "constant"]
SCHEDULES = ("cosine", "linear", "constant")


def inverse_softplus(value: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`~torch.nn.functional.softplus`, for ``value > 0``.

    Args:
        value (torch.Tensor): positive values, any shape.

    Returns:
        torch.Tensor: ``x`` with ``softplus(x) = value``, same shape.
    """
    # log(exp(v) - 1) = v + log(1 - exp(-v)); expm1 keeps small v exact.
    return value + torch.log(-torch.expm1(-value))


def step_size_weights(
    num_steps: int,
    schedule: ScheduleName = "cosine",
    *,
    minimum: float = 1e-3,
    offset: float = 8e-3,
    power: float = 2.0,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    r"""Weights :math:`w_n` of the denoising step sizes :math:`\delta_n = \mathrm{softplus}(\rho)\, w_n`.

    With :math:`t_n = (N - n) / N`, minimum :math:`m`, offset :math:`c` and power :math:`p`:

    - ``"cosine"``: :math:`w_n = (1 - m) \cos\!\big(\tfrac{\pi}{2} \tfrac{1 + c - t_n}{1 + c}\big)^p + m`
    - ``"linear"``: :math:`w_n = (1 - t_n)\, m + t_n`
    - ``"constant"``: :math:`w_n = 1`

    Large steps come first, where the latent is mostly noise.

    Args:
        num_steps (int): number of denoising steps ``N``.
        schedule (str, optional): ``"cosine"``, ``"linear"`` or ``"constant"``.
            Defaults to ``"cosine"``.

    Keyword Args:
        minimum (float, optional): smallest weight ``m``. Defaults to ``1e-3``.
        offset (float, optional): cosine offset ``c``. Defaults to ``8e-3``.
        power (float, optional): cosine power ``p``. Defaults to ``2``.
        device (torch.device, optional): device of the result.
        dtype (torch.dtype, optional): dtype of the result. The weights are
            computed in float64 and cast. Defaults to the default dtype.

    Returns:
        torch.Tensor: weights of shape ``[num_steps]``.

    Raises:
        ValueError: unknown ``schedule`` or ``num_steps < 1``.

    Examples:
        >>> from torchrl_trudi.modules import step_size_weights
        >>> step_size_weights(4, "linear", minimum=0.0)
        tensor([1.0000, 0.7500, 0.5000, 0.2500])
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}.")
    n = torch.arange(num_steps, device=device, dtype=torch.float64)
    t = (num_steps - n) / num_steps
    if schedule == "cosine":
        phase = 0.5 * math.pi * (1 + offset - t) / (1 + offset)
        weights = (1 - minimum) * phase.cos().pow(power) + minimum
    elif schedule == "linear":
        weights = (1 - t) * minimum + t
    elif schedule == "constant":
        weights = torch.ones_like(t)
    else:
        raise ValueError(f"Unknown schedule {schedule!r}; choose one of {SCHEDULES}.")
    return weights.to(dtype if dtype is not None else torch.get_default_dtype())


class StepSizes(nn.Module):
    r"""Step sizes :math:`\delta_n` of the denoising chain, fixed or learned.

    ``learn="none"`` and ``"shared"`` give :math:`\delta_n = \mathrm{softplus}(\rho)\, w_n` with one
    scalar :math:`\rho` and the weights of :func:`step_size_weights`; ``"per_step"`` gives
    :math:`\delta_n = \mathrm{softplus}(\rho_n)`, where the schedule only sets the initial values.
    :math:`\mathrm{softplus}(\rho)` starts at ``1 / num_steps``.

    Args:
        num_steps (int): number of denoising steps ``N``.

    Keyword Args:
        schedule (str, optional): see :func:`step_size_weights`. Defaults to ``"cosine"``.
        learn (str, optional): ``"none"`` (a buffer), ``"shared"`` (one learned scale) or
            ``"per_step"`` (one learned size per step). Defaults to ``"none"``.
        minimum (float, optional): smallest schedule weight. Defaults to ``1e-3``.
        offset (float, optional): cosine offset. Defaults to ``8e-3``.
        power (float, optional): cosine power. Defaults to ``2``.
        device (torch.device, optional): device of the parameters.
        dtype (torch.dtype, optional): dtype of the parameters.

    Raises:
        ValueError: unknown ``schedule`` or ``learn``, or ``num_steps < 1``.

    Examples:
        >>> from torchrl_trudi.modules import StepSizes
        >>> StepSizes(4, schedule="constant")()
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def __init__(
        self,
        num_steps: int,
        *,
        schedule: ScheduleName = "cosine",
        learn: Literal["none", "shared", "per_step"] = "none",
        minimum: float = 1e-3,
        offset: float = 8e-3,
        power: float = 2.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if learn not in ("none", "shared", "per_step"):
            raise ValueError(f"learn must be 'none', 'shared' or 'per_step', got {learn!r}.")
        dtype = dtype if dtype is not None else torch.get_default_dtype()
        weights = step_size_weights(
            num_steps,
            schedule,
            minimum=minimum,
            offset=offset,
            power=power,
            device=device,
            dtype=torch.float64,
        )
        self.num_steps = num_steps
        self.learn = learn
        if learn == "per_step":
            self.weights = None
            raw = inverse_softplus(weights / num_steps)
        else:
            self.register_buffer("weights", weights.to(dtype))
            raw = inverse_softplus(torch.full_like(weights[:1], 1.0 / num_steps))
        # Plain numbers: neither state, nor to be moved with the module.
        self._initial = raw.tolist()
        raw = raw.to(dtype)
        if learn == "none":
            self.register_buffer("raw", raw)
        else:
            self.raw = nn.Parameter(raw)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the step sizes to those of the schedule."""
        self.raw.copy_(self.raw.new_tensor(self._initial))

    def forward(self) -> torch.Tensor:
        """Step sizes of shape ``[num_steps]``, in units of the diffusion time."""
        sizes = F.softplus(self.raw)
        return sizes if self.weights is None else sizes * self.weights

    def extra_repr(self) -> str:
        return f"num_steps={self.num_steps}, learn={self.learn!r}"
