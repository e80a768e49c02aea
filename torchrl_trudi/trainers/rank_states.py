"""What each rank has of its own, in the checkpoint that rank 0 writes."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from typing import Any

import torch

from torchrl_trudi.trainers.distributed import Ranks

__all__ = ["RankStates"]

_log = logging.getLogger(__name__)


class RankStates:
    """Parts that differ from rank to rank, such as environments and random generators.

    Rank 0 saves its own as the components that a single process has. The others' are gathered in one
    more component, ``"ranks"``, of which each rank restores its own.

    Args:
        ranks (Ranks): the processes.
        parts (Mapping): parts of this rank by name, each with ``state_dict`` and ``load_state_dict``.

    Examples:
        >>> import torch
        >>> from torchrl_trudi.trainers.distributed import Ranks
        >>> from torchrl_trudi.trainers.rank_states import RankStates
        >>> states = RankStates(Ranks("cpu"), {"generator": torch.nn.Linear(1, 1)})
        >>> list(states.components())  # of a single process
        ['generator']
    """

    def __init__(self, ranks: Ranks, parts: Mapping[str, Any]) -> None:
        self._ranks = ranks
        self._parts = dict(parts)
        self._gathered: list[torch.Tensor] = []

    def components(self) -> dict[str, Any]:
        """The components of this rank's checkpoints."""
        if not self._ranks.several:
            return self._parts
        return {**(self._parts if self._ranks.is_main else {}), "ranks": self}

    def gather(self) -> None:
        """Bring the state of all ranks to rank 0, for the next :meth:`state_dict`. All ranks call it."""
        if not self._ranks.several:
            return
        file = io.BytesIO()
        if not self._ranks.is_main:
            torch.save({name: part.state_dict() for name, part in self._parts.items()}, file)
        gathered = self._ranks.gather(
            torch.frombuffer(bytearray(file.getvalue() or b"0"), dtype=torch.uint8)
        )
        self._gathered = gathered[1:]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The serialised states of the other ranks by number, once; none without :meth:`gather`.

        Returns:
            dict: byte tensors.
        """
        gathered, self._gathered = self._gathered, []
        return {str(rank): state for rank, state in enumerate(gathered, 1)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the parts of this rank; rank 0 has its own components.

        Args:
            state (Mapping): what :meth:`state_dict` returned.
        """
        if self._ranks.is_main:
            return
        own = state.get(str(self._ranks.rank))
        if own is None:
            _log.warning(
                "resume: this checkpoint lacks the environments of rank %d: new episodes start there",
                self._ranks.rank,
            )
            return
        file = io.BytesIO(own.cpu().numpy().tobytes())
        loaded = torch.load(file, weights_only=True, map_location="cpu")
        for name, part in self._parts.items():
            part.load_state_dict(loaded[name])
