"""Construction of batched environments."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import torch
from tensordict import NestedKey, unravel_key
from torchrl.envs import (
    ActionScaling,
    Compose,
    DoubleToFloat,
    EnvBase,
    RewardScaling,
    RewardSum,
    StepCounter,
    TransformedEnv,
)
from torchrl.envs.transforms import Transform

from torchrl_trudi.envs._gymnasium import VECTORIZATIONS, make_gymnasium_env
from torchrl_trudi.envs._validation import (
    check_choice,
    check_int,
    check_positive,
    did_you_mean,
    import_task,
)
from torchrl_trudi.envs.finite_check import FiniteCheck
from torchrl_trudi.envs.mujoco import ModelRandomization, MujocoBatchEnv, registered_tasks
from torchrl_trudi.envs.observation_keys import get_observation_keys
from torchrl_trudi.envs.observation_norm import RunningObservationNorm
from torchrl_trudi.envs.quarantine import Quarantine
from torchrl_trudi.envs.suites.dispatch import make_suite_env, split_name

# A backend makes an environment of batch size [num_envs] whose `next` observations are the true
# final ones and which resets the rows marked by `_reset`; all else is added here.
_BACKENDS = ("mujoco", "gymnasium")

# What happens to a row whose numbers are not finite.
_ON_NONFINITE = ("quarantine", "raise")
_RESET_ATTEMPTS = 3

# Options of Gymnasium's MuJoCo tasks that are about its own renderer.
_GYMNASIUM_OPTIONS = frozenset(
    {"render_mode", "width", "height", "camera_id", "camera_name"}
    | {"default_camera_config", "max_geom", "visual_options"}
)


def make_env(
    name: str,
    num_envs: int = 1,
    *,
    seed: int | None = None,
    device: torch.device | str | None = None,
    normalize_action: bool = False,
    normalize_observation: bool = True,
    observation_norm: RunningObservationNorm | None = None,
    observation_keys: Sequence[NestedKey] | None = None,
    observation_norm_kwargs: Mapping[str, Any] | None = None,
    reward_scale: float = 1.0,
    training: bool = True,
    backend: str = "auto",
    num_threads: int | None = None,
    randomization: Sequence[ModelRandomization] | None = None,
    vectorization: str = "sync",
    max_episode_steps: int | None = None,
    on_nonfinite: str = "quarantine",
    **env_kwargs: Any,
) -> TransformedEnv:
    """Makes a batched environment with everything a training loop needs around it.

    The batch size is ``[num_envs]``, also for one environment. When an episode ends, ``"next"``
    holds its true final observation, with ``"terminated"`` and ``"truncated"`` apart; TorchRL
    then resets the rows that are done, and no other.

    Gymnasium's MuJoCo tasks run as one :class:`MujocoBatchEnv`, its others as vectorised Gymnasium,
    and ``"suite/Task"`` by the simulator of that suite (:mod:`torchrl_trudi.envs.suites`).

    Transforms, applied once to the whole batch, in this order: the action's map from ``[-1, 1]``
    (:class:`~torchrl.envs.ActionScaling`, if asked for), with Gymnasium a conversion to float32
    (others do it themselves), :class:`Quarantine` or :class:`FiniteCheck` (see ``on_nonfinite``),
    ``"episode_reward"`` in the units of the task (:class:`~torchrl.envs.RewardSum`), ``"step_count"``
    (:class:`~torchrl.envs.StepCounter`), reward scaling, observation normalisation
    (:class:`RunningObservationNorm`).

    Args:
        name (str): a task of :class:`MujocoBatchEnv`, or one registered in Gymnasium, with its
            version. ``"module:Task-v0"`` imports ``module`` first. ``"suite/Task"`` is a task of a
            suite, such as ``"envpool/G1JoystickFlatTerrain-v1"``; ``python -m
            torchrl_trudi.envs.suites`` lists them, and ``"gymnasium/Task"`` is ``"Task"``.
        num_envs (int, optional): number of sub-environments. Defaults to ``1``.

    Keyword Args:
        seed (int, optional): seeds the environment before its first reset. Equal seeds and equal
            actions give equal rollouts; sub-environments have different seeds, and so have
            batches with different seeds. Defaults to ``None``, not reproducible.
        device (torch.device or str, optional): device of the tensordicts. Defaults to ``None``,
            the CPU.
        normalize_action (bool, optional): whether the action space is ``[-1, 1]`` whatever that of
            the task is. A critic that reads the action wants it at the scale of its other inputs.
            Defaults to ``False``, the task's own bounds.
        normalize_observation (bool, optional): whether to normalise observations. Defaults to
            ``True``.
        observation_norm (RunningObservationNorm, optional): normalise with the statistics of this
            transform, typically that of the training environment
            (:func:`get_observation_norm`). They are shared and not copied; the transform itself
            stays where it is. Defaults to ``None``, fresh statistics.
        observation_keys (Sequence[NestedKey], optional): the observations to normalise, each on
            its own. Others are passed on as they are. Defaults to ``None``, all floating point
            ones.
        observation_norm_kwargs (Mapping[str, Any], optional): options of
            :class:`RunningMeanVar` for fresh statistics, such as ``eps`` and ``clip``. Defaults
            to ``None``.
        reward_scale (float, optional): factor on ``"reward"``; ``"episode_reward"`` is not
            affected. Defaults to ``1.0``.
        training (bool, optional): whether the statistics are updated. With ``False`` they must
            come from ``observation_norm`` or from a ``state_dict`` before the first reset.
            Defaults to ``True``.
        backend (str, optional): ``"mujoco"``, which is :class:`MujocoBatchEnv`,
            ``"gymnasium"``, or ``"auto"``: the former for the tasks it has, the latter for others
            and for options of Gymnasium's renderer, with a warning, and for
            ``vectorization="async"``. A suite of its own takes ``"auto"`` alone.
            Defaults to ``"auto"``.
        num_threads (int, optional): threads of the physics, of ``"mujoco"`` and EnvPool. Defaults
            to ``None``, as many as this process has CPUs.
        randomization (Sequence[ModelRandomization], optional): model fields drawn at each reset,
            of ``"mujoco"`` only. Defaults to ``None``, those of the task.
        vectorization (str, optional): of ``"gymnasium"`` and HumanoidBench: ``"sync"`` steps the sub-environments
            one after the other in this process, ``"async"`` in a process each: the calling script
            then needs ``if __name__ == "__main__"``. Defaults to ``"sync"``.
        max_episode_steps (int, optional): truncates episodes after that many steps. Defaults to
            ``None``, the limit of the task.
        on_nonfinite (str, optional): what happens to a row whose observation or reward is a NaN or
            an infinity, or whose simulation diverges. ``"quarantine"``: its episode ends, the step is
            marked under ``("next", "quarantined")``, and an observation that is not finite after a
            reset is reset again, twice (:class:`Quarantine`). ``"raise"``: an error, without
            such a mark. Defaults to ``"quarantine"``.
        **env_kwargs: arguments of the task.

    Returns:
        TransformedEnv: the environment.

    Raises:
        SuiteNotInstalledError: an ``ImportError``; the suite's simulator is not installed. The
            message says how to install it.
        SuiteNotSupportedError: a ``NotImplementedError``; this version cannot run that suite.
        ValueError: if the suite or the task is not known, has an action space that is not a bounded Box or an
            observation that is not a Box or a Dict of Box, or if an argument is out of range or
            not among the accepted names. The message says what is accepted.
        TypeError: if an argument is of the wrong type or is not accepted by the task.
        FloatingPointError: later, by ``reset``, if an observation is still not finite after three
            resets; with ``on_nonfinite="raise"`` by ``reset`` and ``step``, at once.

    Examples:
        >>> from torchrl_trudi.envs import get_observation_norm, make_env
        >>> env = make_env("Pendulum-v1", num_envs=2, seed=0, reward_scale=0.1)
        >>> rollout = env.rollout(5)
        >>> rollout["next", "observation"].shape
        torch.Size([2, 5, 3])
        >>> eval_env = make_env(
        ...     "Pendulum-v1",
        ...     num_envs=2,
        ...     seed=1,
        ...     training=False,
        ...     observation_norm=get_observation_norm(env),
        ... )
        >>> _ = eval_env.rollout(5)
        >>> get_observation_norm(env).get_statistics("observation").count.item()
        12
    """
    num_envs = check_int("num_envs", num_envs, 1)
    if seed is not None:
        seed = check_int("seed", seed, 0)
    if max_episode_steps is not None:
        max_episode_steps = check_int("max_episode_steps", max_episode_steps, 1)
    reward_scale = check_positive("reward_scale", reward_scale)
    check_choice("backend", backend, ["auto", *_BACKENDS])
    check_choice("vectorization", vectorization, VECTORIZATIONS)
    check_choice("on_nonfinite", on_nonfinite, _ON_NONFINITE)
    reset_attempts = _RESET_ATTEMPTS if on_nonfinite == "quarantine" else 1
    _check_norm_arguments(
        normalize_observation, observation_norm, observation_keys, observation_norm_kwargs
    )
    suite, task = split_name(name)
    if suite == "gymnasium":
        name = task
        if backend == "auto":
            backend = _choose_backend(name, vectorization, env_kwargs)
    elif backend != "auto":
        raise ValueError(
            f"backend={backend!r} is for Gymnasium's tasks; {name} runs on the simulator of its "
            "suite."
        )
    base_env: EnvBase
    if suite != "gymnasium":
        if randomization:
            raise ValueError(f"randomization belongs to backend='mujoco'; {name} has its own.")
        base_env = make_suite_env(
            suite,
            task,
            num_envs,
            seed=seed,
            device=torch.device("cpu" if device is None else device),
            num_threads=num_threads,
            vectorization=vectorization,
            max_episode_steps=max_episode_steps,
            env_kwargs=env_kwargs,
        )
    elif backend == "mujoco":
        if vectorization != "sync":
            raise ValueError(
                f"vectorization={vectorization!r} belongs to backend='gymnasium'; the simulations "
                "of 'mujoco' share this process, on num_threads threads."
            )
        decided = sorted({"dtype", "driver", "reset_attempts"}.intersection(env_kwargs))
        if decided:
            raise TypeError(
                f"make_env does not accept {decided}; MujocoBatchEnv({name!r}, ...) does."
            )
        base_env = MujocoBatchEnv(
            import_task(name),
            num_envs,
            num_threads=num_threads,
            seed=seed,
            device=device,
            max_episode_steps=max_episode_steps,
            randomization=randomization,
            reset_attempts=reset_attempts,
            **env_kwargs,
        )
    else:
        if num_threads is not None or randomization:
            raise ValueError(
                f"num_threads and randomization belong to backend='mujoco'; {name} runs with "
                "'gymnasium'."
            )
        base_env = make_gymnasium_env(
            name,
            num_envs,
            device=torch.device("cpu" if device is None else device),
            vectorization=vectorization,
            max_episode_steps=max_episode_steps,
            env_kwargs=env_kwargs,
        )
    try:
        if seed is not None and backend == "gymnasium":
            base_env.set_seed(seed)
        # The action passes through the transforms from the last to the first: it is cast to the
        # dtype of the task before it is scaled.
        env = TransformedEnv(base_env)
        if normalize_action:
            env.append_transform(ActionScaling())
        transforms: list[Transform] = [RewardSum(), StepCounter()]
        checked: list[NestedKey] = []
        flags: list[NestedKey] = []
        # Which returns finite float32 numbers, and says where they were not.
        if backend == "mujoco":
            keys = get_observation_keys(env)
            flags.append("unstable")
        else:
            env.append_transform(DoubleToFloat())
            keys = checked = _float_keys(env)
        if on_nonfinite == "raise":
            reward: list[NestedKey] = ["reward"]
            transforms.insert(0, FiniteCheck([*checked, *reward], flag_keys=flags))
        else:
            quarantine = Quarantine(
                checked, flag_keys=flags, reset_attempts=reset_attempts, task=name
            )
            transforms.insert(0, quarantine)
        if reward_scale != 1.0:
            transforms.append(RewardScaling(loc=0.0, scale=reward_scale))
        if normalize_observation:
            transforms.append(
                _make_observation_norm(
                    env, keys, observation_norm, observation_keys, observation_norm_kwargs, training
                )
            )
        return env.append_transform(Compose(*transforms))
    except Exception:
        # Worker processes of an environment that nobody holds would stay alive.
        base_env.close()
        raise


def get_observation_norm(env: EnvBase) -> RunningObservationNorm:
    """The observation normalisation of an environment.

    Args:
        env (EnvBase): an environment made by :func:`make_env`, possibly with more transforms.

    Returns:
        RunningObservationNorm: the transform itself.

    Raises:
        ValueError: if the environment does not have exactly one.
    """
    found = []
    while isinstance(env, TransformedEnv):
        found += [m for m in env.transform.modules() if isinstance(m, RunningObservationNorm)]
        env = env.base_env
    if len(found) != 1:
        raise ValueError(f"expected one RunningObservationNorm in the env, found {len(found)}.")
    return found[0]


def _choose_backend(
    name: str,
    vectorization: str,
    env_kwargs: Mapping[str, Any],
) -> str:
    if vectorization == "async":
        return "gymnasium"
    task = import_task(name)
    if task not in registered_tasks() and task not in gymnasium.registry:
        return "gymnasium"  # whose error says so
    if task not in registered_tasks():
        reason = "it is not one of its tasks"
    else:
        given = _GYMNASIUM_OPTIONS.intersection(env_kwargs)
        if not given or task not in gymnasium.registry:
            return "mujoco"
        reason = f"it has no option {min(given)!r}"
    # Said once: Python does not repeat a warning of the same text from the same place.
    warnings.warn(
        f"{name} runs as vectorised Gymnasium, not as a MujocoBatchEnv: {reason}. "
        "backend='gymnasium' asks for that.",
        stacklevel=3,
    )
    return "gymnasium"


def _check_norm_arguments(
    normalize_observation: bool,
    observation_norm: RunningObservationNorm | None,
    observation_keys: Sequence[NestedKey] | None,
    observation_norm_kwargs: Mapping[str, Any] | None,
) -> None:
    if observation_norm is not None and not isinstance(observation_norm, RunningObservationNorm):
        raise TypeError(
            "observation_norm must be a RunningObservationNorm, such as "
            f"get_observation_norm(env), got {type(observation_norm).__name__}."
        )
    fresh = {
        "observation_keys": observation_keys,
        "observation_norm_kwargs": observation_norm_kwargs,
    }
    given = [argument for argument, value in fresh.items() if value is not None]
    if observation_norm is not None and given:
        raise ValueError(
            f"observation_norm has its own keys and options; {given} cannot be given with it."
        )
    given += ["observation_norm"] if observation_norm is not None else []
    if not normalize_observation and given:
        raise ValueError(f"normalize_observation=False, but {given} given.")


def _float_keys(env: EnvBase) -> list[NestedKey]:
    # Called before other transforms, so that only the task's own observations are listed.
    spec = env.observation_spec
    return [key for key in spec.keys(True, True) if spec[key].dtype.is_floating_point]


def _make_observation_norm(
    env: EnvBase,
    float_keys: list[NestedKey],
    observation_norm: RunningObservationNorm | None,
    observation_keys: Sequence[NestedKey] | None,
    observation_norm_kwargs: Mapping[str, Any] | None,
    training: bool,
) -> RunningObservationNorm:
    spec = env.observation_spec
    if observation_norm is not None:
        keys = observation_norm.in_keys
    elif observation_keys is None:
        keys = float_keys
    else:
        keys = [unravel_key(key) for key in observation_keys]
    if not keys:
        raise ValueError(
            f"there is no observation to normalise: keys {keys} given, floating point entries "
            f"{float_keys} in the observation. Pass normalize_observation=False."
        )
    for key in keys:
        if key not in float_keys:
            raise ValueError(
                f"the key {key!r} cannot be normalised; the floating point observations are "
                f"{float_keys}.{did_you_mean(str(key), map(str, float_keys))}"
            )
    if observation_norm is None:
        return RunningObservationNorm.from_spec(
            spec, keys, frozen=not training, **(observation_norm_kwargs or {})
        )
    for key in keys:
        statistics = observation_norm.get_statistics(key)
        shape, stats_device = spec[key].shape[spec.ndim :], statistics.mean.device
        if statistics.shape != shape or stats_device != spec[key].device:
            raise ValueError(
                f"observation_norm has statistics of shape {tuple(statistics.shape)} on "
                f"{stats_device} for {key!r}; the environment has observations of shape "
                f"{tuple(shape)} on {spec[key].device}."
            )
    return observation_norm.share(frozen=not training)
