from torchrl_trudi.modules.tensordict_module.chain_actor import ChainActor
from torchrl_trudi.modules.tensordict_module.diffusion_actor import DiffusionActor
from torchrl_trudi.modules.tensordict_module.gaussian_actor import GaussianActor
from torchrl_trudi.modules.tensordict_module.hl_gauss_value import HLGaussValueOperator

__all__ = ["ChainActor", "DiffusionActor", "GaussianActor", "HLGaussValueOperator"]
