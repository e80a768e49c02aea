"""Trust-region diffusion policies for massively parallel on-policy RL, as TorchRL components."""

__version__ = "0.1.0"
