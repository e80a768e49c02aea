"""The definition of a task, and the registry of tasks."""

from __future__ import annotations

import abc
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mujoco
import numpy as np

from torchrl_trudi.envs._validation import check_int, did_you_mean
from torchrl_trudi.envs.mujoco._generators import RowGenerators
from torchrl_trudi.envs.mujoco._model import load_model
from torchrl_trudi.envs.mujoco.randomization import ModelRandomization, check_randomization
from torchrl_trudi.envs.mujoco.simulations import Simulations


class MujocoTask(abc.ABC):
    """A task: a model, and what is observed, rewarded and terminated in it.

    Subclasses write a few functions of the batched state (:class:`Simulations`): arrays have one
    row per environment, and there is no loop over environments. :class:`MujocoBatchEnv` does the
    rest: physics, auto-reset, seeds, truncation, diverging simulations, checkpoints.

    Args:
        model (str, path, mujoco.MjSpec or mujoco.MjModel): an MJCF file, a specification, or a
            compiled model.

    Keyword Args:
        frame_skip (int, optional): substeps of the physics per action. Defaults to ``1``.
        max_episode_steps (int, optional): truncates episodes after that many steps. Defaults to
            ``None``, no limit.
        randomization (Sequence[ModelRandomization], optional): model fields that every environment
            draws anew at each reset, unless the environment is given others. Defaults to none.
        camera (Mapping[str, Any], optional): attributes of the free camera of
            :meth:`MujocoBatchEnv.render`: ``distance`` (m), ``azimuth``, ``elevation`` (degrees),
            ``lookat`` ``[3]`` (m), or ``trackbodyid``. Defaults to ``None``, MuJoCo's own.

    Examples:
        >>> import numpy as np
        >>> from torchrl_trudi.envs.mujoco import MujocoBatchEnv, MujocoTask
        >>> import mujoco
        >>> spec = mujoco.MjSpec.from_string('''<mujoco><worldbody><body>
        ...   <joint name="hinge" damping="0.1"/><geom size=".05" fromto="0 0 0 0 0 -.5" type="capsule"/>
        ... </body></worldbody><actuator><motor joint="hinge" ctrlrange="-1 1"/></actuator></mujoco>''')
        >>> class Swing(MujocoTask):
        ...     def __init__(self):
        ...         super().__init__(spec, frame_skip=10, max_episode_steps=200)
        ...     def initial_state(self, sims, rng):
        ...         return rng.uniform(-np.pi, np.pi, 1), np.zeros((len(sims), 1))
        ...     def observation(self, sims):
        ...         return np.cos(sims.qpos), np.sin(sims.qpos), sims.qvel
        ...     def reward(self, sims, action, before, after):
        ...         return -np.cos(sims.qpos[:, 0])
        >>> env = MujocoBatchEnv(Swing(), num_envs=4, seed=0)
        >>> env.rollout(3)["observation"].shape
        torch.Size([4, 3, 3])
    """

    def __init__(
        self,
        model: str | os.PathLike | mujoco.MjSpec | mujoco.MjModel,
        *,
        frame_skip: int = 1,
        max_episode_steps: int | None = None,
        randomization: Sequence[ModelRandomization] = (),
        camera: Mapping[str, Any] | None = None,
    ) -> None:
        self.model_source = model
        self.randomization = check_randomization(randomization)
        self.frame_skip = check_int("frame_skip", frame_skip, 1)
        if max_episode_steps is not None:
            max_episode_steps = check_int("max_episode_steps", max_episode_steps, 1)
        self.max_episode_steps = max_episode_steps
        self.camera = dict(camera or {})
        for attribute in self.camera:
            if attribute not in CAMERA_ATTRIBUTES:
                raise ValueError(
                    f"camera has no attribute {attribute!r}; accepted are {CAMERA_ATTRIBUTES}."
                )

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if isinstance(self.model_source, mujoco.MjSpec):  # which cannot be pickled
            state["model_source"] = load_model(self.model_source)
        return state

    def setup(self, model: mujoco.MjModel) -> None:
        """Called once with the compiled model, before anything else: look up ids here.

        Args:
            model (mujoco.MjModel): the model.
        """
        del model

    @abc.abstractmethod
    def initial_state(
        self, sims: Simulations, rng: RowGenerators
    ) -> tuple[np.ndarray, np.ndarray] | Mapping[str, np.ndarray]:
        """Draws initial states.

        Args:
            sims (Simulations): the rows that are being reset, in the default state of the model.
                Fields of a randomised model are still those of the last episode.
            rng (RowGenerators): their random streams.

        Returns:
            tuple of numpy.ndarray, or a mapping of them: ``qpos`` ``[n, nq]`` and ``qvel``
            ``[n, nv]``; or some of ``"qpos"``, ``"qvel"``, ``"act"`` ``[n, na]``, ``"mocap_pos"``
            ``[n, nmocap, 3]`` and ``"mocap_quat"`` ``[n, nmocap, 4]``, the others being left as
            they are. A quaternion need not have norm 1.
        """

    @abc.abstractmethod
    def observation(self, sims: Simulations) -> np.ndarray | Sequence[np.ndarray]:
        """What the policy sees.

        Args:
            sims (Simulations): the state.

        Returns:
            numpy.ndarray or a sequence of them: ``[n, k]`` each, concatenated to ``"observation"``.
            Or a mapping from names to such, each an entry of its own, for actors and critics that
            read different ones.
        """

    @abc.abstractmethod
    def reward(self, sims: Simulations, action: np.ndarray, before: Any, after: Any) -> np.ndarray:
        """The reward of a step.

        Args:
            sims (Simulations): the state after the step.
            action (numpy.ndarray): the action as given, ``[n, nu]`` float32. ``sims.ctrl`` is the
                same in float64.
            before (numpy.ndarray): :meth:`snapshot` before the step, ``None`` if the task has none.
            after (numpy.ndarray): :meth:`snapshot` after it.

        Returns:
            numpy.ndarray: ``[n]``.
        """

    def terminated(self, sims: Simulations) -> np.ndarray | None:
        """Whether the new state ends the episode.

        Args:
            sims (Simulations): the state after the step.

        Returns:
            numpy.ndarray or None: ``[n]`` bool; ``None``, the default, ends none.
        """
        return None

    def snapshot(self, sims: Simulations) -> np.ndarray | None:
        """What rewards compare between states, such as a position.

        Args:
            sims (Simulations): the state.

        Returns:
            numpy.ndarray or None: ``[n, k]``, handed to :meth:`reward` with that of the state before,
            and part of checkpoints; ``None``, the default, for nothing.
        """
        return None


