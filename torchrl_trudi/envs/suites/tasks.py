"""The tasks: what each is called, how large it is, and whether the paper has it.

Sizes are written down where they were read from the simulator itself, and are ``None`` elsewhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["METRICS", "SuiteTask", "TASKS"]

METRICS = ("return", "success_once", "success_at_end")
"""How a task is scored: the sum of an episode's rewards, whether its success flag was ever set, or
whether it was set in the last step."""


@dataclasses.dataclass(frozen=True)
class SuiteTask:
    """One task of a suite.

    Attributes:
        suite (str): name of the suite.
        task (str): the task's own name in it; :func:`~torchrl_trudi.envs.make_env` takes
            ``"suite/task"``.
        paper (bool): whether it is one of the paper's 73 tasks.
        paper_inferred (bool): whether that is a conclusion, not something the paper says.
        observation (int or None): size of what the policy sees; entries of a dictionary together,
            without the privileged ones.
        action (int or None): size of the action.
        privileged (int or None): size of the observations for a critic alone, if there are any.
        preset (str or None): its published settings, :func:`~torchrl_trudi.envs.suites.get_preset`.
        metric (str): one of :data:`METRICS`.
        variants (tuple of str): the tasks that this name stands for, if it is none itself.

    Examples:
        >>> from torchrl_trudi.envs.suites import list_tasks
        >>> task = list_tasks("playground")[0]
        >>> task.name, task.paper, task.metric
        ('playground/AcrobotSwingup', True, 'return')
    """

    suite: str
    task: str
    paper: bool = False
    paper_inferred: bool = False
    observation: int | None = None
    action: int | None = None
    privileged: int | None = None
    preset: str | None = None
    metric: str = "return"
    variants: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name that :func:`~torchrl_trudi.envs.make_env` takes."""
        return f"{self.suite}/{self.task}"


# The paper's 73: 24 + 4 + 18 + 27. It does not say which of Playground's 25 control tasks is left
# out; SwimmerSwimmer6 is what the list that this follows does not have.
_PLAYGROUND_DMC = [
    "AcrobotSwingup",
    "AcrobotSwingupSparse",
    "BallInCup",
    "CartpoleBalance",
    "CartpoleBalanceSparse",
    "CartpoleSwingup",
    "CartpoleSwingupSparse",
    "CheetahRun",
    "FingerSpin",
    "FingerTurnEasy",
    "FingerTurnHard",
    "FishSwim",
    "HopperHop",
    "HopperStand",
    "PendulumSwingup",
    "PointMass",
    "ReacherEasy",
    "ReacherHard",
    "WalkerRun",
    "WalkerWalk",
    "WalkerStand",
    "HumanoidStand",
    "HumanoidWalk",
    "HumanoidRun",
]
_PLAYGROUND_DMC_LEFT_OUT = ["SwimmerSwimmer6"]

_PLAYGROUND_HUMANOIDS = [
    "G1JoystickFlatTerrain",
    "G1JoystickRoughTerrain",
    "T1JoystickFlatTerrain",
    "T1JoystickRoughTerrain",
]

# Scored here by ManiSkill's usual success_once; which of the two the paper takes is not known.
_MANISKILL = [
    "LiftPegUpright",
    "OpenCabinetDoor",
    "OpenCabinetDrawer",
    "PegInsertionSide",
    "PickCube",
    "PickSingleYCB",
    "PlaceSphere",
    "PlugCharger",
    "PokeCube",
    "PullCube",
    "PullCubeTool",
    "PushT",
    "RollBall",
    "StackCube",
    "TwoRobotPickCube",
    "TwoRobotStackCube",
    "UnitreeG1PlaceAppleInBowl",
    "UnitreeG1TransportBox",
]

_HUMANOID_BENCH = [
    "stand",
    "walk",
    "run",
    "kitchen",
    "maze",
    "hurdle",
    "cube",
    "bookshelf",
    "highbar",
    "crawl",
    "window",
    "spoon",
    "door",
    "push",
    "reach",
    "basketball",
    "truck",
    "package",
    "cabinet",
    "sit",
    "balance",
    "stair",
    "slide",
    "pole",
    "room",
    "insert",
    "powerlift",
]
# Two registered tasks each, of which the paper counts one without saying which, or both as one.
_HUMANOID_BENCH_PAIRS = {
    "bookshelf": ("bookshelf_simple", "bookshelf_hard"),
    "highbar": ("highbar_simple", "highbar_hard"),
    "sit": ("sit_simple", "sit_hard"),
    "balance": ("balance_simple", "balance_hard"),
    "insert": ("insert_normal", "insert_small"),
}

# Observation and action.
_GYMNASIUM = {
    "Ant-v5": (105, 8),
    "HalfCheetah-v5": (17, 6),
    "Hopper-v5": (11, 3),
    "Humanoid-v5": (348, 17),
    "HumanoidStandup-v5": (348, 17),
    "InvertedDoublePendulum-v5": (9, 1),
    "InvertedPendulum-v5": (4, 1),
    "Pusher-v5": (23, 7),
    "Reacher-v5": (10, 2),
    "Swimmer-v5": (8, 2),
    "Walker2d-v5": (17, 6),
}

