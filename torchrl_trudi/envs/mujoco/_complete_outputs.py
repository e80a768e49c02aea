"""Shortcuts through TorchRL's `step` and `reset` for an environment that needs no completion."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.utils import expand_as_right
from torchrl.data import Composite
from torchrl.envs import EnvBase


class CompleteOutputs(EnvBase):
    """An environment whose ``_step`` and ``_reset`` return complete tensordicts of all rows.

    What they return has every key of the specs, in its shape, and after a partial reset the present
    values of the rows that were not reset. :class:`~torchrl.envs.EnvBase` looks for all that in
    each step and reset, which takes as long as the rest of them in a small batch. Results are the
    same as without these shortcuts. Those of ``_complete_done`` also serve a
    :class:`~torchrl.envs.TransformedEnv` over the environment.

    The batch size is ``[n]``, and ``"done"`` at the root of the tensordict is the only entry that
    says what to reset.
    """

    @classmethod
    def _complete_done(cls, done_spec: Composite, data: TensorDictBase) -> TensorDictBase:
        return data

    def _step_proc_data(self, next_tensordict_out: TensorDictBase) -> TensorDictBase:
        if self.run_type_checks:
            return super()._step_proc_data(next_tensordict_out)
        return next_tensordict_out

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Resets the rows that are done, see :meth:`torchrl.envs.EnvBase.maybe_reset`.

        Args:
            tensordict (TensorDictBase): from :func:`~torchrl.envs.utils.step_mdp`.

        Returns:
            TensorDictBase: the same tensordict, with new values where rows were reset; entries that
            are not the environment's are zero there.
        """
        done = tensordict.get("done", None)
        if done is None or not done.any():
            return tensordict
        known = set(self._step_mdp.keys_from_next).issubset(tensordict.keys())
        if done.all() or not known or type(tensordict) is not TensorDict:
            return super().maybe_reset(tensordict)
        self._assert_tensordict_shape(tensordict)
        tensordict.pop("_reset", None)
        start = self._reset(TensorDict({"_reset": done}, tensordict.batch_size))
        column = ~done  # of the rows that go on
        for key, old in list(tensordict.items()):
            new = start.get(key, None)
            if is_tensor_collection(old):
                new = old.empty() if new is None else new
                value = old.where(column.squeeze(-1), other=new, pad=0)
            else:
                new = old.new_zeros(()) if new is None else new
                value = torch.where(
                    column if old.ndim == 2 else expand_as_right(column.squeeze(-1), old), old, new
                )
            # Of the shape and device that it has had.
            tensordict._set_str(key, value, validated=True, inplace=False, non_blocking=False)
        return tensordict
