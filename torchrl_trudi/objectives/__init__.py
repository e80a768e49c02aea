from torchrl_trudi.objectives.distillation import DenoisingDistillationLoss
from torchrl_trudi.objectives.elbo import PathELBO, SurrogateGap, path_elbo, surrogate_gap
from torchrl_trudi.objectives.functional import soft_td_lambda_return
from torchrl_trudi.objectives.quarantine import cut_at_quarantined, replace_quarantined
from torchrl_trudi.objectives.trajectory_kl import (
    PathKL,
    ProjectedPathKL,
    TrajectoryKLProjection,
)
from torchrl_trudi.objectives.trudi import TruDiLoss
from torchrl_trudi.objectives.trudi_ppo import TruDiPPOLoss
from torchrl_trudi.objectives.value import SOFT_TD_LAMBDA, SoftTDLambdaEstimator

__all__ = [
    "DenoisingDistillationLoss",
    "PathELBO",
    "PathKL",
    "ProjectedPathKL",
    "SOFT_TD_LAMBDA",
    "SoftTDLambdaEstimator",
    "SurrogateGap",
    "TrajectoryKLProjection",
    "TruDiLoss",
    "TruDiPPOLoss",
    "cut_at_quarantined",
    "path_elbo",
    "replace_quarantined",
    "soft_td_lambda_return",
    "surrogate_gap",
]
