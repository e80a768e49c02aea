"""Values as categorical distributions: the HL-Gauss support, loss and critic (arXiv 2403.03950)."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from torchrl_trudi.modules.networks import make_activation, make_norm

__all__ = ["HLGaussCritic", "HLGaussSupport"]

# Weight of the learnable prior logits of the critic, from the published critic (arXiv 2507.11019).
PRIOR_LOGITS_SCALE = 40.9


class HLGaussSupport(nn.Module):
    r"""Histogram support of a scalar value and its Gaussian-smoothed targets (arXiv 2403.03950).

    A scalar :math:`y`, clipped to ``[vmin, vmax]``, becomes the mass that
    :math:`\mathcal N(y, \sigma^2)` puts in each bin, renormalised to the support:

    .. math::
        p_i = \frac{\Phi((e_{i+1} - y) / \sigma) - \Phi((e_i - y) / \sigma)}
                   {\Phi((e_{last} - y) / \sigma) - \Phi((e_0 - y) / \sigma)}, \qquad
        w = \frac{v_{max} - v_{min}}{bins - 1}, \quad \sigma = 0.75\, w

    with bin centres ``linspace(vmin, vmax, bins)`` and edges half a bin around them.

    Args:
        vmin (float): smallest value.
        vmax (float): largest value.
        num_bins (int, optional): number of bins, at least 2. Defaults to ``151``.

    Keyword Args:
        sigma_ratio (float, optional): smoothing width in bins. Defaults to ``0.75``.
        eps (float, optional): added to the two denominators of the error-function form of the
            targets. The published code has ``1e-6`` there, which makes the mass sum to less than 1;
            for comparison with it. Defaults to ``0.0``.
        device (torch.device, optional): device of the buffers.
        dtype (torch.dtype, optional): dtype of the buffers.

    Raises:
        ValueError: ``vmin >= vmax``, bounds not finite, fewer than 2 bins or ``sigma_ratio <= 0``.

    Examples:
        >>> import torch
        >>> from torchrl_trudi.modules import HLGaussSupport
        >>> support = HLGaussSupport(-1.0, 1.0, num_bins=21)
        >>> probs = support.probs(torch.tensor([0.25]))
        >>> probs.shape, probs.sum()
        (torch.Size([1, 21]), tensor(1.))
        >>> torch.testing.assert_close(support.value(probs.log()), torch.tensor([0.25]), atol=1e-3, rtol=0)
    """

    centers: torch.Tensor
    edges: torch.Tensor

    def __init__(
        self,
        vmin: float,
        vmax: float,
        num_bins: int = 151,
        *,
        sigma_ratio: float = 0.75,
        eps: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not (math.isfinite(vmin) and math.isfinite(vmax) and vmin < vmax):
            raise ValueError(f"The support needs finite vmin < vmax, got {vmin} and {vmax}.")
        if num_bins < 2:
            raise ValueError(f"num_bins must be at least 2, got {num_bins}.")
        if not sigma_ratio > 0:
            raise ValueError(f"sigma_ratio must be positive, got {sigma_ratio}.")
        width = (vmax - vmin) / (num_bins - 1)
        self.vmin, self.vmax, self.num_bins = float(vmin), float(vmax), num_bins
        self.sigma = sigma_ratio * width
        self.eps = eps
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.register_buffer("centers", torch.linspace(vmin, vmax, num_bins, **factory))
        self.register_buffer(
            "edges", torch.linspace(vmin - width / 2, vmax + width / 2, num_bins + 1, **factory)
        )

    def probs(self, value: torch.Tensor) -> torch.Tensor:
        """Target distribution of scalars, ``[*B] -> [*B, num_bins]``; out-of-range values are clipped."""
        value = value.clamp(self.vmin, self.vmax).unsqueeze(-1)
        # erf(z / sqrt(2)) = 2 ndtr(z) - 1, hence the factors on eps.
        cdf = torch.special.ndtr((self.edges - value) / (self.sigma + self.eps / math.sqrt(2)))
        return cdf.diff(dim=-1) / (cdf[..., -1:] - cdf[..., :1] + self.eps / 2)

    def value(self, logits: torch.Tensor) -> torch.Tensor:
        """Expected value of a histogram given by its logits, ``[*B, num_bins] -> [*B]``."""
        return (logits.softmax(-1) * self.centers).sum(-1)

    def cross_entropy(self, logits: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Cross-entropy from the targets of ``value`` ``[*B]`` to ``logits`` ``[*B, num_bins]``, ``[*B]``."""
        return -(self.probs(value) * logits.log_softmax(-1)).sum(-1)

    def clip_fraction(self, value: torch.Tensor) -> torch.Tensor:
        """Fraction of the scalars that fall outside the support, a scalar tensor."""
        inside = (value >= self.vmin) & (value <= self.vmax)
        return (~inside).to(self.centers.dtype).mean()

    def extra_repr(self) -> str:
        return f"vmin={self.vmin}, vmax={self.vmax}, num_bins={self.num_bins}"


def _mlp(
    sizes: list[int], norm: str, activation: str, *, activate_input: bool, factory: dict
) -> nn.Sequential:
    """[activation,] then [Linear, norm, activation] up to the last Linear."""
    blocks: list[nn.Module] = [make_activation(activation)] if activate_input else []
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        linear = nn.Linear(fan_in, fan_out, **factory)
        if i == len(sizes) - 2:
            blocks.append(linear)
        else:
            blocks.append(
                nn.Sequential(
                    linear, make_norm(norm, fan_out, **factory), make_activation(activation)
                )
            )
    return nn.Sequential(*blocks)


