"""Minibatches whose step was skipped: counted, and reported when there are too many in a row."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

__all__ = ["SkipMonitor"]


class SkipMonitor:
    """Counts the minibatches whose step was skipped, and remembers one to report.

    Nothing is read from the device before :meth:`end_iteration`. On the CPU, where that costs nothing,
    the last skipped minibatch is kept. On an accelerator it is the last minibatch of the iteration, which
    the report says; in a run that no longer makes any step it is one that was skipped.

    Args:
        max_consecutive (int): so many skipped minibatches in a row are too many.

    Attributes:
        streak (int): skipped minibatches in a row, as of the last iteration's end.
        exceeded (bool): whether there were ever ``max_consecutive`` in a row.

    Raises:
        ValueError: ``max_consecutive < 1``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_trudi.trainers.skips import SkipMonitor
        >>> skips = SkipMonitor(max_consecutive=2)
        >>> batch = TensorDict({"observation": torch.tensor([[1.0], [torch.nan]])}, [2])
        >>> for skipped in (0.0, 1.0, 1.0):
        ...     metrics = {"skipped": torch.tensor(skipped), "skipped_critic": torch.tensor(0.0)}
        ...     skips.observe(batch, TensorDict(metrics))
        >>> skips.end_iteration()
        {'skipped': 2, 'skipped_critic': 0}
        >>> skips.exceeded
        True
    """

    def __init__(self, max_consecutive: int) -> None:
        if max_consecutive < 1:
            raise ValueError(f"max_consecutive must be at least 1, got {max_consecutive}.")
        self.max_consecutive = max_consecutive
        self.streak = 0
        self.exceeded = False
        self._flags: list[torch.Tensor] = []
        self._kept: tuple[TensorDictBase, TensorDictBase] | None = None

    def observe(self, batch: TensorDictBase, metrics: TensorDictBase) -> None:
        """Note a minibatch.

        Args:
            batch (TensorDictBase): the minibatch.
            metrics (TensorDictBase): what :class:`~torchrl_trudi.trainers.update.TruDiUpdate` returned for it;
                without ``"skipped"`` (of a step of the critic alone) the actor's counts as made.
        """
        critic = metrics.get("skipped_critic").reshape(())
        actor = metrics.get("skipped", torch.zeros_like(critic)).reshape(())
        flags = torch.stack([actor, critic])
        self._flags.append(flags)
        if flags.device.type != "cpu" or flags.any():
            self._kept = (batch, metrics)

    def end_iteration(self) -> dict[str, int]:
        """Bring the counts up to date, with one transfer from the device.

        Returns:
            dict: ``"skipped"`` and ``"skipped_critic"``, steps of the actor and of the critic that were
            skipped since the last call.
        """
        if not self._flags:
            return {"skipped": 0, "skipped_critic": 0}
        flags = torch.stack(self._flags).cpu() != 0
        self._flags = []
        for skipped in flags.any(-1).tolist():
            self.streak = self.streak + 1 if skipped else 0
            self.exceeded |= self.streak >= self.max_consecutive
        actor, critic = flags.sum(0).tolist()
        return {"skipped": actor, "skipped_critic": critic}

    def write_report(self, path: str | Path, **context: Any) -> None:
        """Describe the minibatch that was kept, in JSON.

        For each of its entries: shape, number of values that are not finite, and minimum, maximum and mean
        of the others.

        Args:
            path (str or Path): the file.
            **context: further entries, such as the number of frames.
        """
        report: dict[str, Any] = {**context, "max_consecutive_skips": self.max_consecutive}
        if self._kept is not None:
            batch, metrics = self._kept
            numbers = {_name(key): value for key, value in _leaves(metrics)}
            # On an accelerator the last minibatch of an iteration is kept, whether skipped or not.
            report["skipped_itself"] = any(
                bool(value.any()) for key, value in numbers.items() if key.startswith("skipped")
            )
            report["metrics"] = {key: _plain(value.tolist()) for key, value in numbers.items()}
            report["batch"] = {_name(key): describe(value) for key, value in _leaves(batch)}
        text = json.dumps(report, indent=2, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")


def describe(value: torch.Tensor) -> dict[str, Any]:
    """Shape, number of values that are not finite, and minimum, maximum and mean of the others."""
    finite = value[value.isfinite()].double()
    numbers: dict[str, float | None] = {"min": None, "max": None, "mean": None}
    if finite.numel():
        numbers = {
            "min": finite.min().item(),
            "max": finite.max().item(),
            "mean": finite.mean().item(),
        }
    return {"shape": list(value.shape), "not_finite": value.numel() - finite.numel(), **numbers}


def _leaves(tensordict: TensorDictBase) -> list[tuple[Any, torch.Tensor]]:
    items = tensordict.items(include_nested=True, leaves_only=True)
    return [(key, value) for key, value in items if isinstance(value, torch.Tensor)]


def _name(key: str | tuple[str, ...]) -> str:
    return key if isinstance(key, str) else "/".join(key)


def _plain(value: Any) -> Any:
    """Numbers that JSON has; the others as text."""
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value if math.isfinite(value) else str(value)
