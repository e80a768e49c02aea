"""A policy with everything around it, on plain tensors."""

from __future__ import annotations

import torch
from tensordict import NestedKey
from torch import nn

from torchrl_trudi.envs import RunningObservationNorm
from torchrl_trudi.modules import ChainModel

__all__ = ["PolicyModule"]


class PolicyModule(nn.Module):
    """From the observation of a task to its action: normalisation, chain, squashing, action box.

    All of it in one module on plain tensors, with an unrolled chain, for ``torch.export`` and ONNX. It holds
    the given model itself; the statistics are frozen copies.

    Args:
        model (ChainModel): the policy.
        sizes (list of (NestedKey, int)): entries of the observation, in the order in which the model
            reads them.

    Keyword Args:
        norm (RunningObservationNorm, optional): normalisation of the entries; those that it does not
            have are passed on as they are. Defaults to ``None``.
        low (torch.Tensor, optional): lower bounds of the task's actions ``[A]``, onto which the
            model's box is mapped. Defaults to ``None``, the model acts in the units of the task.
        high (torch.Tensor, optional): upper bounds; with ``low`` or not at all.

    Raises:
        ValueError: bounds of another size, or one of the two alone.

    Examples:
        >>> import torch
        >>> from torchrl_trudi.export import PolicyModule
        >>> from torchrl_trudi.modules import DenoisingModel, ScoreNetwork
        >>> model = DenoisingModel(ScoreNetwork(2, 3, hidden_size=16), action_dim=2, num_steps=4)
        >>> low, high = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 10.0])
        >>> policy = PolicyModule(model, [("observation", 3)], low=low, high=high)
        >>> policy(torch.zeros(5, 3)).shape, policy(torch.zeros(5, 3), torch.randn(5, 5, 2)).shape
        (torch.Size([5, 2]), torch.Size([5, 2]))
    """

    mean: torch.Tensor
    scale: torch.Tensor
    clip: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    def __init__(
        self,
        model: ChainModel,
        sizes: list[tuple[NestedKey, int]],
        *,
        norm: RunningObservationNorm | None = None,
        low: torch.Tensor | None = None,
        high: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        if (low is None) != (high is None):
            raise ValueError("low and high must be given together.")
        for name, bound in (("low", low), ("high", high)):
            if bound is not None and bound.shape != model.low.shape:
                raise ValueError(
                    f"{name} must have the shape {list(model.low.shape)}, got {list(bound.shape)}."
                )
        self.model = model
        means, scales, clips = [], [], []
        for key, size in sizes:
            # As the transform does it: the statistics are rounded once, before they are used.
            like = model.low
            mean, scale, clip = like.new_zeros(size), like.new_ones(size), torch.inf
            if norm is not None and key in norm.in_keys:
                statistics = norm.get_statistics(key)
                mean, scale = statistics.mean.to(like), statistics.scale.to(like)
                clip = torch.inf if statistics.clip is None else statistics.clip
            means.append(mean)
            scales.append(scale)
            clips.append(like.new_full((size,), clip))
        self.register_buffer("mean", torch.cat(means))
        self.register_buffer("scale", torch.cat(scales))
        self.register_buffer("clip", torch.cat(clips))
        self._clips = bool(self.clip.isfinite().any())
        self._maps = low is not None
        self.register_buffer("low", (model.low if low is None else low).to(model.low).clone())
        self.register_buffer("high", (model.high if high is None else high).to(model.low).clone())

    def forward(self, observation: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Act.

        Args:
            observation (torch.Tensor): concatenated entries ``[B, O]``, in the units of the task.
            noise (torch.Tensor, optional): standard normals ``[B, N + 1, A]``. Defaults to ``None``,
                the noise-free chain.

        Returns:
            torch.Tensor: actions ``[B, A]``, in the units of the task and within its bounds.
        """
        observation = (observation - self.mean) / self.scale
        if self._clips:
            observation = torch.minimum(torch.maximum(observation, -self.clip), self.clip)
        if noise is None:
            chain = self.model.deterministic_chain(observation)
        else:
            chain = self.model.sample(observation, noise)
        action = self.model.squash(chain.latents[..., -1, :])
        if not self._maps:
            return action
        unit = (action - self.model.low) / (self.model.high - self.model.low)
        action = self.low + (self.high - self.low) * unit
        # Rounding of the map can leave the box by one ulp.
        return torch.minimum(torch.maximum(action, self.low), self.high)
