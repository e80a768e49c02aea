"""The state of a collector between two batches, so that a resumed run goes on in mid-episode."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_trudi.envs.mujoco import MujocoBatchEnv

__all__ = ["CollectorState"]

_log = logging.getLogger(__name__)


class CollectorState:
    """The environments of a collector and its place in them, as one part of a checkpoint.

    What torchrl's ``Collector.state_dict`` saves are the transforms and the policy; its environments start new
    episodes. Here is what it leaves out: the physics, counters and random generators of a
    :class:`~torchrl_trudi.envs.mujoco.MujocoBatchEnv`, and the observation that the next action is
    taken on. A restored collector gives the batches that the saved one would have given, bit for
    bit on the same machine.

    The state of other environments cannot be read from outside, and that of another number of them is of
    no use: they start new episodes, and a log message says so. Trajectory identifiers (``track_traj_ids``) are new ones.

    Args:
        collector (Collector): a collector in this process.
        env (EnvBase): its environment.

    Attributes:
        restored (bool): whether a state was loaded, exactly.

    Examples:
        >>> from torchrl.collectors import Collector
        >>> from torchrl_trudi.envs import make_env
        >>> from torchrl_trudi.trainers.collector_state import CollectorState
        >>> env = make_env("InvertedPendulum-v5", num_envs=2, seed=0)
        >>> collector = Collector(env, None, frames_per_batch=8, total_frames=-1)
        >>> batches = iter(collector)
        >>> _ = next(batches)
        >>> state = CollectorState(collector, env).state_dict()
        >>> bool(state["exact"])
        True
    """

    def __init__(self, collector: Collector, env: EnvBase) -> None:
        self._collector = collector
        self._env = env
        self.restored = False

    def state_dict(self) -> dict[str, Any]:
        """The state, of tensors.

        Returns:
            dict: ``exact``, whether it is one, and then ``env`` and ``carrier``.
        """
        base = _base(self._env)
        if not isinstance(base, MujocoBatchEnv):
            return {"exact": torch.tensor(False)}
        carrier = self._carrier()
        return {
            "exact": torch.tensor(True),
            "env": base.get_extra_state(),
            "carrier": {key: value.clone() for key, value in carrier.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Args:
            state (Mapping): the state.

        Raises:
            ValueError: it is that of another task.
        """
        if not state["exact"] or not isinstance(_base(self._env), MujocoBatchEnv):
            _log.warning(
                "resume: the state of these environments cannot be restored: new episodes start"
            )
            return
        saved, own = len(state["env"]["num_unstable"]), self._env.batch_size.numel()
        if saved != own:
            _log.warning(
                "resume: the checkpoint has %d environments, this run %d: new episodes start",
                saved,
                own,
            )
            return
        _base(self._env).set_extra_state(state["env"])
        self.restored = True
        self._carrier().update_(dict(state["carrier"]))

    def _carrier(self) -> TensorDict:
        """What the collector keeps of the last step, with flat keys, sharing its memory.

        torchrl 0.14.1 has no public name for it (``Collector.load_state_dict`` leaves it to the
        reset). ``test_collector_state.py`` looks whether that has changed.
        """
        carrier = self._collector._carrier
        # What the policy wrote is overwritten before it is read.
        keys = [key for key in carrier.keys(True, True) if _is_of_the_env(key, self._env)]
        flat = {_join(key): carrier.get(key) for key in keys}
        return TensorDict(flat, carrier.batch_size, device=carrier.device)


def _base(env: EnvBase) -> EnvBase:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def _join(key: Any) -> str:
    return key if isinstance(key, str) else "/".join(key)


def _is_of_the_env(key: Any, env: EnvBase) -> bool:
    """Whether the environment reads or writes an entry at the root."""
    known = {
        *env.observation_spec.keys(True, True),
        *env.done_keys,
        *env.state_spec.keys(True, True),
    }
    return key in known
