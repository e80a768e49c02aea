"""What a policy has to know of its task to act without an environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NestedKey, unravel_key
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_trudi.trainers.options import ConfigError

__all__ = ["TaskInterface"]


@dataclasses.dataclass(frozen=True)
class TaskInterface:
    """Observation entries and actions of a task, in the units of the task.

    Stored beside a checkpoint's parts, so that a policy can be built from a checkpoint alone.

    Args:
        observation (tuple of (str, int)): entries that the policy reads, in order, with their sizes;
            nested ones are ``"outer/inner"``.
        action_names (tuple of str): actuators or joints, or ``a0``, ``a1``, ....
        low (tuple of float): lower bounds of the task's actions.
        high (tuple of float): upper bounds.
        dt (float, optional): seconds between actions. Defaults to ``None``, unknown.

    Examples:
        >>> from torchrl_trudi.envs import make_env
        >>> from torchrl_trudi.trainers.task_interface import TaskInterface
        >>> env = make_env("InvertedPendulum-v5", normalize_action=True)
        >>> TaskInterface.of(env, ["observation"])
        TaskInterface(observation=(('observation', 4),), action_names=('slide',), low=(-3.0,), high=(3.0,), dt=0.04)
    """

    observation: tuple[tuple[str, int], ...]
    action_names: tuple[str, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    dt: float | None = None

    @classmethod
    def of(cls, env: EnvBase, in_keys: list[NestedKey]) -> TaskInterface:
        """That of an environment.

        Args:
            env (EnvBase): the environment, made by :func:`~torchrl_trudi.envs.make_env`.
            in_keys (list of NestedKey): entries that the policy reads.

        Returns:
            TaskInterface: the interface.
        """
        spec = env.observation_spec
        entries = tuple(
            (key if isinstance(key, str) else "/".join(key), int(spec[key].shape[-1]))
            for key in in_keys
        )
        base = env
        while isinstance(base, TransformedEnv):
            base = base.base_env
        # Behind the transforms, one of which may map the action from [-1, 1].
        space = base.action_spec.space
        low, high = (
            tuple(bound.reshape(-1, bound.shape[-1])[0].tolist())
            for bound in (space.low, space.high)
        )
        model = getattr(base, "model", None)
        if model is None or not hasattr(model, "actuator_trnid"):
            return cls(entries, tuple(f"a{i}" for i in range(len(low))), low, high)
        dt = float(model.opt.timestep * base.task.frame_skip)
        return cls(entries, _actuator_names(model, len(low)), low, high, dt)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TaskInterface:
        """The inverse of :meth:`to_dict`.

        Args:
            values (Mapping): what :meth:`to_dict` returned, possibly by way of JSON.

        Returns:
            TaskInterface: the interface.

        Raises:
            ConfigError: an entry is missing or not of its kind.
        """
        try:
            return cls(
                tuple((str(name), int(size)) for name, size in values["observation"]),
                tuple(map(str, values["action_names"])),
                tuple(map(float, values["low"])),
                tuple(map(float, values["high"])),
                None if values["dt"] is None else float(values["dt"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the description of the task is damaged: {error!r}") from error

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can hold."""
        return dataclasses.asdict(self)

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys of the entries."""
        return [unravel_key(tuple(name.split("/"))) for name, _ in self.observation]

    @property
    def obs_dim(self) -> int:
        """Summed size of the entries."""
        return sum(size for _, size in self.observation)

    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lower and upper bounds, float32, each ``[A]``."""
        return torch.tensor(self.low), torch.tensor(self.high)


def _actuator_names(model: Any, count: int) -> tuple[str, ...]:
    """Names of the actuators, else of the joints they drive, else numbers."""
    import mujoco

    names = []
    for i in range(count):
        name = mujoco.mj_id2name(model, mujoco.mjtObj.mjOBJ_ACTUATOR, i)
        if not name and model.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_JOINT:
            name = mujoco.mj_id2name(
                model, mujoco.mjtObj.mjOBJ_JOINT, int(model.actuator_trnid[i, 0])
            )
        names.append(name or f"a{i}")
    return tuple(names)
