from torchrl_trudi.modules.tensordict_module.diffusion_actor import DiffusionActor
from torchrl_trudi.modules.tensordict_module.hl_gauss_value import HLGaussValueOperator

__all__ = ["DiffusionActor", "HLGaussValueOperator"]
