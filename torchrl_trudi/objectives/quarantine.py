"""Returns and batches without the steps that an environment has marked as faulty."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key

__all__ = ["cut_at_quarantined", "replace_quarantined"]

QUARANTINED_KEY: NestedKey = ("next", "quarantined")


def before_marked(marked: torch.Tensor, time_dim: int) -> torch.Tensor:
    """Whether the step after each is marked; the last has none: ``[*B, T, 1]``."""
    time_dim = time_dim % marked.ndim
    following = marked.roll(-1, time_dim)
    following.select(time_dim, -1).fill_(False)
    return following


def cut_at_quarantined(
    rollout: TensorDictBase,
    *,
    key: NestedKey = QUARANTINED_KEY,
    time_dim: int = -1,
) -> TensorDictBase:
    """A rollout whose returns do not look at quarantined steps, for any value estimator.

    The step before a marked one (:class:`~torchrl_trudi.envs.Quarantine`) is truncated: it bootstraps from
    the state in which the marked step was taken, which is sound, and not from the return of that step,
    which is not. :class:`~torchrl_trudi.objectives.SoftTDLambdaEstimator` does so by itself; GAE and its
    relatives get it from here. The marked steps have returns of their own, which mean nothing:
    :func:`replace_quarantined` leaves them out.

    Args:
        rollout (TensorDictBase): ``[*B, T]``.

    Keyword Args:
        key (NestedKey, optional): the mark, boolean ``[*B, T, 1]``. Defaults to
            ``("next", "quarantined")``. Without such an entry the rollout is returned as it is.
        time_dim (int, optional): the time dimension of the rollout. Defaults to the last.

    Returns:
        TensorDictBase: the input, or a copy that shares all entries but ``("next", "done")`` and
        ``("next", "truncated")``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_trudi.objectives import cut_at_quarantined
        >>> ends = torch.tensor([False, False, True, False]).reshape(1, 4, 1)
        >>> data = TensorDict({"next": {"done": ends, "quarantined": ends.clone()}}, [1, 4])
        >>> cut_at_quarantined(data)["next", "done"].flatten()
        tensor([False,  True,  True, False])
    """
    marked = rollout.get(unravel_key(key), None)
    if marked is None:
        return rollout
    dims = rollout.batch_dims
    before = before_marked(marked, time_dim % dims)
    cut = rollout.copy()
    following = cut.get("next").copy()
    done = following.get("done")
    following.set("done", done | before)
    truncated = following.get("truncated", None)
    # An end that was there already keeps its kind.
    following.set(
        "truncated", (before & ~done) if truncated is None else truncated | before & ~done
    )
    return cut.set("next", following)


def replace_quarantined(
    transitions: TensorDictBase, *, key: NestedKey = QUARANTINED_KEY
) -> TensorDictBase:
    """A batch of transitions without the quarantined ones, of the same size.

    Each marked transition (:class:`~torchrl_trudi.envs.Quarantine`) is replaced by another one of the batch,
    drawn at random: minibatches, compiled losses and CUDA graphs keep their sizes, and the rows that stand in
    count twice. Without marked transitions nothing is drawn and the batch is returned as it is.

    Args:
        transitions (TensorDictBase): ``[B]``.

    Keyword Args:
        key (NestedKey, optional): the mark, boolean ``[B, 1]``. Defaults to
            ``("next", "quarantined")``. It is left out of the result.

    Returns:
        TensorDictBase: ``[B]``.

    Raises:
        ValueError: a batch of more than one dimension; no transition that is not marked.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_trudi.objectives import replace_quarantined
        >>> marks = torch.tensor([[False], [True]])
        >>> data = TensorDict({"reward": torch.arange(2), "next": {"quarantined": marks}}, [2])
        >>> replace_quarantined(data)["reward"]
        tensor([0, 0])
    """
    key = unravel_key(key)
    marked = transitions.get(key, None)
    if marked is None:
        return transitions
    if transitions.batch_dims != 1:
        raise ValueError(
            f"The transitions must have one batch dimension, got {tuple(transitions.batch_size)}: "
            "flatten the rollout first."
        )
    transitions = transitions.exclude(key)
    marked = marked.reshape(-1)
    if not marked.any():
        return transitions
    sound = (~marked).nonzero().squeeze(-1)
    if not len(sound):
        raise ValueError(f"All {len(marked)} transitions of the batch are quarantined.")
    rows = torch.arange(len(marked), device=marked.device)
    rows[marked] = sound[torch.randint(len(sound), (len(marked) - len(sound),)).to(sound.device)]
    return transitions[rows]
