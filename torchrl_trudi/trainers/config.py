"""The configuration of a training run: typed dataclasses, validation, and their Hydra schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrl_trudi.trainers.checks import contradictions, misfits, resolve_device
from torchrl_trudi.trainers.options import (
    ConfigError,
    markdown_table,
    option,
    options,
    text_table,
)

if TYPE_CHECKING:
    from typing import Literal

    from torchrl_trudi.modules.networks import ActivationName, NormName
    from torchrl_trudi.modules.step_sizes import ScheduleName

    ActorGradientName = Literal["pathwise", "adjoint"]
    ObjectiveKind = Literal["pathwise", "surrogate"]
    CriticKind = Literal["hl_gauss", "mse"]
    EntropyName = Literal["path", "surrogate"]
    RatioName = Literal["path", "step"]
    LrScheduleName = Literal["constant", "kl_adaptive"]
    ChainDtypeName = Literal["float32", "bfloat16", "float16"]
    BackendName = Literal["auto", "mujoco", "gymnasium"]
    OnNonfiniteName = Literal["quarantine", "raise"]
    VectorizationName = Literal["sync", "async"]
    PolicyKind = Literal["diffusion", "gaussian"]
    LearnStepSizes = Literal["none", "shared", "per_step"]
    FrictionName = Literal["per_dim", "scalar"]
    ModeName = Literal["switch", "penalty", "lagrangian", "projection", "none"]
    ShareName = Literal["uniform", "proportional"]
    KLName = Literal["simplified", "full"]
    DirectionName = Literal["forward", "reverse"]
    OldPolicyName = Literal["recorded", "replayed", "target"]
    BoundName = Literal["path", "step"]
else:
    # OmegaConf knows no literal types: at run time the choices of the options do their work.
    ActivationName = ActorGradientName = BackendName = NormName = ScheduleName = str
    ChainDtypeName = OnNonfiniteName = VectorizationName = PolicyKind = LearnStepSizes = str
    ObjectiveKind = CriticKind = EntropyName = RatioName = LrScheduleName = str
    FrictionName = ModeName = KLName = DirectionName = OldPolicyName = BoundName = str
    ShareName = str

__all__ = [
    "CHOICES",
    "CollectorConfig",
    "ConfigError",
    "CriticConfig",
    "DistributedConfig",
    "EnvConfig",
    "LoggerConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "PolicyConfig",
    "SCHEMA_NAME",
    "TrainConfig",
    "TrustRegionConfig",
    "config_table",
    "register_configs",
    "resolve_device",
    "validate",
]

SCHEMA_NAME = "train_schema"
"""Name of :class:`TrainConfig` in Hydra's ConfigStore, for a ``defaults`` list."""

CHOICES = {"policy": ("diffusion", "gaussian"), "objective": ("pathwise", "surrogate")}
"""Config groups of the schema: ``policy=gaussian`` is ``policy.kind=gaussian``."""


@dataclasses.dataclass
class EnvConfig:
    """The environment."""

    name: str = option(
        "Humanoid-v5",
        "Gymnasium id of the environment, or suite/Task (docs/suites.md), such as "
        "envpool/G1JoystickFlatTerrain-v1.",
    )
    num_envs: int = option(64, "Environments stepped as one batch.", ge=1)
    normalize_action: bool = option(
        True,
        "Act in [-1, 1], mapped to the bounds of the task, so that the critic reads every action at "
        "the same scale.",
    )
    normalize_observation: bool = option(
        True,
        "Normalise observations by a running mean and variance, updated while collecting and "
        "frozen in evaluation.",
    )
    normalize_keys: list[str] | None = option(
        None,
        "Entries of the observation to normalise, each by statistics of its own; those within others are "
        "written outer/inner. null takes all.",
    )
    reward_scale: float = option(
        0.1,
        "Factor on the reward the agent learns from. Logged returns are not scaled. "
        "critic.vmin and critic.vmax bound scaled returns.",
        gt=0,
    )
    backend: BackendName = option(
        "auto",
        "MujocoBatchEnv (mujoco), vectorised Gymnasium (gymnasium), or the former where it has the "
        "task (auto).",
        choices=("auto", "mujoco", "gymnasium"),
    )
    num_threads: int | None = option(
        None,
        "Threads of the physics, with the mujoco backend; null takes all CPUs of the process.",
        ge=1,
    )
    vectorization: VectorizationName = option(
        "sync",
        "With the gymnasium backend: step the environments one after the other in this process "
        "(sync) or in worker processes (async).",
        choices=("sync", "async"),
    )
    max_episode_steps: int | None = option(
        None,
        "Truncate episodes after this many steps; null keeps the environment's own limit.",
        ge=1,
    )
    on_nonfinite: OnNonfiniteName = option(
        "quarantine",
        "What happens to a row whose observation or reward is a NaN or an infinity, or whose simulation "
        "diverges: its episode ends and the step is left out of the training (quarantine), or the run "
        "ends (raise).",
        choices=("quarantine", "raise"),
    )
    kwargs: dict[str, Any] = option(
        factory=dict,
        help="Arguments for the environment's constructor. On the command line, add one with "
        "+env.kwargs.NAME=VALUE.",
    )


