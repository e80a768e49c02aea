"""A refusal of recurrent networks."""

from __future__ import annotations

from tensordict import unravel_key
from torch import nn
from torchrl.modules import GRUModule, LSTMModule

__all__ = ["check_feed_forward"]


def check_feed_forward(network: nn.Module, role: str) -> None:
    """Refuses a network that carries a state from one step to the next.

    Minibatches hold single transitions in random order, chains are scored again on them and next
    states are evaluated as they come: none of that has a hidden state at hand, and torchrl's
    recurrent modules would start from zeros without a word.

    A plain ``nn.GRU`` over a window of observations carries nothing between steps, and is accepted.

    Args:
        network (nn.Module): the network; if it has ``in_keys``, they are looked at as well.
        role (str): how the message names it.

    Raises:
        NotImplementedError: an :class:`~torchrl.modules.LSTMModule` or
            :class:`~torchrl.modules.GRUModule` inside, or ``is_init`` or a recurrent state among
            the ``in_keys``.
    """
    found = [type(m).__name__ for m in network.modules() if isinstance(m, (LSTMModule, GRUModule))]
    for key in getattr(network, "in_keys", None) or []:
        key = unravel_key(key)
        leaf = key if isinstance(key, str) else key[-1]
        if leaf == "is_init" or leaf.startswith("recurrent_state"):
            found.append(f"the input {key!r}")
    if found:
        raise NotImplementedError(
            f"Recurrent networks are not supported: the {role} has {', '.join(dict.fromkeys(found))}. "
            "Transitions are shuffled, and nothing keeps the hidden states. Stack the last "
            "observations instead (gymnasium.wrappers.FrameStackObservation, or torchrl's CatFrames)."
        )
