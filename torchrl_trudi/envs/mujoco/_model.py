"""Compilation of models, and what is asked of them."""

from __future__ import annotations

import copy
import os

import mujoco
import numpy as np

from torchrl_trudi.envs.mujoco._logging import silent_compilation, silent_physics


def load_model(source: str | os.PathLike | mujoco.MjSpec | mujoco.MjModel) -> mujoco.MjModel:
    """Compiles a model.

    Args:
        source (str, path, mujoco.MjSpec or mujoco.MjModel): an MJCF file, a specification, or a
            model that is compiled already, which is copied.

    Returns:
        mujoco.MjModel: the model, nobody else's.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file or the specification does not compile; the message is MuJoCo's.
        TypeError: if ``source`` is something else.
    """
    if isinstance(source, mujoco.MjModel):
        return copy.copy(source)
    if not isinstance(source, (str, os.PathLike, mujoco.MjSpec)):
        raise TypeError(
            "the model must be the path of an MJCF file, a mujoco.MjSpec or a mujoco.MjModel, got "
            f"{source!r} of type {type(source).__name__}."
        )
    name = "the specification"
    try:
        # By way of a specification, whose warnings are Python's: one of them can be left out.
        with silent_compilation(), silent_physics():
            if not isinstance(source, mujoco.MjSpec):
                name = os.path.expanduser(os.fspath(source))
                if name.lstrip().startswith("<"):
                    raise TypeError(
                        "the model is a text; mujoco.MjSpec.from_string(text) makes a specification."
                    )
                if not os.path.isfile(name):
                    raise FileNotFoundError(f"there is no MJCF file {name!r}.")
                source = mujoco.MjSpec.from_file(name)
            return source.compile()
    except ValueError as err:
        raise ValueError(f"MuJoCo cannot compile {name}: {err}") from err


def check_model(model: mujoco.MjModel) -> None:
    """Checks that an environment can be made of a model.

    Args:
        model (mujoco.MjModel): the model.

    Raises:
        ValueError: if it sleeps, has no timestep, or no actuators with a range.
    """
    bounds = model.actuator_ctrlrange
    sleep = getattr(mujoco.mjtEnableBit, "mjENBL_SLEEP", 0)
    if model.opt.enableflags & int(sleep):
        raise ValueError(
            "the model enables sleep, whose bookkeeping is not part of MuJoCo's state: states "
            'could not be restored. Disable it: <option><flag sleep="disable"/></option>.'
        )
    timestep = model.opt.timestep
    if not (np.isfinite(timestep) and timestep > 0):
        raise ValueError(f"the timestep of the model must be positive, got {timestep}.")
    if model.nu == 0:
        raise ValueError("the model has no actuators, so that there would be no action.")
    if not model.actuator_ctrllimited.all() or not (bounds[:, 0] < bounds[:, 1]).all():
        raise ValueError(
            "every actuator of the model needs a ctrlrange: it is the range of the action. "
            f"The ranges are {bounds.tolist()}."
        )