@dataclasses.dataclass
class CollectorConfig:
    """Data collection."""

    total_frames: int = option(
        500_000,
        "Environment steps of the run, over all environments; the last batch may pass it.",
        ge=1,
    )
    frames_per_batch: int = option(
        2048,
        "Environment steps between updates, over all environments; a multiple of env.num_envs and "
        "of optim.num_minibatches.",
        ge=1,
    )
    chain_dtype: ChainDtypeName = option(
        "float32",
        "Type in which the batch of an iteration keeps the recorded chains; a shorter one halves "
        "their memory and rounds the path KL by about 1e-5 (docs/performance.md).",
        choices=("float32", "bfloat16", "float16"),
    )


@dataclasses.dataclass
class PolicyConfig:
    """The policy."""

    in_keys: list[str] | None = option(
        None,
        "Entries of the observation that the policy reads, for instance [proprio,goal/xy]; "
        "null takes all but the privileged_observation of a suite.",
    )
    num_steps: int = option(8, "Denoising steps per action.", ge=1)
    kind: PolicyKind = option(
        "diffusion",
        "diffusion: the action is the end of a denoising chain. gaussian: tanh of a Gaussian with "
        "state-dependent mean and scale, through the same losses; of the policy's options it reads in_keys, "
        "hidden_size, num_layers, norm, activation and init_scale, and the others have to be left at "
        "their defaults.",
        choices=("diffusion", "gaussian"),
    )
    hidden_size: int = option(256, "Width of the policy's network.", ge=1)
    num_layers: int = option(
        3, "Linear layers of the policy's network, first and last included.", ge=2
    )
    norm: NormName = option(
        "layer", "Normalisation in the policy's network.", choices=("layer", "rms", "none")
    )
    activation: ActivationName = option(
        "gelu",
        "Activation of the policy's network.",
        choices=("gelu", "silu", "relu", "tanh", "elu", "mish"),
    )
    init_scale: float = option(
        1.0,
        "Standard deviation of a fresh gaussian policy, before the squashing.",
        gt=0.01,
    )
    step_size_schedule: ScheduleName = option(
        "cosine",
        "How the step size shrinks along the denoising chain.",
        choices=("cosine", "linear", "constant"),
    )
    learn_step_sizes: LearnStepSizes = option(
        "none",
        "Learn no step size, one factor for all steps, or one per step.",
        choices=("none", "shared", "per_step"),
    )
    friction: FrictionName = option(
        "per_dim",
        "One friction coefficient per action dimension, or one for all.",
        choices=("per_dim", "scalar"),
    )
    learn_friction: bool = option(True, "Learn the friction, and with it the noise scale.")
    init_std: float = option(2.5, "Standard deviation of the prior of the chain.", gt=0)
    learn_prior: bool = option(False, "Learn the mean and the standard deviation of the prior.")
    backward_network: bool = option(
        False, "Learn a control of the reference (backward) kernels too."
    )


