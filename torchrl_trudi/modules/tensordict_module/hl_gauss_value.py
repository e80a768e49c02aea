"""TensorDict value operator over an HL-Gauss critic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModule

from torchrl_trudi.modules._feed_forward import check_feed_forward
from torchrl_trudi.modules.hl_gauss import HLGaussCritic, HLGaussSupport

__all__ = ["HLGaussValueOperator"]


class HLGaussValueOperator(TensorDictModule):
    """Value operator that also writes the histogram and the embeddings of an HL-Gauss critic.

    Like torchrl's :class:`~torchrl.modules.ValueOperator` it writes ``"state_action_value"`` if
    ``"action"`` is among its inputs and ``"state_value"`` otherwise. The inputs may be any
    observations, also privileged ones that the actor does not see.

    Args:
        module (HLGaussCritic): the critic.
        in_keys (sequence of NestedKey, optional): inputs, concatenated in order. Defaults to
            ``["observation", "action"]``.
        out_keys (sequence of NestedKey, optional): keys of value ``[*B, 1]``, logits
            ``[*B, num_bins]``, embedding ``[*B, H]`` and predicted next embedding ``[*B, H]``.
            Defaults to the value key above and ``("critic", "logits")``, ``("critic", "embedding")``,
            ``("critic", "next_embedding")``.

    Raises:
        NotImplementedError: a recurrent network, or recurrent states among the ``in_keys``.
        ValueError: not four ``out_keys`` (three for a critic without predictor).

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_trudi.modules import HLGaussCritic, HLGaussValueOperator
        >>> critic = HLGaussValueOperator(HLGaussCritic(5, -1.0, 1.0, hidden_size=16))
        >>> td = TensorDict({"observation": torch.randn(4, 3), "action": torch.randn(4, 2)}, [4])
        >>> critic(td)["state_action_value"].shape
        torch.Size([4, 1])
    """

    def __init__(
        self,
        module: HLGaussCritic,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        if in_keys is None:
            in_keys = ["observation", "action"]
        if out_keys is None:
            # The leaf name decides: ("agent", "action") is an action too.
            leaves = [key if isinstance(key, str) else key[-1] for key in map(unravel_key, in_keys)]
            value = "state_action_value" if "action" in leaves else "state_value"
            out_keys = [value, ("critic", "logits"), ("critic", "embedding")]
            if module.predictor is not None:
                out_keys.append(("critic", "next_embedding"))
        expected = 3 if module.predictor is None else 4
        if len(out_keys) != expected:
            raise ValueError(f"This critic has {expected} outputs, got out_keys={list(out_keys)}.")
        super().__init__(module, in_keys=list(in_keys), out_keys=list(out_keys))
        check_feed_forward(self, "critic")

    @property
    def support(self) -> HLGaussSupport:
        """The critic's histogram support."""
        return self.module.support

    def value(self, tensordict: TensorDictBase) -> torch.Tensor:
        """The value alone: nothing is written, and the other outputs are not computed.

        Args:
            tensordict (TensorDictBase): holds the ``in_keys``.

        Returns:
            torch.Tensor: ``[*B]``.
        """
        return self.module.value(*(tensordict.get(key) for key in self.in_keys))

    def value_and_embedding(self, tensordict: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor]:
        """Value and embedding: nothing is written, and the prediction is not computed.

        Args:
            tensordict (TensorDictBase): holds the ``in_keys``.

        Returns:
            tuple of torch.Tensor: ``[*B]`` and ``[*B, hidden_size]``.
        """
        return self.module.value_and_embedding(*(tensordict.get(key) for key in self.in_keys))

    @property
    def value_key(self) -> NestedKey:
        """Key of the value, ``[*B, 1]``."""
        return self.out_keys[0]
