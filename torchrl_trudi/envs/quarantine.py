"""A transform that ends the episode of a row whose numbers are not finite."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from torchrl.data import Binary, Composite
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Transform

from torchrl_trudi.envs._validation import check_int, list_rows

__all__ = ["Quarantine"]

_log = logging.getLogger(__name__)

_SECONDS_BETWEEN_WARNINGS = 60.0


class Quarantine(Transform):
    """Ends the episode of a row that returns a NaN or an infinity, and marks the step.

    Where a row's next observation or reward is not finite, or a done flag of floating point type is
    neither 0 nor 1, this step becomes the last of its episode: ``"terminated"`` and ``"done"`` are set, the
    reward is 0, and the last finite observation of the row takes the place of the new one. TorchRL then
    resets the row as after any other end. ``("next", "quarantined")`` marks the step, so that
    :class:`RunningObservationNorm` does not count the stand-in, the return of the step before does
    not look at this one (:func:`~torchrl_trudi.objectives.cut_at_quarantined`), and no loss is
    evaluated on it (:func:`~torchrl_trudi.objectives.replace_quarantined`). Other rows are not touched, and
    none of their numbers changes.

    A row whose observation is not finite after its reset is reset again.

    It belongs before all transforms that read rewards or observations.

    Args:
        in_keys (Sequence[NestedKey]): the floating point observations to check. May be empty, of an
            environment that checks itself.

    Keyword Args:
        flag_keys (Sequence[NestedKey], optional): boolean entries ``[*B, 1]`` by which the environment
            says itself that it ended a row in this way, such as ``"unstable"`` of
            :class:`MujocoBatchEnv`. Defaults to none.
        reward_key (NestedKey, optional): Defaults to ``"reward"``.
        quarantined_key (NestedKey, optional): the mark, boolean ``[*B, 1]``. Defaults to
            ``"quarantined"``.
        reset_attempts (int, optional): how often a row is reset before its observation being not
            finite is an error. Defaults to ``3``.
        task (str, optional): a name for warnings and errors. Defaults to ``"the environment"``.

    Attributes:
        num_quarantined (torch.Tensor or None): int64 ``[*B]``, steps marked so far; ``None`` before
            the first step.

    Raises:
        ValueError: ``reset_attempts < 1``.
        FloatingPointError: by ``reset``, naming the rows, if an observation is not finite after
            ``reset_attempts`` resets.

    Examples:
        >>> from torchrl.envs import PendulumEnv, TransformedEnv
        >>> from torchrl_trudi.envs import Quarantine
        >>> env = TransformedEnv(PendulumEnv(), Quarantine(["th", "thdot"]))
        >>> env.rollout(3)["next", "quarantined"].any()
        tensor(False)
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        *,
        flag_keys: Sequence[NestedKey] = (),
        reward_key: NestedKey = "reward",
        quarantined_key: NestedKey = "quarantined",
        reset_attempts: int = 3,
        task: str = "the environment",
    ) -> None:
        in_keys = [unravel_key(key) for key in in_keys]
        super().__init__(in_keys=in_keys, out_keys=in_keys)
        self.flag_keys = [unravel_key(key) for key in flag_keys]
        self.reward_key = unravel_key(reward_key)
        self.quarantined_key = unravel_key(quarantined_key)
        self.reset_attempts = check_int("reset_attempts", reset_attempts, 1)
        self.task = task
        self.num_quarantined: torch.Tensor | None = None
        # Raw observations of the step before: those in the tensordict have been transformed.
        self._last: dict[NestedKey, torch.Tensor] = {}
        self._warned_at: float | None = None
        self._unreported = 0

    # Stepping

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        shape = next_tensordict.batch_size
        found: list[torch.Tensor] = []
        for key in (*self.in_keys, self.reward_key):
            value = next_tensordict.get(key, None)
            # A sum is finite only if all its terms are, and much cheaper than isfinite() of each.
            # It can also overflow, hence the second look.
            if value is not None and not value.sum().isfinite():
                found.append(_rows(~value.isfinite(), shape))
        for key in ("done", "terminated", "truncated"):
            flag = next_tensordict.get(key, None)
            if flag is not None and flag.is_floating_point():
                found.append(_rows((flag != 0) & (flag != 1), shape))
        for key in self.flag_keys:
            found.append(_rows(next_tensordict.get(key), shape))
        bad = torch.zeros(shape, dtype=torch.bool, device=next_tensordict.device)
        for rows in found:
            bad = bad | rows
        stepping = tensordict.get("_step", None)
        if found and stepping is not None:  # the others wait, with old numbers
            bad = bad & _rows(stepping, shape)
        if self.num_quarantined is None:
            self.num_quarantined = torch.zeros(shape, dtype=torch.int64, device=bad.device)
        if found and bad.any():
            self._end(next_tensordict, bad)
        next_tensordict.set(self.quarantined_key, bad.unsqueeze(-1))
        self._remember(next_tensordict)
        return next_tensordict

    def _end(self, following: TensorDictBase, bad: torch.Tensor) -> None:
        for key in self.in_keys:
            value = following.get(key)
            last = self._last.get(key)
            if last is None:  # stepped without a reset
                last = torch.zeros_like(value)
            following.set(key, torch.where(_like(bad, value), last, value))
        reward = following.get(self.reward_key, None)
        if reward is not None:
            following.set(self.reward_key, reward.masked_fill(_like(bad, reward), 0))
        for key, end in (("terminated", 1), ("done", 1), ("truncated", None)):
            flag = following.get(key, None)
            if flag is None:
                continue
            if end is None:
                # As the environment has it, unless it is not one of the two.
                unknown = (flag != 0) & (flag != 1) if flag.is_floating_point() else None
                if unknown is not None:
                    following.set(key, flag.masked_fill(unknown & _like(bad, flag), 0))
            else:
                following.set(key, flag.masked_fill(_like(bad, flag), end))
        assert self.num_quarantined is not None
        self.num_quarantined = self.num_quarantined + bad
        self._warn(bad.reshape(-1).nonzero().squeeze(-1).tolist())

    def _remember(self, tensordict: TensorDictBase, mask: torch.Tensor | None = None) -> None:
        for key in self.in_keys:
            value = tensordict.get(key, None)
            if value is None:
                continue
            last = self._last.get(key)
            if mask is not None and last is not None:
                self._last[key] = torch.where(_like(mask, value), value, last)
            else:
                # What the environment hands out it may write to again.
                self._last[key] = value.clone()

    def _warn(self, rows: list[int]) -> None:
        now = time.monotonic()
        self._unreported += len(rows)
        if self._warned_at is not None and now - self._warned_at < _SECONDS_BETWEEN_WARNINGS:
            return
        _log.warning(
            "%s: observation, reward or done flag not finite in %s of its rows (%s): their episodes end "
            "here, and the step is left out of the training (%d such steps since the last warning; "
            "at most one warning in %.0f s).",
            self.task,
            len(rows),
            list_rows(rows),
            self._unreported,
            _SECONDS_BETWEEN_WARNINGS,
        )
        self._warned_at, self._unreported = now, 0

    # Resetting

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        shape = tensordict_reset.batch_size
        mask = None if tensordict is None else tensordict.get("_reset", None)
        mask = None if mask is None else _rows(mask, shape)
        for attempt in range(1, self.reset_attempts + 1):
            bad = self._not_finite(tensordict_reset, mask)
            if bad is None:
                break
            rows = bad.reshape(-1).nonzero().squeeze(-1).tolist()
            if attempt == self.reset_attempts:
                raise FloatingPointError(
                    f"{self.task}: the observation after a reset is not finite in {len(rows)} of "
                    f"{bad.numel()} rows, {self.reset_attempts} resets in a row: {list_rows(rows)}."
                )
            self._reset_again(tensordict_reset, bad)
        self._remember(tensordict_reset, mask)
        column = torch.zeros((*shape, 1), dtype=torch.bool, device=tensordict_reset.device)
        return tensordict_reset.set(self.quarantined_key, column)

    def _not_finite(
        self, tensordict_reset: TensorDictBase, mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The rows of a reset that are not finite, ``None`` if there are none."""
        shape = tensordict_reset.batch_size
        bad: torch.Tensor | None = None
        for key in self.in_keys:
            value = tensordict_reset.get(key, None)
            if value is not None and not value.sum().isfinite():
                rows = _rows(~value.isfinite(), shape)
                rows = rows if mask is None else rows & mask
                bad = rows if bad is None else bad | rows
        return None if bad is None or not bad.any() else bad

    def _reset_again(self, tensordict_reset: TensorDictBase, rows: torch.Tensor) -> None:
        """Reset some rows once more, and write what they return."""
        parent: EnvBase | None = self.parent
        if parent is None:
            raise RuntimeError(f"{type(self).__name__} needs an environment to reset a row again.")
        column = rows.unsqueeze(-1)
        again = parent.reset(
            TensorDict({"_reset": column}, batch_size=rows.shape, device=rows.device)
        )
        for key in again.keys(True, True):
            value, old = again.get(key), tensordict_reset.get(key, None)
            if old is not None:
                tensordict_reset.set(key, torch.where(_like(rows, value), value, old))

    # Specs

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the mark.

        Args:
            observation_spec (Composite): the spec before the transform.

        Returns:
            Composite: the spec after it.
        """
        shape = (*observation_spec.shape, 1)
        observation_spec[self.quarantined_key] = Binary(
            n=1, shape=shape, dtype=torch.bool, device=observation_spec.device
        )
        return observation_spec

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns the input: in a replay buffer there is nothing to end.

        Args:
            tensordict (TensorDictBase): any data.

        Returns:
            TensorDictBase: the same tensordict.
        """
        return tensordict


def _rows(flags: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Whether any entry of each row is set, ``[*shape, ...] -> [*shape]``."""
    flags = flags.bool()
    return flags.flatten(len(shape)).any(-1) if flags.ndim > len(shape) else flags


def _like(rows: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Rows as a mask that broadcasts to a value."""
    return rows.reshape(rows.shape + (1,) * (value.ndim - rows.ndim))
