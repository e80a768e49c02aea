"""How many workers an update waits for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["GroupSizeController"]


class GroupSizeController:
    r"""Chooses for each update how many workers it waits for, so that few updates wait for a straggler.

    With the waiting time :math:`T_k` of a group of :math:`k` workers, the time :math:`c` of the rest of
    an update, and the benefit :math:`b(k)` of its data (the number of workers, which is the number of frames
    up to a factor), it minimises the time per benefit under a constraint on the long-run rate of
    straggled updates, those that waited longer than ``max_wait``:

    .. math::
        \min \frac{\mathrm E[T_k + c]}{\mathrm E[b(k)]} \quad \text{subject to} \quad
        \mathrm P(T_k > w) \le \rho

    over the sequences of sizes. Each update takes the size with the smallest

    .. math::
        (\hat T_k + \hat c - \hat\theta\, b(k)) / \hat\tau + \lambda\, \hat r_k

    where :math:`\hat\theta` is the time per benefit so far, which makes the ratio a sum (Dinkelbach's
    method), :math:`\hat\tau` the mean time of an update, and :math:`\hat r_k` the rate of size :math:`k`; all are
    running means. After each update :math:`\lambda \leftarrow \max(0, \lambda + \eta (straggled - \rho))`, so that
    after :math:`n` updates, whatever the times were,

    .. math::
        straggler\ rate \le \rho + \lambda_n / (\eta n)

    The multiplier :math:`\lambda` stays bounded where a size has a rate below :math:`\rho`. Elsewhere the
    constraint cannot be held, and the size with the smallest rate is taken. Several sizes alternate where the
    constraint lies between two of them, and the choice follows when the workers change: these
    two are what it gains over a fixed size. With equal and steady workers, or an update that takes no
    time next to the waiting, a fixed size is as good.

    It does nothing by itself: nothing in a run uses it unless told.

    Args:
        num_workers (int): number of workers ``W``.
        max_wait (float): waiting time in seconds beyond which an update counts as straggled.

    Keyword Args:
        target_rate (float, optional): the bound :math:`\rho` on the rate. Defaults to ``0.05``.
        sizes (sequence of int, optional): sizes to choose from, ascending, in ``[1, W]``. Defaults to ``None``: those
            from half of the workers on.
        benefit (Callable, optional): :math:`b(k)` of a size, positive. Defaults to ``None``, the size itself.
        dual_lr (float, optional): :math:`\eta`. Defaults to ``0.2``.
        window (int, optional): updates over which the running means go. Defaults to ``100``.
        explore (float, optional): probability of trying the next smaller size, or the next larger one while the
            rate is below the target, without which estimates of sizes that are not in use would stay as they are. Defaults to ``0.02``.
        seed (int, optional): seed of that draw. Defaults to ``0``.

    Raises:
        ValueError: an argument outside of its range; a waiting time that is not finite or is negative, more
            arrivals than workers that were waited for, or fewer.

    Examples:
        >>> from torchrl_trudi.trainers.group_size import GroupSizeController
        >>> controller = GroupSizeController(4, max_wait=2.0, sizes=(2, 3, 4))
        >>> controller.size  # each size is tried first, from the smallest on
        2
        >>> int(4 * controller.threshold)  # what MultiSyncCollector makes of it
        2
        >>> controller.observe(0.7, update_time=5.0)
        >>> controller.rate
        0.0
    """

    def __init__(
        self,
        num_workers: int,
        max_wait: float,
        *,
        target_rate: float = 0.05,
        sizes: Sequence[int] | None = None,
        benefit: Callable[[int], float] | None = None,
        dual_lr: float = 0.2,
        window: int = 100,
        explore: float = 0.02,
        seed: int = 0,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}.")
        if not (max_wait > 0 and math.isfinite(max_wait)):
            raise ValueError(f"max_wait must be positive and finite, got {max_wait}.")
        if not 0 < target_rate < 1:
            raise ValueError(f"target_rate must be in (0, 1), got {target_rate}.")
        if not dual_lr > 0:
            raise ValueError(f"dual_lr must be positive, got {dual_lr}.")
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}.")
        if not 0 <= explore < 1:
            raise ValueError(f"explore must be in [0, 1), got {explore}.")
        sizes = list(range((num_workers + 1) // 2, num_workers + 1) if sizes is None else sizes)
        if (
            not sizes
            or sizes != sorted(set(sizes))
            or not 1 <= sizes[0] <= sizes[-1] <= num_workers
        ):
            raise ValueError(f"sizes must be ascending, in [1, {num_workers}], got {sizes}.")
        self.num_workers = num_workers
        self.max_wait = float(max_wait)
        self.target_rate = float(target_rate)
        self.sizes = sizes
        self.benefits = [float(size if benefit is None else benefit(size)) for size in sizes]
        if not all(value > 0 and math.isfinite(value) for value in self.benefits):
            raise ValueError(f"The benefit of each size must be positive, got {self.benefits}.")
        self.dual_lr, self.window, self.explore = float(dual_lr), window, float(explore)
        self._generator = torch.Generator().manual_seed(seed)
        self.multiplier = 0.0
        self.updates = 0
        self.straggled = 0
        self._index = 0
        # By size: observations, the update of the last one, mean wait, rate of waits beyond max_wait.
        self._counts = [0] * len(sizes)
        self._seen = [0] * len(sizes)
        self._waits = [0.0] * len(sizes)
        self._rates = [0.0] * len(sizes)
        # Of all updates: mean time of the rest, mean time, mean benefit.
        self._rest = self._time = self._benefit = 0.0

    # -- the choice ----------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of workers that the next update is to wait for."""
        return self.sizes[self._index]

    @property
    def threshold(self) -> float:
        """The size as ``preemptive_threshold`` of a ``MultiSyncCollector``, which truncates its product with ``W``."""
        # In the middle between two sizes: k / W * W may come out below k.
        return min(1.0, (self.size + 0.5) / self.num_workers)

    @property
    def rate(self) -> float:
        """Rate of straggled updates so far."""
        return self.straggled / max(1, self.updates)

    def apply(self, collector: Any) -> None:
        """Set the threshold of a ``MultiSyncCollector``, from its next batch on.

        The collector has to be built with a threshold below 1, for instance ``preemptive_threshold=0.5``,
        and that of its first batch has to be below 1 too; otherwise it waits for all workers always. It
        stops workers at the end of a step, so that one that hangs within a step holds it up all the same.

        Args:
            collector (MultiSyncCollector): the collector.

        Raises:
            ValueError: it has another number of workers, or was built without a threshold.
        """
        if collector.num_workers != self.num_workers:
            raise ValueError(
                f"The collector has {collector.num_workers} workers, the controller {self.num_workers}."
            )
        if getattr(collector, "interruptor", None) is None:
            raise ValueError(
                "The collector waits for all workers always: build it with a preemptive_threshold below 1."
            )
        collector.preemptive_threshold = self.threshold

    def observe(self, wait: float | Sequence[float], *, update_time: float = 0.0) -> None:
        """Take in an update, and choose the size of the next one.

        Args:
            wait (float or sequence of float): how long it waited for :attr:`size` workers, in seconds; or
                the arrival times of these, ascending, from which the smaller sizes learn as well.

        Keyword Args:
            update_time (float, optional): the time of the rest of the update, in seconds.
                Defaults to ``0.0``.
        """
        arrivals = None if isinstance(wait, int | float) else [float(each) for each in wait]
        if arrivals is not None:
            if len(arrivals) != self.size or arrivals != sorted(arrivals):
                raise ValueError(
                    f"The arrivals must be {self.size} times in ascending order, got {arrivals}."
                )
            wait = arrivals[-1]
        for name, value in (("wait", wait), ("update_time", update_time)):
            if not 0 <= value < math.inf:  # type: ignore[operator]
                raise ValueError(f"{name} must be finite and not negative, got {value}.")
        if arrivals is not None and arrivals[0] < 0:
            raise ValueError(f"wait must be finite and not negative, got {arrivals[0]}.")
        wait = float(wait)  # type: ignore[arg-type]
        self.updates += 1
        for index, size in enumerate(self.sizes[: self._index + 1]):
            if arrivals is not None:
                self._learn(index, arrivals[size - 1])
            elif index == self._index:
                self._learn(index, wait)
        straggled = wait > self.max_wait
        self.straggled += straggled
        self.multiplier = max(0.0, self.multiplier + self.dual_lr * (straggled - self.target_rate))
        step = max(1 / self.updates, 1 / self.window)
        self._rest += step * (update_time - self._rest)
        self._time += step * (wait + update_time - self._time)
        self._benefit += step * (self.benefits[self._index] - self._benefit)
        self._index = self._choose()

    def _learn(self, index: int, wait: float) -> None:
        self._counts[index] += 1
        # By updates, not by observations: of a size that was not in use for long, the old estimate
        # says little.
        age = self.updates - self._seen[index]
        self._seen[index] = self.updates
        step = max(1 / self._counts[index], 1 - (1 - 1 / self.window) ** age)
        self._waits[index] += step * (wait - self._waits[index])
        self._rates[index] += step * ((wait > self.max_wait) - self._rates[index])

    def _choose(self) -> int:
        """Index of the size of the next update."""
        if 0 in self._counts:
            # While the larger ones are tried, the constraint counts already.
            return self._counts.index(0)
        best = min(range(len(self.sizes)), key=self._score)
        if torch.rand((), generator=self._generator).item() < self.explore:
            # A larger one only while the rate has room for it: trials are under the constraint too.
            last = best + (self.rate < self.target_rate)
            near = [i for i in (best - 1, best + 1) if 0 <= i <= last and i < len(self.sizes)]
            if near:
                draw = torch.randint(len(near), (), generator=self._generator)
                return near[int(draw.item())]
        return best

    def _score(self, index: int) -> float:
        time = self._time if self._time > 0 else 1.0
        price = self._time / self._benefit * self.benefits[index]
        cost = (self._waits[index] + self._rest - price) / time
        return cost + self.multiplier * self._rates[index]

    # -- state ---------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Scalars for a log: ``group_size``, ``straggler_rate``, ``straggler_multiplier``, ``group_wait``."""
        return {
            "group_size": float(self.size),
            "straggler_rate": self.rate,
            "straggler_multiplier": self.multiplier,
            "group_wait": self._waits[self._index],
        }

    def state_dict(self) -> dict[str, Any]:
        """The state, for a checkpoint; settings are not part of it."""
        return {
            "sizes": list(self.sizes),
            "multiplier": self.multiplier,
            "updates": self.updates,
            "straggled": self.straggled,
            "index": self._index,
            "counts": list(self._counts),
            "seen": list(self._seen),
            "waits": list(self._waits),
            "rates": list(self._rates),
            "means": [self._rest, self._time, self._benefit],
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Args:
            state (dict): from :meth:`state_dict`.

        Raises:
            ValueError: it is that of other sizes.
            KeyError: an entry is missing.
        """
        if list(state["sizes"]) != self.sizes:
            raise ValueError(f"The state is one of sizes {state['sizes']}, not {self.sizes}.")
        missing = set(self.state_dict()) - set(state)
        if missing:
            raise KeyError(f"The state has no {sorted(missing)}.")
        self.multiplier, self.updates = float(state["multiplier"]), int(state["updates"])
        self.straggled, self._index = int(state["straggled"]), int(state["index"])
        self._counts, self._seen = list(state["counts"]), list(state["seen"])
        self._waits, self._rates = list(state["waits"]), list(state["rates"])
        self._rest, self._time, self._benefit = state["means"]
        self._generator.set_state(state["generator"])
