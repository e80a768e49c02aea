"""The tasks of Gymnasium, ``-v5``, over a batch of simulations."""

from __future__ import annotations

from torchrl_trudi.envs.mujoco.task import register_task
from torchrl_trudi.envs.mujoco.tasks.ant import Ant
from torchrl_trudi.envs.mujoco.tasks.arms import Pusher, Reacher
from torchrl_trudi.envs.mujoco.tasks.humanoid import Humanoid, HumanoidStandup
from torchrl_trudi.envs.mujoco.tasks.pendulums import InvertedDoublePendulum, InvertedPendulum
from torchrl_trudi.envs.mujoco.tasks.planar import HalfCheetah, Hopper, Swimmer, Walker2d

GYMNASIUM_TASKS = {
    "Ant-v5": Ant,
    "HalfCheetah-v5": HalfCheetah,
    "Hopper-v5": Hopper,
    "Humanoid-v5": Humanoid,
    "HumanoidStandup-v5": HumanoidStandup,
    "InvertedDoublePendulum-v5": InvertedDoublePendulum,
    "InvertedPendulum-v5": InvertedPendulum,
    "Pusher-v5": Pusher,
    "Reacher-v5": Reacher,
    "Swimmer-v5": Swimmer,
    "Walker2d-v5": Walker2d,
}

for _name, _task in GYMNASIUM_TASKS.items():
    register_task(_name, _task)

__all__ = [
    "GYMNASIUM_TASKS",
    "Ant",
    "HalfCheetah",
    "Hopper",
    "Humanoid",
    "HumanoidStandup",
    "InvertedDoublePendulum",
    "InvertedPendulum",
    "Pusher",
    "Reacher",
    "Swimmer",
    "Walker2d",
]
