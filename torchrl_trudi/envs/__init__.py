"""Batched environments: construction, observation normalisation, sanity checks."""

from __future__ import annotations

from torchrl_trudi.envs.chain_cast import ChainCast
from torchrl_trudi.envs.cpus import available_cpus
from torchrl_trudi.envs.finite_check import FiniteCheck
from torchrl_trudi.envs.make_env import get_observation_norm, make_env
from torchrl_trudi.envs.mujoco import (
    ModelRandomization,
    MujocoBatchEnv,
    MujocoTask,
    RowGenerators,
    Simulations,
    register_task,
    registered_tasks,
)
from torchrl_trudi.envs.observation_keys import get_observation_keys
from torchrl_trudi.envs.observation_norm import RunningObservationNorm
from torchrl_trudi.envs.quarantine import Quarantine
from torchrl_trudi.envs.running_mean_var import RunningMeanVar

__all__ = [
    "ChainCast",
    "FiniteCheck",
    "ModelRandomization",
    "MujocoBatchEnv",
    "MujocoTask",
    "Quarantine",
    "RowGenerators",
    "RunningMeanVar",
    "RunningObservationNorm",
    "Simulations",
    "available_cpus",
    "get_observation_keys",
    "get_observation_norm",
    "make_env",
    "register_task",
    "registered_tasks",
]
