"""What is asked of an action before anything is stepped."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDictBase

from torchrl_trudi.envs._validation import list_rows


def read_action(tensordict: TensorDictBase, shape: torch.Size) -> np.ndarray:
    """The action of a tensordict.

    Args:
        tensordict (TensorDictBase): with an ``"action"``.
        shape (torch.Size): its shape, ``[num_envs, nu]``.

    Returns:
        numpy.ndarray: the action, float32, read-only.

    Raises:
        KeyError: if there is none.
        ValueError: if it has another shape or dtype, or is not finite.
    """
    action = tensordict.get("action", None)
    if action is None:
        raise KeyError("the tensordict has no 'action'.")
    if action.shape != shape or action.dtype != torch.float32:
        raise ValueError(
            f"the action has the shape {tuple(action.shape)} and dtype {action.dtype}; needed "
            f"are {tuple(shape)} and torch.float32."
        )
    # Contiguous, because the order in which numpy sums a row follows its layout in memory.
    array = np.ascontiguousarray(action.detach().cpu().numpy())
    # A sum is finite only if all its terms are, and much cheaper than isfinite() of each.
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.isfinite(array.sum())
    if not finite:
        rows = np.flatnonzero(~np.isfinite(array).all(1))
        if len(rows):
            raise ValueError(
                f"the action is not finite in {len(rows)} of {len(array)} rows: "
                f"{list_rows(rows.tolist())}. Nothing was stepped."
            )
    array = array.view()
    array.flags.writeable = False  # the task only reads it
    return array