# EnvPool 1.2.5: the same eleven, dm_control's tasks, and Playground's robots: observation, action,
# and privileged observation where there is one.
_ENVPOOL_DMC = {
    "AcrobotSwingup-v1": (6, 1),
    "AcrobotSwingupSparse-v1": (6, 1),
    "BallInCupCatch-v1": (8, 2),
    "CartpoleBalance-v1": (5, 1),
    "CartpoleBalanceSparse-v1": (5, 1),
    "CartpoleSwingup-v1": (5, 1),
    "CartpoleSwingupSparse-v1": (5, 1),
    "CheetahRun-v1": (17, 6),
    "FingerSpin-v1": (12, 2),
    "FingerTurnEasy-v1": (12, 2),
    "FingerTurnHard-v1": (12, 2),
    "FishSwim-v1": (24, 5),
    "HopperHop-v1": (15, 4),
    "HopperStand-v1": (15, 4),
    "HumanoidRun-v1": (95, 21),
    "HumanoidStand-v1": (95, 21),
    "HumanoidWalk-v1": (95, 21),
    "PendulumSwingup-v1": (3, 1),
    "PointMassEasy-v1": (4, 2),
    "ReacherEasy-v1": (6, 2),
    "ReacherHard-v1": (6, 2),
    "SwimmerSwimmer6-v1": (25, 5),
    "WalkerRun-v1": (24, 6),
    "WalkerStand-v1": (24, 6),
    "WalkerWalk-v1": (24, 6),
}
_ENVPOOL_PLAYGROUND: dict[str, tuple[int, int, int | None]] = {
    "ApolloJoystickFlatTerrain-v1": (112, 32, 224),
    "BarkourJoystick-v1": (465, 12, None),
    "BerkeleyHumanoidJoystickFlatTerrain-v1": (52, 12, 114),
    "BerkeleyHumanoidJoystickRoughTerrain-v1": (52, 12, 114),
    "G1JoystickFlatTerrain-v1": (103, 29, 216),
    "G1JoystickRoughTerrain-v1": (103, 29, 216),
    "Go1JoystickFlatTerrain-v1": (48, 12, 123),
    "Go1JoystickRoughTerrain-v1": (48, 12, 123),
    "Go1Getup-v1": (42, 12, 91),
    "Go1Handstand-v1": (45, 12, 94),
    "Go1Footstand-v1": (45, 12, 94),
    "H1InplaceGaitTracking-v1": (186, 19, None),
    "H1JoystickGaitTracking-v1": (113, 19, None),
    "LeapCubeReorient-v1": (57, 16, 128),
    "LeapCubeRotateZAxis-v1": (32, 16, 105),
    "Op3Joystick-v1": (147, 20, None),
    "PandaPickCube-v1": (66, 8, None),
    "PandaOpenCabinet-v1": (55, 8, None),
    "SpotFlatTerrainJoystick-v1": (81, 12, 167),
    "SpotGetup-v1": (30, 12, None),
    "SpotJoystickGaitTracking-v1": (69, 12, None),
    "T1JoystickFlatTerrain-v1": (85, 23, 180),
    "T1JoystickRoughTerrain-v1": (85, 23, 180),
}


def _make_tasks() -> tuple[SuiteTask, ...]:
    tasks = [
        SuiteTask("gymnasium", name, observation=observation, action=action)
        for name, (observation, action) in _GYMNASIUM.items()
    ]
    dmc: dict[str, Any] = {"preset": "playground_dmc", "paper_inferred": True}
    tasks += [SuiteTask("playground", name, paper=True, **dmc) for name in _PLAYGROUND_DMC]
    tasks += [SuiteTask("playground", name, **dmc) for name in _PLAYGROUND_DMC_LEFT_OUT]
    tasks += [
        SuiteTask("playground", name, paper=True, preset="playground_humanoid")
        for name in _PLAYGROUND_HUMANOIDS
    ]
    tasks += [
        SuiteTask("maniskill", f"{name}-v1", paper=True, preset="maniskill", metric="success_once")
        for name in _MANISKILL
    ]
    for name in _HUMANOID_BENCH:
        variants = tuple(f"h1hand-{variant}-v0" for variant in _HUMANOID_BENCH_PAIRS.get(name, ()))
        tasks.append(
            SuiteTask(
                "humanoid_bench",
                f"h1hand-{name}-v0",
                paper=True,
                preset="humanoid_bench",
                variants=variants,
            )
        )
        tasks += [SuiteTask("humanoid_bench", each, preset="humanoid_bench") for each in variants]
    # The paper ran Playground itself: what EnvPool has of it is for machines without a GPU.
    tasks += [
        SuiteTask("envpool", name, observation=observation, action=action)
        for name, (observation, action) in _GYMNASIUM.items()
    ]
    tasks += [
        SuiteTask("envpool", name, observation=observation, action=action, preset="playground_dmc")
        for name, (observation, action) in _ENVPOOL_DMC.items()
    ]
    humanoids = {f"{name}-v1" for name in _PLAYGROUND_HUMANOIDS}
    tasks += [
        SuiteTask(
            "envpool",
            name,
            observation=observation,
            action=action,
            privileged=privileged,
            preset="playground_humanoid" if name in humanoids else None,
        )
        for name, (observation, action, privileged) in _ENVPOOL_PLAYGROUND.items()
    ]
    tasks.append(SuiteTask("mjlab", "Mjlab-Velocity-Flat-Unitree-G1"))
    return tuple(tasks)


TASKS: tuple[SuiteTask, ...] = _make_tasks()
"""All tasks, in the order of the table."""
