"""The measuring scripts run, and write what they say."""

from __future__ import annotations

import csv
import dataclasses
import os

import _timing
import bench_latency
import bench_machine
import bench_scaling
import pytest
import torch
from _learner_parts import Sizes, make_batch, make_parts, move_policy, set_gate, steps_beyond
from _scaling_point import PARTS, Point, make_learner


@pytest.fixture(autouse=True)
def _restore_threads():
    """The scripts pin the process to one thread and one CPU."""
    threads = torch.get_num_threads()
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    yield
    torch.set_num_threads(threads)
    if cpus is not None:
        os.sched_setaffinity(0, cpus)


@pytest.fixture
def small(monkeypatch):
    """A small point in place of the preset."""
    point = Point(
        num_envs=4, minibatch=16, num_steps=2, width=16, rollout_steps=3, epochs=2, obs=5, act=2
    )
    monkeypatch.setattr(Point, "preset", classmethod(lambda cls: point))
    monkeypatch.setattr(
        bench_scaling, "AXES", {"num_envs": (2, 4), "minibatch": (8,), "num_steps": (1, 2, 3)}
    )
    return point


def read(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_base_point_is_the_preset():
    assert Point.preset() == Point()


def test_scaling(small, tmp_path, capsys):
    out, png = tmp_path / "new" / "scaling.csv", tmp_path / "scaling.png"
    arguments = ["--axes", "num_envs", "minibatch", "num_steps", "--repeats", "1"]
    bench_scaling.main([*arguments, "--csv", str(out), "--plot", str(png)])
    rows = read(out)
    assert list(rows[0]) == ["axis", "value", "part", "us_per_frame"]
    points = [("num_envs", "2"), ("num_envs", "4"), ("minibatch", "8")]
    points += [("num_steps", str(n)) for n in (1, 2, 3)]
    assert [(row["axis"], row["value"], row["part"]) for row in rows] == [
        (*point, part) for point in points for part in PARTS
    ]
    assert all(float(row["us_per_frame"]) > 0 for row in rows)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "denoising steps N" in capsys.readouterr().out


def test_scaling_is_per_frame(small, monkeypatch):
    """Known times of a call: a frame's share of the batch, and as many updates as epochs."""
    monkeypatch.setattr(
        bench_scaling, "medians_ms", lambda functions, repeats: dict.fromkeys(functions, 1.0)
    )
    rows = bench_scaling.sweep("num_envs", (4,), 1)
    assert [row[3] for row in rows] == [1000 / 4, 1000 / 12, 2 * 1000 / 16]


def test_series_adds_the_parts():
    rows = [("width", 8, "acting", 1.0), ("width", 8, "update", 2.0), ("width", 16, "acting", 5.0)]
    assert bench_scaling.series(rows, "width") == ([8, 16], [3.0, 5.0])
    assert bench_scaling.series(rows, "width", "acting") == ([8, 16], [1.0, 5.0])


def test_learner_calls(small):
    learner = make_learner(small)
    assert set(learner.functions) == set(PARTS)
    assert 0 < learner.gate < 1 and 0 < learner.steps_beyond <= small.num_steps
    again = make_learner(small)
    assert (again.gate, again.steps_beyond) == (learner.gate, learner.steps_beyond)
    for function in learner.functions.values():
        function()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--plot", "picture.pdf"], "--plot must end in .png, got picture.pdf"),
        (["--axes", "depth"], "invalid choice: 'depth'"),
    ],
)
def test_scaling_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench_scaling.parse_args(arguments)
    assert message in capsys.readouterr().err


def test_machine(small, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_machine, "ROWS", (16, 32))
    out = tmp_path / "machine.csv"
    bench_machine.main(["--repeats", "1", "--csv", str(out)])
    rows = {row["part"]: row for row in read(out)}
    assert list(rows) == ["[16, 16] x [16, 16]", "[32, 16] x [16, 16]", *PARTS]
    fractions = [float(row["fraction_of_matmul"]) for row in rows.values()]
    assert max(fractions[:2]) == 1.0
    for part in PARTS:
        row = {key: float(rows[part][key]) for key in list(rows[part])[1:]}
        rate = 1e3 * row["mflop_per_frame"] / row["us_per_frame"]
        assert row["gflop_per_second"] == pytest.approx(rate, abs=0.01, rel=0.2)
    assert "inside the trust region" in capsys.readouterr().out


