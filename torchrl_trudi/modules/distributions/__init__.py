from torchrl_trudi.modules.distributions.denoising_path import DenoisingPath
from torchrl_trudi.modules.distributions.gaussian import (
    gaussian_entropy,
    gaussian_kl,
    gaussian_log_prob,
)

__all__ = ["DenoisingPath", "gaussian_entropy", "gaussian_kl", "gaussian_log_prob"]
