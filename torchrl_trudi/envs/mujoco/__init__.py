"""Batched MuJoCo environments."""

from __future__ import annotations

from torchrl_trudi.envs.mujoco import tasks as tasks  # registers them
from torchrl_trudi.envs.mujoco._generators import RowGenerators
from torchrl_trudi.envs.mujoco.env import MujocoBatchEnv
from torchrl_trudi.envs.mujoco.randomization import ModelRandomization
from torchrl_trudi.envs.mujoco.simulations import Simulations
from torchrl_trudi.envs.mujoco.task import MujocoTask, register_task, registered_tasks

__all__ = [
    "ModelRandomization",
    "MujocoBatchEnv",
    "MujocoTask",
    "RowGenerators",
    "Simulations",
    "register_task",
    "registered_tasks",
]