def test_matmul_rate(monkeypatch):
    """8192 rows in a millisecond, whatever the rows of a call."""
    monkeypatch.setattr(
        bench_machine, "medians_ms", lambda functions, repeats: dict.fromkeys(functions, 1.0)
    )
    rates = bench_machine.matmul_rates(8, 1)
    assert set(rates) == {(rows, 8, 8) for rows in bench_machine.ROWS}
    assert rates == pytest.approx(dict.fromkeys(rates, 2 * 8192 * 64 / 1e6))


def test_latency(monkeypatch, tmp_path):
    for name, value in (("BATCHES", (1, 3)), ("NUM_STEPS", (1, 2)), ("WIDTHS", (16,))):
        monkeypatch.setattr(bench_latency, name, value)
    monkeypatch.setattr(bench_latency, "QUICK_CALLS", {1: 3, 3: 2})
    out = tmp_path / "latency.csv"
    bench_latency.main(["--quick", "--csv", str(out)])
    rows = read(out)
    assert tuple(rows[0]) == bench_latency.HEADER
    assert len(rows) == 2 * 2 * 3
    assert {row["calls"] for row in rows} == {"3", "2"}
    assert all(0 < float(row["p50_us"]) <= float(row["p99_us"]) for row in rows)


def test_latency_calls_are_what_they_are_called():
    calls = bench_latency.make_calls(Sizes(5, 2, 16, num_steps=2), 3)
    with torch.no_grad():
        final = calls["model"]()[:, -1]
        assert torch.equal(calls["actor_deterministic"](), final.tanh())
        assert not torch.equal(calls["actor_random"](), calls["actor_random"]())


def test_medians_take_turns(monkeypatch):
    clock = iter([0.0, 9.0] * 2 + [0.0, 1.0, 0.0, 2.0] * 3)
    monkeypatch.setattr(_timing.time, "perf_counter", lambda: next(clock))
    order = []
    functions = {name: lambda name=name: order.append(name) for name in "ab"}
    assert _timing.medians_ms(functions, 3) == {"a": 1000.0, "b": 2000.0}
    assert order == list("abababab")


def test_percentiles(monkeypatch):
    clock = iter([t for i in range(101) for t in (0.0, i * 1e-6)])
    monkeypatch.setattr(_timing.time, "perf_counter", lambda: next(clock))
    calls = []
    p50, p99 = _timing.percentiles_us(lambda: calls.append(0), 101)
    assert (p50, p99) == pytest.approx((50.0, 99.0))
    assert len(calls) == 10 + 101


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_set_gate(share):
    actor, loss = make_parts(Sizes(5, 2, 16, num_steps=3))
    batch = make_batch(actor, 32)
    move_policy(loss, batch)
    set_gate(loss, batch, share)
    assert loss.actor_loss(batch)["gate_fraction"] == share


def test_steps_beyond_are_those_that_the_gate_evaluates(monkeypatch):
    actor, loss = make_parts(Sizes(5, 2, 16, num_steps=5))
    batch = make_batch(actor, 32)
    move_policy(loss, batch)
    expected = steps_beyond(loss, batch)
    forward, rows = actor.module.score_network.forward_projected, []

    def count(latent, *parts):
        rows.append(latent.shape[:-1].numel())
        return forward(latent, *parts)

    monkeypatch.setattr(actor.module.score_network, "forward_projected", count)
    within, beyond, _ = loss.trajectory_kl.split(batch)
    assert sum(rows) == pytest.approx(5 * len(within) + expected * len(beyond))
    assert expected < 5


def test_points_differ_in_one_axis():
    assert dataclasses.replace(Point(), num_steps=1).sizes == Sizes(num_steps=1)
