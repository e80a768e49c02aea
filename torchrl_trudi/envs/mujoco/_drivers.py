"""The drivers by name."""

from __future__ import annotations

from typing import Any

import mujoco

from torchrl_trudi.envs.mujoco._batch_driver import BatchDriver, mujoco_batch
from torchrl_trudi.envs.mujoco._physics_driver import PhysicsDriver
from torchrl_trudi.envs.mujoco._thread_driver import ThreadDriver

DRIVERS: dict[str, type[PhysicsDriver]] = {"batch": BatchDriver, "threads": ThreadDriver}


def make_driver(name: str, *args: Any, **kwargs: Any) -> PhysicsDriver:
    """Makes a driver.

    Args:
        name (str): ``"batch"``, ``"threads"``, or ``"auto"``, the first one there is.
        *args: arguments of :class:`PhysicsDriver`.
        **kwargs: arguments of :class:`PhysicsDriver`.

    Returns:
        PhysicsDriver: the driver.

    Raises:
        RuntimeError: if MuJoCo is too old for the driver.
    """
    if name == "auto":
        name = "threads" if mujoco_batch is None else "batch"
    if name == "batch" and mujoco_batch is None:
        raise RuntimeError(
            f"driver='batch' needs mujoco.batch, of MuJoCo 3.17; this is {mujoco.__version__}. "
            "driver='threads' works with any."
        )
    return DRIVERS[name](*args, **kwargs)
