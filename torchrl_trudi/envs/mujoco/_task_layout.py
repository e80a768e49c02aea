"""What a task reads and returns, found out by calling it once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import mujoco
import numpy as np

from torchrl_trudi.envs._validation import RESERVED_KEYS
from torchrl_trudi.envs.mujoco._generators import RowGenerators
from torchrl_trudi.envs.mujoco._physics_driver import STATE_FIELDS
from torchrl_trudi.envs.mujoco.simulations import FieldProbe, Simulations
from torchrl_trudi.envs.mujoco.task import MujocoTask


@dataclasses.dataclass(frozen=True)
class TaskLayout:
    """What a task reads and returns.

    Attributes:
        fields: the fields of ``MjData`` that it reads, sorted.
        columns: of the parts of its observation, where each stands in the whole.
        groups: of the entries of its observation, by name, where each stands in the whole.
        observation_size: numbers in an observation.
        snapshot_size: numbers in a snapshot; ``None`` if the task has none.
        initial_state_reads_derived: whether ``initial_state`` reads fields that have to be
            computed before it is called.
    """

    fields: tuple[str, ...]
    columns: tuple[slice, ...]
    groups: Mapping[str, slice]
    observation_size: int
    snapshot_size: int | None
    initial_state_reads_derived: bool


def probe_task(task: MujocoTask, model: mujoco.MjModel) -> TaskLayout:
    """Calls every function of a task with the default state of the model.

    Args:
        task (MujocoTask): the task, whose ``setup`` was called.
        model (mujoco.MjModel): the model.

    Returns:
        TaskLayout: what was seen.

    Raises:
        ValueError: if a function returns something of the wrong shape or type.
    """
    name = type(task).__name__
    probe = FieldProbe(model)
    sims: Any = Simulations(probe, task.frame_skip)
    n = len(sims)
    returned = task.observation(sims)
    names = _group_names(name, returned)
    observation = as_parts(returned)
    snapshot = task.snapshot(sims)
    if snapshot is not None and (np.ndim(snapshot) != 2 or len(snapshot) != n):
        raise ValueError(
            f"{name}.snapshot must return an array of shape [n, k], with n={n} here; got "
            f"{np.shape(snapshot)}."
        )
    zeros = np.zeros((n, model.nu), np.float32)
    with np.errstate(all="ignore"):
        reward = task.reward(sims, zeros, snapshot, snapshot)
    _check_observation(name, observation, n)
    _check_reward(name, reward, n)
    _check_terminated(name, task.terminated(sims), n)
    fields = probe.fields
    probe.fields = set()
    # With arrays of its own, so that the probe hears of those that were read before as well.
    sims = Simulations(probe, task.frame_skip)
    initial = initial_fields(task, sims, RowGenerators.from_seeds(range(n)))
    shapes = _initial_shapes(model)
    for field, array in initial.items():
        if np.shape(array) != (n, *shapes[field]):
            shown = ", ".join(map(str, shapes[field]))
            raise ValueError(
                f"{name}.initial_state must return {field} of shape [n, {shown}], with n={n} "
                f"here; got {np.shape(array)}."
            )
    widths = [part.shape[1] for part in observation]
    ends = np.cumsum(widths).tolist()
    columns = tuple(slice(end - width, end) for end, width in zip(ends, widths, strict=True))
    groups: dict[str, slice] = {}
    for group, part in zip(names, columns, strict=True):
        groups[group] = slice(groups.get(group, part).start, part.stop)
    for group, whole in groups.items():
        if whole.start == whole.stop:
            raise ValueError(f"{name}.observation returns nothing under {group!r}.")
    return TaskLayout(
        fields=tuple(sorted(fields | probe.fields)),
        columns=columns,
        groups=groups,
        observation_size=ends[-1],
        snapshot_size=None if snapshot is None else snapshot.shape[1],
        initial_state_reads_derived=bool(probe.fields.difference(STATE_FIELDS)),
    )


def initial_fields(
    task: MujocoTask, sims: Simulations, rng: RowGenerators
) -> Mapping[str, np.ndarray]:
    """Initial states, in either form that a task may return.

    Args:
        task (MujocoTask): the task.
        sims (Simulations): the rows that are being reset.
        rng (RowGenerators): their random streams.

    Returns:
        Mapping[str, numpy.ndarray]: the fields of the state that it sets, by name.

    Raises:
        ValueError: if it returns something else.
    """
    initial: Any = task.initial_state(sims, rng)
    if isinstance(initial, (tuple, list)) and len(initial) == 2:
        return {"qpos": initial[0], "qvel": initial[1]}
    accepted = list(_initial_shapes(sims.model))
    if not isinstance(initial, Mapping) or not set(initial).issubset(accepted):
        given = sorted(map(str, initial)) if isinstance(initial, Mapping) else repr(initial)
        raise ValueError(
            f"{type(task).__name__}.initial_state must return qpos and qvel, or a mapping with keys "
            f"among {accepted}; got {given}."
        )
    return initial


def _initial_shapes(model: mujoco.MjModel) -> dict[str, tuple[int, ...]]:
    """The fields that a task may set at the beginning of an episode, with their shapes."""
    return {
        "qpos": (model.nq,),
        "qvel": (model.nv,),
        "act": (model.na,),
        "mocap_pos": (model.nmocap, 3),
        "mocap_quat": (model.nmocap, 4),
    }


def as_parts(observation: Any) -> Sequence[np.ndarray]:
    """An observation as a sequence of arrays; what is neither comes as the only part.

    Args:
        observation: what a task returned; the entries of a mapping are taken in the order of their
            names.

    Returns:
        Sequence[numpy.ndarray]: the parts.
    """
    if isinstance(observation, Mapping):
        return [part for name in sorted(observation) for part in as_parts(observation[name])]
    return observation if isinstance(observation, (tuple, list)) else [observation]


def _group_names(name: str, observation: Any) -> list[str]:
    """Of each part of an observation, the entry that it belongs to."""
    if not isinstance(observation, Mapping):
        return ["observation"] * len(as_parts(observation))
    for group, parts in observation.items():
        if not isinstance(group, str) or not group or isinstance(parts, Mapping):
            raise ValueError(
                f"{name}.observation must return arrays, or a mapping from names to arrays; got "
                f"{type(parts).__name__} under {group!r}."
            )
        if group in RESERVED_KEYS:
            raise ValueError(
                f"{name}.observation returns an entry {group!r}, a name that the environment "
                "writes itself."
            )
    return [group for group in sorted(observation) for _ in as_parts(observation[group])]


def _check_observation(name: str, parts: Sequence[np.ndarray], n: int) -> None:
    for part in parts:
        if (
            not isinstance(part, np.ndarray)
            or part.ndim != 2
            or len(part) != n
            or part.dtype.kind not in "fiub"
        ):
            raise ValueError(
                f"{name}.observation must return numpy arrays of real numbers of shape [n, k], "
                f"with n={n} here; got {getattr(part, 'shape', part)!r} of type "
                f"{getattr(part, 'dtype', type(part).__name__)}."
            )
    if not sum(part.shape[1] for part in parts):
        raise ValueError(f"{name}.observation returns nothing.")


def _check_reward(name: str, reward: Any, n: int) -> None:
    if np.shape(reward) != (n,) or np.asarray(reward).dtype.kind not in "fiub":
        raise ValueError(
            f"{name}.reward must return an array of real numbers of shape [n], with n={n} here; "
            f"got {np.shape(reward)} of type {np.asarray(reward).dtype}."
        )


def _check_terminated(name: str, terminated: Any, n: int) -> None:
    if terminated is not None and (
        np.shape(terminated) != (n,) or np.asarray(terminated).dtype != bool
    ):
        raise ValueError(
            f"{name}.terminated must return booleans of shape [n], with n={n} here; got "
            f"{np.asarray(terminated)!r}."
        )
