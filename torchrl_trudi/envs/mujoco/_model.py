"""Compilation of models."""

from __future__ import annotations

import copy
import os

import mujoco

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
