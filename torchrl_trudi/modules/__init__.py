from torchrl_trudi.modules.chain_model import ChainModel, DenoisingChain, PathLogProb
from torchrl_trudi.modules.denoising import DenoisingModel
from torchrl_trudi.modules.distributions import (
    DenoisingPath,
    gaussian_entropy,
    gaussian_kl,
    gaussian_log_prob,
    project_gaussian,
    project_path,
)
from torchrl_trudi.modules.gaussian_model import GaussianModel
from torchrl_trudi.modules.hl_gauss import HLGaussCritic, HLGaussSupport
from torchrl_trudi.modules.networks import GaussianNetwork, ScoreNetwork, StepEmbedding
from torchrl_trudi.modules.projected_model import ProjectedModel
from torchrl_trudi.modules.step_sizes import StepSizes, step_size_weights
from torchrl_trudi.modules.tensordict_module import (
    ChainActor,
    DiffusionActor,
    GaussianActor,
    HLGaussValueOperator,
)

__all__ = [
    "ChainActor",
    "ChainModel",
    "DenoisingChain",
    "DenoisingModel",
    "DenoisingPath",
    "DiffusionActor",
    "GaussianActor",
    "GaussianModel",
    "GaussianNetwork",
    "HLGaussCritic",
    "HLGaussSupport",
    "HLGaussValueOperator",
    "PathLogProb",
    "ProjectedModel",
    "ScoreNetwork",
    "StepEmbedding",
    "StepSizes",
    "gaussian_entropy",
    "gaussian_kl",
    "gaussian_log_prob",
    "project_gaussian",
    "project_path",
    "step_size_weights",
]
