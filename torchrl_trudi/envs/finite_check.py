"""A check that an environment produces finite numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.envs.transforms import Transform

from torchrl_trudi.envs._validation import list_rows


class FiniteCheck(Transform):
    """Raises as soon as an environment returns a NaN or an infinity.

    A physics engine that diverges returns NaN. Let through, it turns running statistics and then
    all weights into NaN, far from its cause. One reduction per key and step.

    Args:
        in_keys (Sequence[NestedKey]): the keys to check. A key that is absent is skipped: a reset
            has no reward.

    Keyword Args:
        flag_keys (Sequence[NestedKey], optional): boolean entries by which an environment says itself
            that the numbers of a row were not finite. Defaults to none.

    Raises:
        FloatingPointError: by ``step`` and ``reset``, naming the key and the rows of the batch.

    Examples:
        >>> from torchrl.envs import PendulumEnv, TransformedEnv
        >>> from torchrl_trudi.envs import FiniteCheck
        >>> env = TransformedEnv(PendulumEnv(), FiniteCheck(["th", "thdot", "reward"]))
        >>> env.rollout(3).shape
        torch.Size([3])
    """

    def __init__(
        self, in_keys: Sequence[NestedKey], *, flag_keys: Sequence[NestedKey] = ()
    ) -> None:
        super().__init__(in_keys=in_keys, out_keys=in_keys)
        self.flag_keys = list(flag_keys)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        for key in self.in_keys:
            value = next_tensordict.get(key, None)
            # A sum is finite only if all its terms are, and much cheaper than isfinite() of each.
            # It can also overflow, hence the second look.
            if value is not None and not value.sum().isfinite():
                self._check(key, ~value.isfinite(), next_tensordict.batch_dims)
        for key in self.flag_keys:
            flag = next_tensordict.get(key, None)
            if flag is not None:
                self._check(key, flag, next_tensordict.batch_dims)
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return self._call(tensordict_reset)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Checks a tensordict of any batch size.

        Args:
            tensordict (TensorDictBase): the data to check.

        Returns:
            TensorDictBase: the same tensordict.

        Raises:
            FloatingPointError: if a value is not finite.
        """
        return self._call(tensordict)

    def _check(self, key: NestedKey, bad: torch.Tensor, batch_dims: int) -> None:
        if not bad.any():
            return
        what = (
            f"marked rows as {key!r}" if key in self.flag_keys else f"returned a non-finite {key!r}"
        )
        if not batch_dims:
            raise FloatingPointError(f"the environment {what}.")
        rows = bad.flatten(batch_dims).any(-1) if bad.ndim > batch_dims else bad
        where = rows.nonzero().squeeze(-1).tolist()
        raise FloatingPointError(
            f"the environment {what} in {len(where)} of {rows.numel()} "
            f"rows: {list_rows(where)}. The simulation has most likely diverged."
        )
