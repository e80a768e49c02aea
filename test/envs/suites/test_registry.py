"""The list of the tasks, and the table that is made of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import gymnasium
import pytest

from torchrl_trudi.envs.suites import SUITES, find_task, get_suite, list_tasks
from torchrl_trudi.envs.suites.__main__ import main, make_overrides, make_table
from torchrl_trudi.trainers import TrainConfig
from torchrl_trudi.trainers.overrides import find_problems

PAPER = {
    "maniskill": """LiftPegUpright-v1 OpenCabinetDoor-v1 OpenCabinetDrawer-v1 PegInsertionSide-v1
        PickCube-v1 PickSingleYCB-v1 PlaceSphere-v1 PlugCharger-v1 PokeCube-v1 PullCube-v1
        PullCubeTool-v1 PushT-v1 RollBall-v1 StackCube-v1 TwoRobotPickCube-v1 TwoRobotStackCube-v1
        UnitreeG1PlaceAppleInBowl-v1 UnitreeG1TransportBox-v1""",
    "humanoid_bench": """h1hand-stand-v0 h1hand-walk-v0 h1hand-run-v0 h1hand-kitchen-v0
        h1hand-maze-v0 h1hand-hurdle-v0 h1hand-cube-v0 h1hand-bookshelf-v0 h1hand-highbar-v0
        h1hand-crawl-v0 h1hand-window-v0 h1hand-spoon-v0 h1hand-door-v0 h1hand-push-v0
        h1hand-reach-v0 h1hand-basketball-v0 h1hand-truck-v0 h1hand-package-v0 h1hand-cabinet-v0
        h1hand-sit-v0 h1hand-balance-v0 h1hand-stair-v0 h1hand-slide-v0 h1hand-pole-v0
        h1hand-room-v0 h1hand-insert-v0 h1hand-powerlift-v0""",
    "playground": """AcrobotSwingup AcrobotSwingupSparse BallInCup CartpoleBalance
        CartpoleBalanceSparse CartpoleSwingup CartpoleSwingupSparse CheetahRun FingerSpin
        FingerTurnEasy FingerTurnHard FishSwim HopperHop HopperStand PendulumSwingup PointMass
        ReacherEasy ReacherHard WalkerRun WalkerWalk WalkerStand HumanoidStand HumanoidWalk
        HumanoidRun G1JoystickFlatTerrain G1JoystickRoughTerrain T1JoystickFlatTerrain
        T1JoystickRoughTerrain""",
}


def test_the_papers_73():
    tasks = [task for task in list_tasks() if task.paper]
    assert {suite: names.split() for suite, names in PAPER.items()} == {
        suite: sorted(
            (task.task for task in tasks if task.suite == suite),
            key=PAPER[suite].split().index,
        )
        for suite in PAPER
    }
    assert len(tasks) == 73
    assert Counter(task.preset for task in tasks) == {
        "maniskill": 18,
        "humanoid_bench": 27,
        "playground_humanoid": 4,
        "playground_dmc": 24,
    }


def test_what_is_inferred():
    inferred = [task for task in list_tasks() if task.paper_inferred]
    assert len(inferred) == 25
    assert [task.task for task in inferred if not task.paper] == ["SwimmerSwimmer6"]


def test_names_are_unique_and_found():
    names = [task.name for task in list_tasks()]
    assert len(set(names)) == len(names)
    assert all(find_task(name).name == name for name in names)


def test_unknown_names():
    with pytest.raises(ValueError, match="Did you mean 'maniskill'"):
        find_task("maniskil/PickCube-v1")
    with pytest.raises(ValueError, match="Did you mean 'PickCube-v1'"):
        find_task("maniskill/PickCub-v1")
    with pytest.raises(ValueError, match="Did you mean 'playground'"):
        list_tasks("playgrond")


def test_five_tasks_stand_for_two():
    pairs = [task for task in list_tasks("humanoid_bench") if task.variants]
    assert len(pairs) == 5
    for task in pairs:
        for variant in task.variants:
            assert not find_task(f"humanoid_bench/{variant}").paper


@pytest.mark.parametrize("task", list_tasks("gymnasium"), ids=lambda task: task.task)
def test_sizes_of_gymnasium(task):
    env = gymnasium.make(task.task)
    assert env.observation_space.shape == (task.observation,)
    assert env.action_space.shape == (task.action,)
    env.close()


def test_installed_without_importing(monkeypatch):
    assert get_suite("gymnasium").is_installed()
    monkeypatch.setitem(sys.modules, "isaacgym", object())  # has no __spec__
    assert get_suite("isaacgym").is_installed()


def test_json(capsys):
    assert main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(list_tasks())
    keys = {"suite", "task", "paper", "paper_inferred", "observation", "action", "preset"}
    keys |= {"metric", "installed", "install"}
    for row in rows:
        assert keys <= set(row)
        assert isinstance(row["paper"], bool) and isinstance(row["installed"], bool)
        assert row["install"]
    assert sum(row["paper"] for row in rows) == 73
    assert main(["--json", "--suite", "maniskill"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 18


def test_text(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "73 of these are the paper's" in out and "inferred" in out
    assert all(f"\n{name}: " in out for name in SUITES)
    assert main(["--suite", "gymnasium"]) == 0
    assert "gymnasium: installed" in capsys.readouterr().out


def test_a_wrong_suite_is_a_wrong_argument(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--suite", "envpol"])
    assert "Did you mean 'envpool'" in capsys.readouterr().err


def test_nothing_is_imported_for_the_table():
    """Neither a simulator nor what one needs: its import could fail, or take long."""
    code = (
        "import sys; from torchrl_trudi.envs.suites.__main__ import main; main(['--json']);"
        "assert not {'envpool', 'jax', 'mani_skill', 'humanoid_bench', 'mjlab'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=120)


def test_rows_are_plain():
    assert json.loads(json.dumps(make_table("envpool"))) == make_table("envpool")


@pytest.mark.parametrize(
    "name",
    [
        "playground/CheetahRun",
        "envpool/G1JoystickFlatTerrain-v1",
        "maniskill/PickCube-v1",
        "humanoid_bench/h1hand-sit_hard-v0",
    ],
)
def test_overrides_are_options_of_the_runner(name):
    overrides = make_overrides(name, max_episode_steps=100)
    assert overrides[0] == f"env.name={name}"
    assert find_problems(overrides, TrainConfig) == []


def test_overrides(capsys):
    assert main(["--overrides", "humanoid_bench/h1hand-reach-v0"]) == 0
    words = capsys.readouterr().out.split()
    assert {"critic.vmin=-2000.0", "critic.vmax=2000.0", "env.num_envs=64"} <= set(words)
    assert main(["--overrides", "maniskill/PushT-v1", "--max-episode-steps", "100"]) == 0
    assert "objective.gamma=0.9" in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gymnasium/Ant-v5", "no published settings"),
        ("humanoid_bench/h1hand-sit-v0", "stands for two tasks"),
        ("maniskill/PushT-v1", "give max_episode_steps"),
        ("maniskill/PushL-v1", "Did you mean 'PushT-v1'"),
    ],
)
def test_no_overrides(name, message, capsys):
    with pytest.raises(SystemExit):
        main(["--overrides", name])
    assert message in capsys.readouterr().err
