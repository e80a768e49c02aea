"""Which simulator a name leads to, and what is said where there is none."""

from __future__ import annotations

import builtins
import sys

import gymnasium
import pytest

from torchrl_trudi.envs import MujocoBatchEnv, make_env
from torchrl_trudi.envs.suites import (
    SUITES,
    Suite,
    SuiteNotInstalledError,
    SuiteNotSupportedError,
    registry,
)
from torchrl_trudi.envs.suites.dispatch import split_name

UNSUPPORTED = sorted(name for name, suite in SUITES.items() if suite.adapter is None)


@pytest.fixture
def _namespace():
    gymnasium.register(
        "testspace/Pendulum-v0", entry_point="gymnasium.envs.classic_control:PendulumEnv"
    )
    yield
    del gymnasium.registry["testspace/Pendulum-v0"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Humanoid-v5", ("gymnasium", "Humanoid-v5")),
        ("gymnasium/Humanoid-v5", ("gymnasium", "Humanoid-v5")),
        ("some.module:Humanoid-v5", ("gymnasium", "some.module:Humanoid-v5")),
        ("some.module:space/Name-v0", ("gymnasium", "some.module:space/Name-v0")),
        ("testspace/Pendulum-v0", ("gymnasium", "testspace/Pendulum-v0")),
        ("testspace/Pendulm-v0", ("gymnasium", "testspace/Pendulm-v0")),
        ("gymnasium/testspace/Pendulum-v0", ("gymnasium", "testspace/Pendulum-v0")),
        ("envpool/MetaWorld/Reach-v3", ("envpool", "MetaWorld/Reach-v3")),
        ("maniskill/PickCube-v1", ("maniskill", "PickCube-v1")),
    ],
)
@pytest.mark.usefixtures("_namespace")
def test_names(name, expected):
    assert split_name(name) == expected


def test_what_gymnasium_has_comes_first():
    gymnasium.register("mjlab/Own-v0", entry_point="gymnasium.envs.classic_control:PendulumEnv")
    try:
        assert split_name("mjlab/Own-v0") == ("gymnasium", "mjlab/Own-v0")
    finally:
        del gymnasium.registry["mjlab/Own-v0"]


def test_gymnasium_by_its_suite():
    env = make_env("gymnasium/InvertedPendulum-v5", 2, seed=0)
    assert isinstance(env.base_env, MujocoBatchEnv)
    env.close()


@pytest.mark.usefixtures("_namespace")
def test_namespace_of_gymnasium():
    env = make_env("testspace/Pendulum-v0", 2, backend="gymnasium", max_episode_steps=3)
    assert env.rollout(3).shape == (2, 3)
    env.close()


def test_unknown_names():
    with pytest.raises(ValueError, match="Did you mean 'envpool'"):
        make_env("envpol/HalfCheetah-v5")
    with pytest.raises(ValueError, match="nor a namespace that Gymnasium knows"):
        make_env("nowhere/HalfCheetah-v5")
    with pytest.raises(ValueError, match="Did you mean 'HalfCheetah-v5'"):
        make_env("gymnasium/HalfCheeta-v5")
    with pytest.raises(TypeError, match="must be the name of a task"):
        make_env(3)


@pytest.mark.parametrize("suite", UNSUPPORTED)
def test_not_supported_yet(suite):
    with pytest.raises(SuiteNotSupportedError, match=f"'{suite}' is not supported yet"):
        make_env(f"{suite}/PickCube-v1")


def test_not_supported_names_what_is():
    with pytest.raises(NotImplementedError, match="envpool/G1JoystickFlatTerrain-v1"):
        make_env("playground/G1JoystickFlatTerrain")
    with pytest.raises(NotImplementedError, match="Did you mean 'CheetahRun'"):
        make_env("playground/CheetaRun")


@pytest.fixture
def absent(monkeypatch):
    suite = SUITES["envpool"]
    absent = Suite(suite.name, "no_such_module", suite.install, suite.adapter)
    monkeypatch.setitem(registry.SUITES, "envpool", absent)


@pytest.mark.usefixtures("absent")
def test_not_installed():
    with pytest.raises(
        SuiteNotInstalledError, match=r"'envpool' is not installed: pip install envpool\.$"
    ):
        make_env("envpool/HalfCheetah-v5")
    with pytest.raises(ImportError, match="Did you mean 'HalfCheetah-v5'"):
        make_env("envpool/HalfCheeta-v5")


def test_a_broken_simulator_breaks_no_other(monkeypatch, tmp_path):
    (tmp_path / "humanoid_bench.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "humanoid_bench", raising=False)
    with pytest.raises(
        SuiteNotInstalledError, match=r"cannot be imported .*a_module_that_is_missing"
    ):
        make_env("humanoid_bench/h1hand-walk-v0")
    make_env("InvertedPendulum-v5").close()


def test_no_simulator_is_imported_for_another(monkeypatch):
    found = []
    real = builtins.__import__

    def spy(name, *args, **kwargs):
        found.append(name.partition(".")[0])
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", spy)
    make_env("gymnasium/InvertedPendulum-v5").close()
    others = {suite.module for suite in SUITES.values()} - {"gymnasium"}
    assert not others.intersection(found)