class HLGaussCritic(nn.Module):
    """Critic with a histogram head and a next-embedding predictor (arXiv 2507.11019).

    Encoder: ``num_layers - 1`` times [Linear, RMSNorm, SiLU], then Linear. Head and predictor: SiLU,
    then the same. The head's logits are added to ``40.9`` times a learnable vector that starts as
    the target distribution of the value 0, so that a fresh critic predicts about 0.

    Args:
        in_dim (int): summed size of the inputs (observations, and the action for a Q function).
        vmin (float): smallest value of the support.
        vmax (float): largest value of the support.

    Keyword Args:
        num_bins (int, optional): number of bins. Defaults to ``151``.
        support_eps (float, optional): ``eps`` of the support. Defaults to ``0.0``.
        hidden_size (int, optional): width of encoder, head and embedding. Defaults to ``512``.
        num_layers (int, optional): Linear layers of each of the three parts. Defaults to ``2``.
        norm (str, optional): ``"rms"``, ``"layer"`` or ``"none"``. Defaults to ``"rms"``.
        activation (str, optional): activation name. Defaults to ``"silu"``.
        predict_embedding (bool, optional): whether there is a next-embedding predictor.
            Defaults to ``True``.
        device (torch.device, optional): device of the parameters.
        dtype (torch.dtype, optional): dtype of the parameters.

    Raises:
        ValueError: sizes below 1, unknown norm or activation, bad support.

    Examples:
        >>> import torch
        >>> from torchrl_trudi.modules import HLGaussCritic
        >>> critic = HLGaussCritic(5, -1.0, 1.0, hidden_size=16)
        >>> value, logits, embedding, prediction = critic(torch.randn(4, 3), torch.randn(4, 2))
        >>> value.shape, logits.shape, embedding.shape, prediction.shape
        (torch.Size([4, 1]), torch.Size([4, 151]), torch.Size([4, 16]), torch.Size([4, 16]))
    """

    def __init__(
        self,
        in_dim: int,
        vmin: float,
        vmax: float,
        *,
        num_bins: int = 151,
        support_eps: float = 0.0,
        hidden_size: int = 512,
        num_layers: int = 2,
        norm: Literal["rms", "layer", "none"] = "rms",
        activation: str = "silu",
        predict_embedding: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (
            ("in_dim", in_dim),
            ("hidden_size", hidden_size),
            ("num_layers", num_layers),
        ):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}.")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        hidden = [hidden_size] * num_layers
        self.in_dim = in_dim
        self.support = HLGaussSupport(vmin, vmax, num_bins, eps=support_eps, **factory)
        self.encoder = _mlp(
            [in_dim, *hidden], norm, activation, activate_input=False, factory=factory
        )
        self.head = _mlp(
            [*hidden, num_bins], norm, activation, activate_input=True, factory=factory
        )
        self.predictor = (
            _mlp([*hidden, hidden_size], norm, activation, activate_input=True, factory=factory)
            if predict_embedding
            else None
        )
        zero = torch.zeros((), device=device, dtype=self.support.centers.dtype)
        self.prior_logits = nn.Parameter(self.support.probs(zero))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the prior logits to their initial value; the layers reset themselves."""
        self.prior_logits.copy_(self.support.probs(torch.zeros_like(self.support.centers[0])))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Evaluate the critic.

        Args:
            *inputs (torch.Tensor): tensors ``[*B, D_k]``, concatenated in order.

        Returns:
            tuple of torch.Tensor: value ``[*B, 1]``, logits ``[*B, num_bins]``, embedding
            ``[*B, hidden_size]`` and, with a predictor, predicted next embedding
            ``[*B, hidden_size]``.

        Raises:
            ValueError: the inputs' summed size is not ``in_dim``.
        """
        embedding, logits = self._evaluate(inputs)
        out = (self.support.value(logits).unsqueeze(-1), logits, embedding)
        if self.predictor is None:
            return out
        return (*out, self.predictor(embedding).to(logits.dtype))

    def value(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The value alone, without the predictor.

        Args:
            *inputs (torch.Tensor): see :meth:`forward`.

        Returns:
            torch.Tensor: ``[*B]``.
        """
        return self.value_and_embedding(*inputs)[0]

    def value_and_embedding(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Value and embedding, without the predictor.

        Args:
            *inputs (torch.Tensor): see :meth:`forward`.

        Returns:
            tuple of torch.Tensor: ``[*B]`` and ``[*B, hidden_size]``.
        """
        embedding, logits = self._evaluate(inputs)
        return self.support.value(logits), embedding

    def _evaluate(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding and logits."""
        # An action comes in the type of its spec, which may be another one than that of the network.
        dtype = self.prior_logits.dtype
        inputs = tuple(x.to(dtype) if x.dtype == torch.float64 != dtype else x for x in inputs)
        features = torch.cat(inputs, -1) if len(inputs) > 1 else inputs[0]
        if features.shape[-1] != self.in_dim:
            raise ValueError(
                f"The critic was built for inputs of summed size {self.in_dim}, got "
                f"{[tuple(x.shape) for x in inputs]}."
            )
        embedding = self.encoder(features)
        # Under autocast the layers answer in a short type: histograms and errors are not taken in it.
        logits = self.head(embedding).to(features.dtype) + PRIOR_LOGITS_SCALE * self.prior_logits
        return embedding.to(logits.dtype), logits
