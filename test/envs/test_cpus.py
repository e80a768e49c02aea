"""The CPUs of this process."""

from __future__ import annotations

import os

import pytest

from torchrl_trudi.envs import available_cpus, cpus


@pytest.fixture
def groups(tmp_path, monkeypatch):
    monkeypatch.setattr(cpus, "_CGROUPS", tmp_path)
    monkeypatch.setattr(cpus, "_OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("max 100000\n", 8),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("10000 100000\n", 1),
        ("9000000 100000\n", 8),
        ("nonsense\n", 8),
    ],
)
def test_quota_of_a_container(groups, text, count):
    (groups / "cpu.max").write_text(text)
    assert available_cpus() == count


@pytest.mark.parametrize(("quota", "count"), [("-1", 8), ("300000", 3)])
def test_quota_of_the_first_version(groups, quota, count):
    (groups / "cpu").mkdir()
    (groups / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (groups / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert available_cpus() == count


def test_quota_of_a_group_above(groups):
    (groups / "own").write_text("0::/job/step\n")
    (groups / "job" / "step").mkdir(parents=True)
    (groups / "job" / "step" / "cpu.max").write_text("max 100000\n")
    assert available_cpus() == 8
    (groups / "job" / "cpu.max").write_text("300000 100000\n")
    assert available_cpus() == 3
    (groups / "job" / "step" / "cpu.max").write_text("100000 100000\n")
    assert available_cpus() == 1


def test_without_control_groups(groups, monkeypatch):
    assert available_cpus() == 8
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert available_cpus() == os.cpu_count()
