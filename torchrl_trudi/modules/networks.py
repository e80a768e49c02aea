"""Networks of the policies."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from tensordict.nn import NormalParamExtractor
from torch import nn

__all__ = ["GaussianNetwork", "ScoreNetwork", "StepEmbedding"]

NormName = Literal["layer", "rms", "none"]
ActivationName = Literal["gelu", "silu", "relu", "tanh", "elu", "mish"]
ACTIVATIONS: dict[str, type[nn.Module]] = {
    # nn.GELU() is the exact erf form, which the published score network uses.
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "elu": nn.ELU,
    "mish": nn.Mish,
}


def make_activation(name: str) -> nn.Module:
    """Activation module by name (one of ``ACTIVATIONS``); unknown names raise ValueError."""
    if name not in ACTIVATIONS:
        raise ValueError(f"Unknown activation {name!r}; choose one of {sorted(ACTIVATIONS)}.")
    return ACTIVATIONS[name]()


def make_norm(name: str, width: int, **factory) -> nn.Module:
    """Normalisation module by name: ``"layer"``, ``"rms"`` or ``"none"``."""
    if name == "layer":
        return nn.LayerNorm(width, **factory)
    if name == "rms":
        return nn.RMSNorm(width, **factory)
    if name == "none":
        return nn.Identity()
    raise ValueError(f"Unknown norm {name!r}; choose 'layer', 'rms' or 'none'.")


def _check_sizes(num_layers: int, **sizes: int) -> None:
    if num_layers < 2:
        raise ValueError(f"num_layers must be at least 2, got {num_layers}.")
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")


def _hidden_layers(
    num_layers: int, hidden_size: int, norm: str, activation: str, factory: dict[str, Any]
) -> nn.Sequential:
    """What follows the first Linear layer of ``num_layers`` and precedes the last."""
    layers: list[nn.Module] = [make_activation(activation)]
    for _ in range(num_layers - 2):
        layers += [
            nn.Linear(hidden_size, hidden_size, **factory),
            make_norm(norm, hidden_size, **factory),
            make_activation(activation),
        ]
    return nn.Sequential(*layers)


class _OutputLayer(nn.Linear):
    """A Linear layer without bias at first, and ``gain`` times the default initial weights."""

    def __init__(
        self, hidden_size: int, out_dim: int, gain: float, factory: dict[str, Any]
    ) -> None:
        self.gain = gain
        super().__init__(hidden_size, out_dim, **factory)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.weight.mul_(self.gain)
        self.bias.zero_()


def num_rows(values: torch.Tensor) -> int:
    """Rows of a batch ``[*B, X]``, the size of ``*B``; 1 while a graph is exported.

    An exported graph serves batches of every size: no choice in it may depend on one.
    """
    return 1 if torch.compiler.is_exporting() else values.shape[:-1].numel()


def _widened(layer: nn.Linear, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of a layer with few outputs, with rows of zeros where that is faster."""
    missing = -layer.out_features % 8
    if missing and layer.weight.device.type == "cpu" and rows >= 128:
        # A product with a multiple of 8 columns is a third faster, columns of zeros included.
        return F.pad(layer.weight, (0, 0, 0, missing)), F.pad(layer.bias, (0, missing))
    return layer.weight, layer.bias


