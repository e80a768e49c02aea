"""MuJoCo's own messages, kept out of the working directory."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator

import mujoco


def _ignore(message: str) -> None:
    """A warning handler that drops the message: the counters of each simulation are read instead."""


_lock = threading.Lock()
_inside = 0  # how many threads are inside silent_physics() at the moment


def _after_fork() -> None:
    global _lock, _inside
    _lock, _inside = threading.Lock(), 0  # the other threads are not here
    if mujoco.get_mju_user_warning() is _ignore:
        mujoco.set_mju_user_warning(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def silent_physics() -> Iterator[None]:
    """Keeps warnings of the physics from being printed and from being written to a file.

    Without a handler MuJoCo prints the first warning of each kind and appends it to
    ``MUJOCO_LOG.TXT`` in the working directory. Inside this context it does neither; the warning
    counters still count. A handler installed by the user stays in place. Costs about 0.5 µs.
    """
    global _inside
    # The handler is that of the process: the first thread that comes installs it, and the last one
    # that leaves takes it away.
    with _lock:
        _inside += 1
        if mujoco.get_mju_user_warning() is None:
            mujoco.set_mju_user_warning(_ignore)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and mujoco.get_mju_user_warning() is _ignore:
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
