"""Argument checks of the environment constructors."""

from __future__ import annotations

import difflib
import importlib
import math
import operator
from collections.abc import Iterable
from typing import Any

# Entries that TorchRL or the transforms of `make_env` write next to the observations: a
# dictionary observation of the same name would be overwritten without notice.
RESERVED_KEYS = frozenset(
    {"action", "reward", "done", "terminated", "truncated", "next", "_reset", "_step"}
    | {"episode_reward", "step_count", "unstable", "quarantined", "randomization"}
)


def did_you_mean(given: str, accepted: Iterable[str]) -> str:
    """A sentence with the accepted names closest to ``given``, or an empty string.

    Args:
        given (str): the name that was not found.
        accepted (Iterable[str]): the names there are.

    Returns:
        str: the sentence, with a leading space.
    """
    near = difflib.get_close_matches(given, list(accepted), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def import_task(name: Any) -> str:
    """The name of a task without its module, which is imported.

    Args:
        name (str): ``"Task-v0"``, or ``"module:Task-v0"``.

    Returns:
        str: ``"Task-v0"``.

    Raises:
        TypeError: if ``name`` is not a string.
        ValueError: if there is no such module.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be the name of a task, got {name!r}.")
    module, _, task = name.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as err:
            raise ValueError(f"the module of the task {name!r} cannot be imported: {err}.") from err
    return task


def list_rows(rows: list[int]) -> str:
    """Row numbers for a message, the first ten of them.

    Args:
        rows (list of int): the rows.

    Returns:
        str: the numbers, separated by commas.
    """
    return ", ".join(map(str, rows[:10])) + (", ..." if len(rows) > 10 else "")


def check_choice(argument: str, given: Any, accepted: Iterable[str]) -> str:
    """Checks that an argument is one of a few names.

    Args:
        argument (str): the name of the argument, for the message.
        given (Any): what was given.
        accepted (Iterable[str]): what is accepted.

    Returns:
        str: ``given``.

    Raises:
        ValueError: if it is not accepted.
    """
    accepted = list(accepted)
    if given not in accepted:
        hint = did_you_mean(given, accepted) if isinstance(given, str) else ""
        raise ValueError(f"{argument}={given!r} is not one of {accepted}.{hint}")
    return given


def check_int(argument: str, given: Any, minimum: int) -> int:
    """Checks that an argument is an integer and large enough.

    Args:
        argument (str): the name of the argument, for the message.
        given (Any): what was given.
        minimum (int): the smallest value accepted.

    Returns:
        int: ``given`` as an ``int``.

    Raises:
        TypeError: if it is not an integer (a ``bool`` is not).
        ValueError: if it is too small.
    """
    message = f"{argument} must be an integer of at least {minimum}, got {given!r}"
    try:
        value = operator.index(given)
    except TypeError:
        raise TypeError(f"{message} of type {type(given).__name__}.") from None
    if isinstance(given, bool):
        raise TypeError(f"{message}, a bool.")
    if value < minimum:
        raise ValueError(f"{message}.")
    return value


def check_positive(argument: str, given: Any) -> float:
    """Checks that an argument is a finite number above zero.

    Args:
        argument (str): the name of the argument, for the message.
        given (Any): what was given.

    Returns:
        float: ``given`` as a ``float``.

    Raises:
        TypeError: if it is not a number.
        ValueError: if it is zero, negative, infinite or NaN.
    """
    message = f"{argument} must be a finite number above 0, got {given!r}"
    try:
        value = float(given)
    except (TypeError, ValueError):
        raise TypeError(f"{message} of type {type(given).__name__}.") from None
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{message}.")
    return value
