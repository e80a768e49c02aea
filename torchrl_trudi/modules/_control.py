"""The control of a chain, with what does not depend on the latent computed once."""

from __future__ import annotations

import copy
from typing import Any

import torch

from torchrl_trudi.modules.networks import num_rows

# Rows of the network's input that one call takes on the CPU: the activations of more do not stay in
# the cache between one layer and the next.
_BLOCK_ROWS = 2048


class ChainControl:
    """The control ``u(x, s, n)`` of a network at fixed observations and steps.

    Args:
        network: a score network. One with the three ``project_observation`` / ``project_steps`` /
            ``forward_projected`` methods of :class:`~torchrl_trudi.modules.ScoreNetwork` sees the
            observation and the steps once, and with its ``shared_weights`` cuts its weights once.
        observation (torch.Tensor): ``[*B, O]``.
        steps (torch.Tensor): step indices ``[N]``.
    """

    def __init__(self, network: Any, observation: torch.Tensor, steps: torch.Tensor) -> None:
        self._network = network
        self._projects = hasattr(network, "forward_projected")
        self._weights: tuple[tuple[torch.Tensor, ...], ...] = ()
        if hasattr(network, "shared_weights"):
            self._weights = (network.shared_weights(num_rows(observation)),)
        self._observation = (
            network.project_observation(observation) if self._projects else observation
        )
        self._steps = network.project_steps(steps) if self._projects else steps

    def take(self, rows: torch.Tensor | slice) -> ChainControl:
        """The control of some of the observations."""
        part = copy.copy(self)
        part._observation = self._observation[rows]
        return part

    def at(self, latent: torch.Tensor, n: int) -> torch.Tensor:
        """At one step of all states: latent ``[*B, A] -> [*B, A]``."""
        step = self._steps[n]
        if self._projects:
            control = self._network.forward_projected(
                latent, self._observation, step, *self._weights
            )
        else:
            control = self._network(latent, self._observation, step)
        # Under autocast the network answers in a short type; the chain stays in its own.
        return control.to(latent.dtype)

    def along(
        self, latents: torch.Tensor, steps: slice | torch.Tensor = slice(None)
    ) -> torch.Tensor:
        """At several steps of each state in one call.

        Args:
            latents (torch.Tensor): ``[*B, K, A]``.
            steps (slice or torch.Tensor): which steps these are: a slice of ``K`` of them, or
                indices ``[*B, K]``. Defaults to all.

        Returns:
            torch.Tensor: ``[*B, K, A]``.
        """
        size = self._block_size(latents)
        if size is None:
            return self._along(latents, steps)
        blocks = []
        for start in range(0, latents.shape[0], size):
            rows = slice(start, start + size)
            some = steps if isinstance(steps, slice) else steps[rows]
            blocks.append(self.take(rows)._along(latents[rows], some))
        return torch.cat(blocks)

    def _block_size(self, latents: torch.Tensor) -> int | None:
        """States of a block, ``None`` where the whole batch is one call."""
        if (
            latents.ndim != 3
            or self._observation.shape[:-1] != latents.shape[:-2]  # broadcast
            or latents.device.type != "cpu"
            or torch.compiler.is_compiling()
            or latents.shape[0] * latents.shape[1] <= _BLOCK_ROWS
        ):
            return None
        return max(1, _BLOCK_ROWS // latents.shape[1])

    def _along(self, latents: torch.Tensor, steps: slice | torch.Tensor) -> torch.Tensor:
        step = self._steps[steps]
        observation = self._observation.unsqueeze(-2)
        if self._projects:
            control = self._network.forward_projected(latents, observation, step, *self._weights)
        else:
            shape = latents.shape[:-1]
            observation = observation.expand(*shape, observation.shape[-1])
            control = self._network(latents, observation, step.expand(shape))
        return control.to(latents.dtype)