CAMERA_ATTRIBUTES = ["azimuth", "distance", "elevation", "lookat", "trackbodyid"]
TaskFactory = Callable[..., MujocoTask]
_REGISTRY: dict[str, TaskFactory] = {}
_DEFINITION = ("__module__", "__qualname__")


def register_task(name: str, factory: TaskFactory) -> None:
    """Gives a task a name, for :class:`MujocoBatchEnv` and :func:`make_env`.

    Worker processes know the tasks that are registered when the modules they import are
    imported.

    Args:
        name (str): the name, by convention with a version (``"Quadruped-v0"``).
        factory (Callable): the class of the task, or a function that returns one. Its arguments
            are the task's options.

    Raises:
        ValueError: if the name is taken by another factory.
        TypeError: if the arguments are of the wrong types.

    Examples:
        >>> from torchrl_trudi.envs.mujoco import MujocoBatchEnv, registered_tasks
        >>> "Humanoid-v5" in registered_tasks()
        True
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"the name of a task must be a string that is not empty, got {name!r}.")
    if not callable(factory):
        raise TypeError(f"the factory of a task must be callable, got {factory!r}.")
    known = _REGISTRY.get(name, factory)
    # The same definition, executed once more: a notebook's cell, or a reloaded module.
    if any(getattr(known, a, None) != getattr(factory, a, None) for a in _DEFINITION):
        raise ValueError(f"there is another task {name!r} already: {_REGISTRY[name]!r}.")
    _REGISTRY[name] = factory


def registered_tasks() -> list[str]:
    """The names of all tasks.

    Returns:
        list of str: the names, sorted.
    """
    return sorted(_REGISTRY)


def make_task(name: str, options: Mapping[str, Any]) -> MujocoTask:
    """Makes a registered task.

    Args:
        name (str): its name.
        options (Mapping[str, Any]): its arguments.

    Returns:
        MujocoTask: the task.

    Raises:
        ValueError: if there is no such task.
        TypeError: if it does not accept one of the arguments.
    """
    if name not in _REGISTRY:
        raise ValueError(
            f"{name!r} is not a task of MujocoBatchEnv; there are {registered_tasks()}, and "
            f"register_task adds others.{did_you_mean(name, _REGISTRY)}"
        )
    parameters = inspect.signature(_REGISTRY[name]).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = sorted(p.name for p in parameters if p.kind in named)
    unknown = [option for option in options if option not in accepted]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise TypeError(
            f"the task {name!r} does not accept the argument {unknown[0]!r}; it accepts "
            f"{accepted}.{did_you_mean(unknown[0], accepted)}"
        )
    task = _REGISTRY[name](**options)
    if not isinstance(task, MujocoTask):
        raise TypeError(f"the factory of {name!r} must return a MujocoTask, got {task!r}.")
    return task
