from torchrl_trudi.modules.denoising import DenoisingChain, DenoisingModel, PathLogProb
from torchrl_trudi.modules.distributions import (
    DenoisingPath,
    gaussian_entropy,
    gaussian_kl,
    gaussian_log_prob,
)
from torchrl_trudi.modules.hl_gauss import HLGaussCritic, HLGaussSupport
from torchrl_trudi.modules.networks import ScoreNetwork, StepEmbedding
from torchrl_trudi.modules.step_sizes import StepSizes, step_size_weights
from torchrl_trudi.modules.tensordict_module import DiffusionActor, HLGaussValueOperator

__all__ = [
    "DenoisingChain",
    "DenoisingModel",
    "DenoisingPath",
    "DiffusionActor",
    "HLGaussCritic",
    "HLGaussSupport",
    "HLGaussValueOperator",
    "PathLogProb",
    "ScoreNetwork",
    "StepEmbedding",
    "StepSizes",
    "gaussian_entropy",
    "gaussian_kl",
    "gaussian_log_prob",
    "step_size_weights",
]
