"""Running mean and variance of a stream of batches, exact and in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn


class RunningMeanVar(nn.Module):
    r"""Mean and population variance of everything it was fed, and the map to unit scale.

    Batches are merged with the parallel update of Chan et al., in float64: the result is that
    of one pass over all rows at once, whatever the batch sizes. The first batch replaces the
    initial values (mean 0, variance 1). With :math:`\epsilon` = ``eps``,

    .. math::
        y = \frac{x - \text{mean}}{\sqrt{\text{var}} + \epsilon}
        \quad\text{or, with eps\_inside\_sqrt,}\quad
        y = \frac{x - \text{mean}}{\sqrt{\text{var} + \epsilon}}.

    The statistics are buffers (``count``, int64, and ``mean``, ``var``, float64), updated in
    place: every holder of the module sees them, and they are part of its ``state_dict``.

    Args:
        shape (Sequence[int]): shape of one sample, without batch dimensions. ``()`` is a scalar.

    Keyword Args:
        eps (float, optional): keeps the division finite for features that do not vary; at 1e-2
            it also limits how far noise on such a feature is amplified. Defaults to ``1e-2``.
        eps_inside_sqrt (bool, optional): adds ``eps`` to the variance instead of the standard
            deviation. Defaults to ``False``.
        exact_variance (bool, optional): ``False`` shrinks the part of the variance that comes
            from the difference between the mean of a batch and that of the earlier ones by
            ``(count / (count + batch))**2``. That is what the published implementation computes
            (it takes the difference after the mean has moved), and reads too low while batches
            are large against the count. For comparison with it only. Defaults to ``True``.
        clip (float, optional): bounds the normalised value to ``[-clip, clip]``. Defaults to
            ``None``, no bound.
        device (torch.device, optional): device of the statistics. Defaults to ``None``, the
            current default device.

    Raises:
        ValueError: if ``eps`` is negative or not finite, or if ``clip`` is not positive.

    Examples:
        >>> import torch
        >>> from torchrl_trudi.envs import RunningMeanVar
        >>> stats = RunningMeanVar((2,))
        >>> stats.update(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))
        >>> stats.update(torch.tensor([[4.0, 1.0]]))
        >>> stats.count.item(), stats.mean.tolist()
        (3, [2.0, 1.0])
        >>> stats.normalize(torch.tensor([2.0, 1.0]))
        tensor([0., 0.])
    """

    count: torch.Tensor
    mean: torch.Tensor
    var: torch.Tensor

    def __init__(
        self,
        shape: Sequence[int],
        *,
        eps: float = 1e-2,
        eps_inside_sqrt: bool = False,
        exact_variance: bool = True,
        clip: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not (math.isfinite(eps) and eps >= 0):
            raise ValueError(f"eps must be finite and not negative, got {eps!r}.")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be None or positive, got {clip!r}.")
        self.shape = torch.Size(shape)
        self.eps = float(eps)
        self.eps_inside_sqrt = bool(eps_inside_sqrt)
        self.exact_variance = bool(exact_variance)
        self.clip = None if clip is None else float(clip)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("mean", torch.zeros(self.shape, dtype=torch.float64, device=device))
        self.register_buffer("var", torch.ones(self.shape, dtype=torch.float64, device=device))

    def extra_repr(self) -> str:
        return (
            f"shape={tuple(self.shape)}, eps={self.eps}, "
            f"eps_inside_sqrt={self.eps_inside_sqrt}, exact_variance={self.exact_variance}, "
            f"clip={self.clip}"
        )

    @property
    def scale(self) -> torch.Tensor:
        """The divisor of :meth:`normalize`, float64, of shape ``shape``."""
        if self.eps_inside_sqrt:
            return (self.var + self.eps).sqrt()
        return self.var.sqrt() + self.eps

    @torch.no_grad()
    def update(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Merges a batch into the statistics.

        Args:
            x (torch.Tensor): floating point values of shape ``[*B, *shape]``; every batch
                dimension is reduced.
            mask (torch.Tensor, optional): booleans of shape ``[*B]`` (or ``[*B, 1]``); rows that
                are ``False`` are left out. Defaults to ``None``, every row counts.

        Raises:
            TypeError: if ``x`` is not floating point.
            ValueError: if the shape of ``x`` does not end with ``shape``, or if ``mask`` does
                not have one entry per row.
        """
        self._check(x)
        num: int | torch.Tensor
        rows = x.detach().reshape(-1, *self.shape).to(torch.float64)
        # Two passes and not torch.var_mean, which is several times slower over rows on the CPU.
        if mask is None:
            num = rows.shape[0]
            if num == 0:
                return
            batch_mean = rows.mean(0)
            batch_var = (rows - batch_mean).square_().mean(0)
        else:
            if mask.numel() != rows.shape[0]:
                raise ValueError(
                    f"mask must have one entry per row: got {tuple(mask.shape)} for a batch of "
                    f"shape {tuple(x.shape)} and samples of shape {tuple(self.shape)}."
                )
            # Masked sums instead of rows[mask]: no host synchronisation on an accelerator.
            keep = mask.reshape(-1, *([1] * len(self.shape)))
            kept = keep.sum()
            num, denominator = kept, kept.clamp(min=1)
            batch_mean = torch.where(keep, rows, 0.0).sum(0) / denominator
            batch_var = torch.where(keep, rows - batch_mean, 0.0).square_().sum(0) / denominator
        self.count.add_(num)
        # Weight 1 for the first batch: mean and var become its own, exactly. Weight 0 for an
        # empty mask: nothing changes, also while the count is 0.
        weight = num / self.count.clamp(min=1).to(torch.float64)
        rest = 1.0 - weight
        between = weight * rest if self.exact_variance else weight * rest**3
        delta = batch_mean - self.mean
        self.var.lerp_(batch_var, weight).addcmul_(delta * between, delta)
        self.mean.lerp_(batch_mean, weight)

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """Maps values to zero mean and unit scale, without touching the statistics.

        Args:
            x (torch.Tensor): floating point values of shape ``[*B, *shape]``.

        Returns:
            torch.Tensor: the normalised values, same shape and dtype as ``x``.

        Raises:
            TypeError: if ``x`` is not floating point.
            ValueError: if the shape of ``x`` does not end with ``shape``.
        """
        self._check(x)
        y = torch.sub(x, self.mean.to(x.dtype)).div_(self.scale.to(x.dtype))
        if self.clip is not None:
            y = y.clamp_(-self.clip, self.clip)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same as :meth:`normalize`."""
        return self.normalize(x)

    def _check(self, x: torch.Tensor) -> None:
        if not x.is_floating_point():
            raise TypeError(f"expected a floating point tensor, got {x.dtype}.")
        ndim = len(self.shape)
        if x.shape[x.ndim - ndim :] != self.shape or x.ndim < ndim:
            raise ValueError(
                f"expected a tensor of shape [*B, {', '.join(map(str, self.shape))}], "
                f"got {tuple(x.shape)}."
            )
