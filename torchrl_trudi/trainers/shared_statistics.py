"""Running statistics that several ranks update, each with its own data."""

from __future__ import annotations

import torch

from torchrl_trudi.envs import RunningMeanVar, RunningObservationNorm
from torchrl_trudi.trainers.distributed import Ranks

__all__ = ["SharedStatistics"]


class SharedStatistics:
    r"""Makes the statistics of all ranks those of everything that any of them has seen.

    Between two merges each rank updates its own copy. :meth:`merge` adds up what has come in since
    the last one. With counts :math:`n_r`, means :math:`m_r` and sums of squared deviations :math:`M_r`
    of rank :math:`r` now, and :math:`n, m, M` of all ranks then,

    .. math::
        n' &= n + \sum_r (n_r - n), \qquad m' = m + \frac{1}{n'} \sum_r n_r (m_r - m), \\
        M' &= M + n (m - m')^2 + \sum_r \big[M_r + n_r (m_r - m')^2 - M - n (m - m')^2\big]

    which are those of the concatenated data, up to rounding, with nothing counted twice. The second
    sum is taken about the new mean, so that features far from zero keep their digits.

    The data of a rank that uses ``exact_variance=False`` are merged exactly, too: what that leaves
    out within a rank stays out.

    Args:
        norm (RunningObservationNorm or None): the transform of the training environment, before
            it has seen data, or after :meth:`restart`. With ``None`` there is nothing to do.
        ranks (Ranks): the processes.

    Examples:
        >>> import torch
        >>> from torchrl_trudi.envs import RunningMeanVar, RunningObservationNorm
        >>> from torchrl_trudi.trainers.distributed import Ranks
        >>> from torchrl_trudi.trainers.shared_statistics import SharedStatistics
        >>> norm = RunningObservationNorm({"observation": RunningMeanVar((2,))})
        >>> statistics = SharedStatistics(norm, Ranks("cpu"))
        >>> norm.get_statistics("observation").update(torch.ones(3, 2))
        >>> statistics.merge()
        >>> norm.get_statistics("observation").count.item()
        3
    """

    def __init__(self, norm: RunningObservationNorm | None, ranks: Ranks) -> None:
        self._ranks = ranks
        self._parts: list[RunningMeanVar] = []
        if norm is not None and ranks.several:
            self._parts = [norm.get_statistics(key) for key in norm.in_keys]
        self.restart()

    def restart(self) -> None:
        """Take the statistics as they are for those of all ranks, for instance after loading them."""
        self._before = [
            (part.count.clone(), part.mean.clone(), part.var.clone()) for part in self._parts
        ]

    @torch.no_grad()
    def merge(self) -> None:
        """Merge what the ranks have seen since the last time."""
        if not self._parts:
            return
        shifts = []
        for part, (count, mean, _) in zip(self._parts, self._before, strict=True):
            shift = part.count * (part.mean - mean)
            shifts += [(part.count - count).double().reshape(1), shift.reshape(-1)]
        totals = self._sum(shifts)
        means, squares = [], []
        for i, (part, (count, mean, var)) in enumerate(zip(self._parts, self._before, strict=True)):
            total = count + totals[2 * i].squeeze(0)
            new = mean + totals[2 * i + 1].view_as(mean) / total.clamp(min=1)
            means.append((total, new))
            seen = part.count * (part.var + (part.mean - new).square())
            squares.append((seen - count * (var + (mean - new).square())).reshape(-1))
        added = self._sum(squares)
        for i, (part, (count, mean, var)) in enumerate(zip(self._parts, self._before, strict=True)):
            total, new = means[i]
            if total > 0:  # otherwise nobody has seen anything yet
                square = count * (var + (mean - new).square()) + added[i].view_as(var)
                part.var.copy_((square / total).clamp(min=0))
                part.mean.copy_(new)
                part.count.copy_(total)
        self.restart()

    def _sum(self, parts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return self._ranks.sum(torch.cat(parts)).split([part.numel() for part in parts])