class StepEmbedding(nn.Module):
    r"""Embedding of the denoising step index.

    Fourier features :math:`[\sin(w n + \psi), \cos(w n + \psi)]` of the raw index :math:`n` with
    fixed frequencies :math:`w` and learned phases :math:`\psi` (zero at initialisation), followed by
    Linear, GELU, Linear.

    Args:
        num_frequencies (int, optional): number of frequencies and hidden width. Defaults to ``32``.
        out_dim (int, optional): embedding size. Defaults to ``16``.
        activation (str, optional): activation name. Defaults to ``"gelu"``.

    Keyword Args:
        device (torch.device, optional): device of the parameters.
        dtype (torch.dtype, optional): dtype of the parameters.
    """

    frequencies: torch.Tensor

    def __init__(
        self,
        num_frequencies: int = 32,
        out_dim: int = 16,
        activation: str = "gelu",
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.register_buffer("frequencies", torch.linspace(0.1, 100.0, num_frequencies, **factory))
        self.phase = nn.Parameter(torch.zeros(num_frequencies, **factory))
        self.mlp = nn.Sequential(
            nn.Linear(2 * num_frequencies, num_frequencies, **factory),
            make_activation(activation),
            nn.Linear(num_frequencies, out_dim, **factory),
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the phases to zero, as they start; the layers reset themselves."""
        self.phase.zero_()

    def forward(self, step: torch.Tensor) -> torch.Tensor:
        """Embed step indices ``[*S]`` into ``[*S, out_dim]``."""
        angle = step.to(self.phase.dtype).unsqueeze(-1) * self.frequencies + self.phase
        return self.mlp(torch.cat([angle.sin(), angle.cos()], dim=-1))


class ScoreNetwork(nn.Module):
    r"""Control :math:`u_\theta(x, s, n)` of the denoising chain (arXiv 2606.15260).

    An MLP on ``[latent, observation, step embedding]``: Linear, activation, then ``num_layers - 2``
    times [Linear, norm, activation], then Linear. The output layer starts at 1e-8 times the default
    initialisation, so that a fresh policy is ``tanh`` of the prior.

    The first layer is linear in its three inputs separately. :meth:`project_observation` and
    :meth:`project_steps` return its observation and step parts, which are the same for all steps of a
    chain and for all samples; :meth:`forward_projected` finishes the evaluation. A chain of ``N``
    steps so pays for the observation once. Parameters and ``state_dict`` are those of the plain
    network on the concatenated input.

    Args:
        action_dim (int): latent (action) size ``A``.
        obs_dim (int): observation size ``O``.

    Keyword Args:
        num_layers (int, optional): number of Linear layers including the output, at least 2.
            Defaults to ``3``.
        hidden_size (int, optional): width. Defaults to ``512``.
        norm (str, optional): ``"layer"``, ``"rms"`` or ``"none"``, on the hidden layers after the
            first. Defaults to ``"layer"``.
        activation (str, optional): ``"gelu"`` (exact), ``"silu"``, ``"relu"``, ``"tanh"``, ``"elu"``
            or ``"mish"``. Defaults to ``"gelu"``.
        num_frequencies (int, optional): Fourier frequencies of the step embedding. Defaults to ``32``.
        step_dim (int, optional): size of the step embedding. Defaults to ``16``.
        output_gain (float, optional): factor on the output layer's initial weights.
            Defaults to ``1e-8``.
        output_clip (float, optional): the output is clamped to ``[-output_clip, output_clip]``;
            ``None`` for no clamp. Defaults to ``1e4``.
        device (torch.device, optional): device of the parameters.
        dtype (torch.dtype, optional): dtype of the parameters.

    Raises:
        ValueError: sizes below 1, ``num_layers < 2``, unknown norm or activation.

    Examples:
        >>> import torch
        >>> from torchrl_trudi.modules import ScoreNetwork
        >>> net = ScoreNetwork(action_dim=2, obs_dim=3, hidden_size=16)
        >>> net(torch.randn(5, 2), torch.randn(5, 3), torch.tensor(0)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        action_dim: int,
        obs_dim: int,
        *,
        num_layers: int = 3,
        hidden_size: int = 512,
        norm: NormName = "layer",
        activation: ActivationName = "gelu",
        num_frequencies: int = 32,
        step_dim: int = 16,
        output_gain: float = 1e-8,
        output_clip: float | None = 1e4,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(num_layers, action_dim=action_dim, obs_dim=obs_dim, hidden_size=hidden_size)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.action_dim = action_dim
        self.obs_dim = obs_dim
        self.output_clip = output_clip
        self.step_embedding = StepEmbedding(num_frequencies, step_dim, **factory)
        self.input = nn.Linear(action_dim + obs_dim + step_dim, hidden_size, **factory)
        self.hidden = _hidden_layers(num_layers, hidden_size, norm, activation, factory)
        self.output = _OutputLayer(hidden_size, action_dim, output_gain, factory)

    def project_observation(self, observation: torch.Tensor) -> torch.Tensor:
        """Observation part of the first layer, ``[*B, O] -> [*B, hidden_size]``."""
        if observation.shape[-1] != self.obs_dim:
            raise ValueError(
                f"The score network was built for observations of size {self.obs_dim}, "
                f"got {observation.shape[-1]} (shape {tuple(observation.shape)})."
            )
        start = self.action_dim
        return F.linear(observation, self.input.weight[:, start : start + self.obs_dim])

    def project_steps(self, step: torch.Tensor) -> torch.Tensor:
        """Step part and bias of the first layer, ``[*S] -> [*S, hidden_size]``."""
        weight = self.input.weight[:, self.action_dim + self.obs_dim :]
        return F.linear(self.step_embedding(step), weight, self.input.bias)

    def shared_weights(self, num_rows: int) -> tuple[torch.Tensor, ...]:
        """The parts of the weights that all steps of a chain use, cut out once.

        Args:
            num_rows (int): rows of the latents that one call takes.

        Returns:
            tuple of torch.Tensor: the latent's part of the first layer, transposed, and weight and
            bias of the last.
        """
        latent = self.input.weight[:, : self.action_dim].t()
        return (latent, *_widened(self.output, num_rows))

    def forward_projected(
        self,
        latent: torch.Tensor,
        observation_part: torch.Tensor,
        step_part: torch.Tensor,
        weights: tuple[torch.Tensor, ...] | None = None,
    ) -> torch.Tensor:
        """Control from a latent and the projected parts.

        Args:
            latent (torch.Tensor): ``[*B, A]``.
            observation_part (torch.Tensor): of :meth:`project_observation`, broadcast.
            step_part (torch.Tensor): of :meth:`project_steps`, broadcast.
            weights (tuple, optional): of :meth:`shared_weights`. Defaults to ``None``, cut out here.

        Returns:
            torch.Tensor: ``[*B, A]``.
        """
        # The sum of the parts is what the matrix product is added to: one pass over it less.
        base = observation_part + step_part
        shape = base.shape[:-1]
        if shape != latent.shape[:-1]:
            shape = torch.broadcast_shapes(shape, latent.shape[:-1])
            base, latent = base.expand(*shape, -1), latent.expand(*shape, -1)
        if weights is None:
            weights = self.shared_weights(num_rows(base))
        first, last, bias = weights
        hidden = torch.addmm(
            base.reshape(-1, base.shape[-1]), latent.reshape(-1, self.action_dim), first
        )
        del base  # as large as each layer's output
        out = F.linear(self.hidden(hidden), last, bias)[:, : self.action_dim]
        out = out.view(*shape, self.action_dim)
        if self.output_clip is None:
            return out
        return out.clamp(-self.output_clip, self.output_clip)

    def forward(
        self, latent: torch.Tensor, observation: torch.Tensor, step: torch.Tensor
    ) -> torch.Tensor:
        """Control at a denoising step.

        Args:
            latent (torch.Tensor): latent of shape ``[*B, A]``.
            observation (torch.Tensor): (normalised) observation of shape ``[*B, O]``.
            step (torch.Tensor): raw step index, integer or float, broadcastable to ``[*B]``.

        Returns:
            torch.Tensor: control of shape ``[*B, A]``.
        """
        return self.forward_projected(
            latent, self.project_observation(observation), self.project_steps(step)
        )


class GaussianNetwork(nn.Module):
    r"""Mean and standard deviation of a Gaussian policy, before the squashing.

    An MLP on the observation, of the same shape as :class:`ScoreNetwork`: Linear, activation, then
    ``num_layers - 2`` times [Linear, norm, activation], then Linear to the means and the raw scales.
    The scale is :math:`\mathrm{softplus}(raw + b) + \sigma_{min}` with the constant :math:`b` that makes it
    ``init_scale`` at ``raw = 0``. The output layer starts at 1e-8 times the default initialisation, so
    that a fresh policy is the same at every observation: mean 0, standard deviation ``init_scale``.

    Args:
        action_dim (int): action size ``A``.
        obs_dim (int): observation size ``O``.

    Keyword Args:
        num_layers (int, optional): number of Linear layers including the output, at least 2.
            Defaults to ``3``.
        hidden_size (int, optional): width. Defaults to ``512``.
        norm (str, optional): ``"layer"``, ``"rms"`` or ``"none"``, on the hidden layers after the
            first. Defaults to ``"layer"``.
        activation (str, optional): ``"gelu"`` (exact), ``"silu"``, ``"relu"``, ``"tanh"``, ``"elu"``
            or ``"mish"``. Defaults to ``"gelu"``.
        init_scale (float, optional): standard deviation of a fresh policy. Defaults to ``1.0``.
        min_scale (float, optional): smallest standard deviation :math:`\sigma_{min}`. Defaults to
            ``0.01``.
        output_gain (float, optional): factor on the output layer's initial weights.
            Defaults to ``1e-8``.
        device (torch.device, optional): device of the parameters.
        dtype (torch.dtype, optional): dtype of the parameters.

    Raises:
        ValueError: sizes below 1, ``num_layers < 2``, unknown norm or activation, not
            ``0 < min_scale < init_scale``; observations of another size.

    Examples:
        >>> import torch
        >>> from torchrl_trudi.modules import GaussianNetwork
        >>> loc, scale = GaussianNetwork(action_dim=2, obs_dim=3, hidden_size=16)(torch.randn(5, 3))
        >>> loc.shape, scale.shape
        (torch.Size([5, 2]), torch.Size([5, 2]))
        >>> torch.testing.assert_close(scale, torch.ones(5, 2))
    """

    def __init__(
        self,
        action_dim: int,
        obs_dim: int,
        *,
        num_layers: int = 3,
        hidden_size: int = 512,
        norm: NormName = "layer",
        activation: ActivationName = "gelu",
        init_scale: float = 1.0,
        min_scale: float = 0.01,
        output_gain: float = 1e-8,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(num_layers, action_dim=action_dim, obs_dim=obs_dim, hidden_size=hidden_size)
        if not 0 < min_scale < init_scale < math.inf:
            raise ValueError(
                f"The scales must be finite with 0 < min_scale < init_scale, got "
                f"min_scale={min_scale} and init_scale={init_scale}."
            )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.action_dim = action_dim
        self.obs_dim = obs_dim
        self.input = nn.Linear(obs_dim, hidden_size, **factory)
        self.hidden = _hidden_layers(num_layers, hidden_size, norm, activation, factory)
        self.output = _OutputLayer(hidden_size, 2 * action_dim, output_gain, factory)
        self.extractor = NormalParamExtractor(
            f"biased_softplus_{init_scale}_{min_scale}", scale_lb=min_scale
        )

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation at an observation.

        Args:
            observation (torch.Tensor): (normalised) observation of shape ``[*B, O]``.

        Returns:
            tuple of torch.Tensor: mean and standard deviation, each ``[*B, A]``.
        """
        if observation.shape[-1] != self.obs_dim:
            raise ValueError(
                f"The Gaussian network was built for observations of size {self.obs_dim}, "
                f"got {observation.shape[-1]} (shape {tuple(observation.shape)})."
            )
        hidden = self.hidden(self.input(observation))
        # Under autocast the layers answer in a short type: the scale is not taken in it.
        weight, bias = _widened(self.output, num_rows(hidden))
        out = F.linear(hidden, weight, bias)[..., : self.output.out_features]
        return self.extractor(out.to(observation.dtype))
