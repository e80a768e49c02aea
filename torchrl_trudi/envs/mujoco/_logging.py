"""MuJoCo's own messages, kept out of the working directory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import mujoco


def _ignore(message: str) -> None:
    """A warning handler that drops the message: the counters of each simulation are read instead."""


@contextlib.contextmanager
def silent_physics() -> Iterator[None]:
    """Keeps warnings of the physics from being printed and from being written to a file.

    Without a handler MuJoCo prints the first warning of each kind and appends it to
    ``MUJOCO_LOG.TXT`` in the working directory. Inside this context it does neither; the warning
    counters still count. A handler installed by the user stays in place. Costs about 0.5 µs.
    """
    if mujoco.get_mju_user_warning() is not None:
        yield
        return
    mujoco.set_mju_user_warning(_ignore)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(None)


@contextlib.contextmanager
def silent_compilation() -> Iterator[None]:
    """Silences the one deprecation that the Gymnasium models are known for.

    MuJoCo 4 warns about ``settotalmass``, an attribute of Gymnasium's ``half_cheetah.xml``, which
    is not the user's to mend. Other warnings of the compiler pass.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="compiler attribute 'settotalmass'")
        yield
