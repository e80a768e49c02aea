from torchrl_trudi.modules.distributions.denoising_path import DenoisingPath
from torchrl_trudi.modules.distributions.gaussian import (
    gaussian_entropy,
    gaussian_kl,
    gaussian_log_prob,
)
from torchrl_trudi.modules.distributions.projection import project_gaussian, project_path

__all__ = [
    "DenoisingPath",
    "gaussian_entropy",
    "gaussian_kl",
    "gaussian_log_prob",
    "project_gaussian",
    "project_path",
]