@dataclasses.dataclass
class TrustRegionConfig:
    """The trust region: a bound on the path KL between the policy that acted and the current one."""

    mode: ModeName = option(
        "switch",
        "How the bound acts. switch: a state inside the bound optimises the objective, one outside "
        "it the KL. penalty, lagrangian: every state optimises the objective plus the KL times a "
        "multiplier. projection: the policy acts with its kernels moved inside the bound, around a "
        "copy of its network as the last iteration left it. none: the KL is only logged.",
        choices=("switch", "penalty", "lagrangian", "projection", "none"),
    )
    kl: KLName | None = option(
        None,
        "simplified ignores the ratio of the variances of the two policies; full keeps it; null "
        "takes simplified for a diffusion policy and full for a gaussian one.",
        choices=("simplified", "full"),
    )
    direction: DirectionName = option(
        "forward",
        "forward is KL(old || new) on paths of the old policy; reverse is KL(new || old) on a path "
        "of the new one, and redraws it at every update.",
        choices=("forward", "reverse"),
    )
    eps: float = option(0.1, "Bound on the KL of a state, over the whole path.", gt=0)
    init_multiplier: float = option(
        0.01, "Initial value of the KL multiplier; in penalty mode it stays there.", gt=0
    )
    old_policy: OldPolicyName = option(
        "recorded",
        "Where paths of the old policy come from: recorded while collecting; replayed by a copy of "
        "its parameters from the recorded noise, for a third of the memory; or redrawn by that copy "
        "(target).",
        choices=("recorded", "replayed", "target"),
    )
    num_paths: int = option(
        1, "Paths per state; more than one needs trust_region.old_policy=target.", ge=1
    )
    stop_factor: float | None = option(
        None,
        "Leave the policy as it is for the rest of an iteration after an epoch with a mean KL above this "
        "many times eps, and go on with the critic; null goes through all epochs.",
        gt=0,
    )
    bound: BoundName = option(
        "path",
        "Bound the KL of the whole path, or that of each denoising step by its share of eps.",
        choices=("path", "step"),
    )
    share: ShareName = option(
        "uniform",
        "In projection mode, what part of eps each denoising step gets: the same (uniform), which is "
        "all that a run takes, because its policy acts projected, or in proportion to its KL before "
        "the projection, which the loss of recorded chains alone can do.",
        choices=("uniform", "proportional"),
    )
    regression_coeff: float = option(
        1.0,
        "In projection mode, weight of the term that pulls the network to its projection.",
        ge=0,
    )


@dataclasses.dataclass
class CriticConfig:
    """The critic: the value of a state and an action, or of a state with objective.kind=surrogate."""

    kind: CriticKind = option(
        "hl_gauss",
        "hl_gauss: a histogram, by cross-entropy. mse: a scalar by squared error, with "
        "objective.kind=surrogate; of the critic's options it reads in_keys, hidden_size and num_layers.",
        choices=("hl_gauss", "mse"),
    )
    in_keys: list[str] | None = option(
        None,
        "Entries of the observation that the critic reads besides the action; privileged ones that the "
        "policy does not read too. null takes all.",
    )
    hidden_size: int = option(256, "Width of the critic.", ge=1)
    num_layers: int = option(2, "Linear layers of the critic's encoder and of its head.", ge=1)
    vmin: float = option(-20.0, "Smallest value it represents; smaller targets are clipped.")
    vmax: float = option(130.0, "Largest value it represents; larger targets are clipped.")
    num_bins: int = option(151, "Bins between vmin and vmax.", ge=2)
    aux_coeff: float = option(
        1.0, "Weight of the auxiliary loss, which predicts the next embedding.", ge=0
    )


@dataclasses.dataclass
class ObjectiveConfig:
    """The objective of the policy."""

    kind: ObjectiveKind = option(
        "pathwise",
        "pathwise: maximum entropy, by the gradient of a state-action value (TruDi, REPPO). surrogate: "
        "the clipped likelihood ratio of the recorded chain times a GAE advantage (PPO).",
        choices=("pathwise", "surrogate"),
    )
    gamma: float = option(0.99, "Discount factor.", gt=0, le=1)
    lmbda: float = option(0.95, "Lambda of the soft TD(lambda) returns, or of GAE.", ge=0, le=1)
    init_temperature: float = option(0.01, "Initial entropy temperature.", gt=0)
    target_entropy_scale: float | None = option(
        None,
        "The entropy (surrogate) is steered towards minus this much per action dimension; null takes "
        "4 for a diffusion policy and 0.5 for a gaussian one.",
    )
    actor_gradient: ActorGradientName = option(
        "pathwise",
        "Differentiate through the chain (pathwise), or regress its control on a closed-form target "
        "(adjoint).",
        choices=("pathwise", "adjoint"),
    )
    num_adjoint_steps: int | None = option(
        None,
        "Steps of the chain that the adjoint gradient regresses per state; null takes all.",
        ge=1,
    )
    entropy_fraction: float = option(
        1.0,
        "Fraction of the states beyond the trust region on which the entropy is estimated.",
        gt=0,
        le=1,
    )
    elbo_coeff: float = option(
        0.0,
        "Weight of the evidence bound of the recorded actions, which keeps the entropy's surrogate close to "
        "the log-probability; with it the gap between them is logged at evaluation (docs/family.md). 0 leaves it out.",
        ge=0,
    )
    reuse_actions: bool = option(
        False,
        "Bootstrap from the next row's recorded action instead of a fresh one, which saves a chain "
        "per step.",
    )
    ratio: RatioName = option(
        "path",
        "Of the surrogate: one likelihood ratio for the whole chain, or one for each step.",
        choices=("path", "step"),
    )
    clip_epsilon: float = option(
        0.2, "Of the surrogate: the ratio is clipped to within this much of 1.", gt=0, lt=1
    )
    normalize_advantage: bool = option(
        True, "Of the surrogate: standardise the advantages of each minibatch."
    )
    entropy: EntropyName = option(
        "path",
        "Of the surrogate: whose entropy is rewarded, that of the chain's kernels (path) or the "
        "stand-in for that of the action (surrogate).",
        choices=("path", "surrogate"),
    )
    entropy_coeff: float = option(0.0, "Of the surrogate: weight of the entropy.", ge=0)


@dataclasses.dataclass
class OptimConfig:
    """The optimiser."""

    lr: float = option(3e-4, "Learning rate.", gt=0)
    dual_lr: float | None = option(
        None,
        "Learning rate of the temperature and of the KL multiplier; null takes optim.lr, 0 freezes "
        "both.",
        ge=0,
    )
    weight_decay: float = option(
        0.0, "Weight decay of the networks; never applied to temperature and KL multiplier.", ge=0
    )
    lr_schedule: LrScheduleName = option(
        "constant",
        "constant, or kl_adaptive: after each iteration the policy's learning rate is divided by 1.5 if "
        "the path KL of the last epoch was above twice trust_region.eps, and multiplied by it if it was "
        "below half of it, within [1e-5, optim.max_lr].",
        choices=("constant", "kl_adaptive"),
    )
    max_lr: float = option(1e-3, "Largest learning rate of kl_adaptive.", ge=1e-5)
    max_grad_norm: float = option(0.5, "The gradient is scaled down to this norm.", gt=0)
    max_consecutive_skips: int = option(
        50,
        "A step whose loss or gradient is not finite is skipped; after this many minibatches in a row with a "
        "skipped step the run ends, with a checkpoint and a report of the batch (skipped_batch.json).",
        ge=1,
    )
    num_minibatches: int = option(8, "Minibatches per epoch.", ge=1)
    num_epochs: int = option(4, "Passes over each batch.", ge=1)
    compile: bool = option(
        False, "Compile the losses with torch.compile in the first update, which takes minutes."
    )
    autocast: bool = option(
        False,
        "Compute the networks of the losses in bfloat16; log-probabilities, KL and histograms stay "
        "in float32.",
    )
    cudagraphs: bool = option(False, "Replay each update as one CUDA graph; needs a GPU.")


@dataclasses.dataclass
class LoggerConfig:
    """Logs, evaluation and checkpoints."""

    dir: str = option(
        "runs",
        "Run directory. If it already holds a run, a sibling DIR-1, DIR-2, ... is made. The default "
        "(runs), and any directory that holds other things, is a parent in which "
        "<env.name>-<seed>-<time> is made.",
    )
    eval_interval: int = option(100_000, "Environment steps between evaluations.", ge=1)
    eval_episodes: int = option(10, "Episodes per evaluation; 0 turns evaluation off.", ge=0)
    checkpoint_interval: int = option(100_000, "Environment steps between checkpoints.", ge=1)
    keep_checkpoints: int = option(
        3,
        "Newest checkpoints kept, besides the one with the best evaluation; others are deleted.",
        ge=1,
    )
    progress: bool = option(True, "Show a progress bar.")


@dataclasses.dataclass
class DistributedConfig:
    """Several processes, started by torchrun."""

    timeout_s: float = option(
        600.0,
        "Seconds that a process waits for the others before the job ends with an error: more than an "
        "evaluation, or a compilation, takes.",
        gt=0,
    )


@dataclasses.dataclass
class TrainConfig:
    """A training run."""

    seed: int = option(0, "Seed of the environments, the networks and the noise.", ge=0)
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda or cuda:INDEX.")
    resume: str | None = option(
        None,
        "Continue a run: its directory, or latest for the newest run in logger.dir.",
    )
    num_threads: int | None = option(
        None,
        "CPU threads of PyTorch; null takes its own number, but no more than the process has CPUs.",
        ge=1,
    )
    env: EnvConfig = dataclasses.field(default_factory=EnvConfig)
    collector: CollectorConfig = dataclasses.field(default_factory=CollectorConfig)
    policy: PolicyConfig = dataclasses.field(default_factory=PolicyConfig)
    trust_region: TrustRegionConfig = dataclasses.field(default_factory=TrustRegionConfig)
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    logger: LoggerConfig = dataclasses.field(default_factory=LoggerConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)


def validate(config: TrainConfig | DictConfig | Mapping[str, Any]) -> TrainConfig:
    """Check a configuration and return it as typed dataclasses.

    Args:
        config: dataclasses, a config composed by Hydra, or a (nested) mapping of the settings that
            differ from the defaults.

    Returns:
        A new, fully resolved :class:`TrainConfig`.

    Raises:
        ConfigError: for an unknown key, a value of the wrong type or outside its accepted range,
            or settings that contradict each other. The message has a line for each problem, named
            by its dotted key, with what was given and what is accepted.
    """
    typed = _to_dataclass(config)
    problems = []
    values = {}
    for leaf in options(TrainConfig):
        value: Any = typed
        for name in leaf.key.split("."):
            value = getattr(value, name)
        values[leaf.key] = value
        problem = leaf.problem(value)
        if problem:
            problems.append(problem)
    # Relations between options make sense only once each option does.
    if not problems:
        problems = contradictions(typed)
    try:
        resolve_device(typed.device)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return typed


def _to_dataclass(config: TrainConfig | DictConfig | Mapping[str, Any]) -> TrainConfig:
    """Convert to a fresh TrainConfig; unknown keys and wrong types raise ConfigError."""
    if isinstance(config, TrainConfig):
        given: dict[str, Any] = dataclasses.asdict(config)
    elif isinstance(config, DictConfig):
        try:
            container = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise ConfigError(str(error).splitlines()[0]) from error
        assert isinstance(container, dict)
        given = {str(key): value for key, value in container.items()}
    elif isinstance(config, Mapping):
        given = dict(config)
    else:
        raise ConfigError(
            f"got a {type(config).__name__}, accepted: a TrainConfig, a DictConfig or a mapping"
        )

    try:
        typed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), given))
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        # OmegaConf names the first problem, in its own terms: look for all of them.
        problems = misfits(given, TrainConfig) or [str(error).splitlines()[0]]
        raise ConfigError("\n".join(problems)) from error
    assert isinstance(typed, TrainConfig)
    return typed


def config_table() -> str:
    """Document every option of :class:`TrainConfig`.

    Returns:
        A Markdown table.
    """
    return markdown_table(TrainConfig)


_HELP = """\
$app_name: train a diffusion policy with a trust region over its denoising path (or a Gaussian one).

Usage: python $script [task=TASK] [arm=ARM] [OPTION=VALUE ...]

  python $script
  python $script task=hopper seed=3
  python $script policy=gaussian objective=surrogate trust_region.mode=none
  python $script env.name=HalfCheetah-v5 collector.total_frames=400_000 logger.dir=runs/x
  python $script resume=latest collector.total_frames=2_000_000
  python $script --multirun seed=0,1,2

Presets (GROUP=NAME); an option given on the command line wins over its preset:

$$APP_CONFIG_GROUPS
Options, with the defaults that hold where the preset says nothing:

$options
The configuration of this call (also: --cfg job):

$$CONFIG
"""


def register_configs(script: str = "examples/trudi_humanoid.py") -> None:
    """Register the schema, its choices and the help text in Hydra's ConfigStore.

    Call it once before ``hydra.main`` runs. The schema is stored as ``train_schema``, the choices as
    the groups ``policy`` and ``objective`` (:data:`CHOICES`), the help text as ``hydra/help: trudi``;
    calling it again stores the same again.

    Args:
        script: how the help text names the script.
    """
    import string

    from hydra.core.config_store import ConfigStore

    # Hydra substitutes $-names in the template once more: those of its own are escaped above, and a
    # dollar in a help text would have to be.
    template = string.Template(_HELP).substitute(
        app_name="torchrl_trudi",
        script=script,
        options=text_table(TrainConfig).replace("$", "$$"),
    )
    store = ConfigStore.instance()
    store.store(name=SCHEMA_NAME, node=TrainConfig, provider="torchrl_trudi")
    sections = {"policy": PolicyConfig, "objective": ObjectiveConfig}
    for group, kinds in CHOICES.items():
        for kind in kinds:
            store.store(
                group=group, name=kind, node=sections[group](kind=kind), provider="torchrl_trudi"
            )
    store.store(
        group="hydra/help",
        name="trudi",
        node={"app_name": "torchrl_trudi", "header": "", "footer": "", "template": template},
        provider="torchrl_trudi",
    )
