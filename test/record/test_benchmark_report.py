"""Aggregates and the report, on made-up data."""

from __future__ import annotations

import numpy as np
import pytest

from torchrl_trudi.record.benchmark import BenchmarkDataError, Row
from torchrl_trudi.record.benchmark_aggregates import (
    Anchor,
    compare,
    improvement_probability,
    iqm,
    normalized_scores,
    performance_profile,
    probability_of_improvement,
    read_anchors,
)
from torchrl_trudi.record.benchmark_report import PICTURES, write_report

metrics = pytest.importorskip("rliable.metrics", reason="needs the extra benchmark")

ANCHORS = {"A-v5": Anchor(10.0, 110.0, "one"), "B-v5": Anchor(0.0, 2.0, "two")}


def run(task, arm, seed, scores, step=100):
    return [
        Row(task, arm, seed, step * (i + 1), score, -score, 36.0 * (i + 1), "abc")
        for i, score in enumerate(scores)
    ]


def data():
    """Five seeds of two arms on two tasks; reppo's seed 4 on B is short, none is on B for ppo."""
    rows = []
    for seed in range(5):
        rows += run("A-v5", "trudi", seed, [10.0, 20.0 + 10 * seed, 100.0])
        rows += run("A-v5", "reppo", seed, [10.0, 15.0 + 10 * seed])
        rows += run("A-v5", "ppo", seed, [0.0, 0.0])
        rows += run("B-v5", "trudi", seed, [0.5 * seed, 3.0])
        rows += run("B-v5", "reppo", seed, [0.25, 3.0] if seed < 4 else [0.25])
    return rows


class TestCompare:
    def test_equal_frames(self):
        found = compare(data())
        assert found.arms == ["trudi", "ppo", "reppo"]
        assert found.frames == {"A-v5": 200, "B-v5": 100}
        assert found.scores["A-v5"]["trudi"] == {0: 20.0, 1: 30.0, 2: 40.0, 3: 50.0, 4: 60.0}
        assert found.at["B-v5"]["trudi"] == (100, 100)
        assert found.missing == [("B-v5", "ppo", seed) for seed in range(5)]

    def test_choices(self):
        found = compare(data(), arms=["trudi"], tasks=["A-v5"], returns="stochastic")
        assert found.frames == {"A-v5": 300}
        assert found.scores["A-v5"]["trudi"][0] == -100.0
        assert compare(data(), arms=["trudi"], frames=150).scores["A-v5"]["trudi"][4] == 10.0

    def test_the_evaluation_before(self):
        """Runs with other frames are compared at their last evaluation up to the common ones."""
        rows = run("A-v5", "trudi", 0, [1.0, 2.0], 100) + run("A-v5", "sb3", 0, [3.0, 4.0], 90)
        found = compare(rows)
        assert found.frames == {"A-v5": 180}
        assert found.scores["A-v5"] == {"trudi": {0: 1.0}, "sb3": {0: 4.0}}
        assert found.at["A-v5"] == {"trudi": (100, 100), "sb3": (180, 180)}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"arms": ["tru"]}, "arm: got 'tru', the data has: trudi, ppo, reppo"),
            ({"tasks": ["C-v5"]}, "task: got 'C-v5'"),
            ({"returns": "best"}, "returns: got 'best'"),
        ],
    )
    def test_errors(self, options, message):
        with pytest.raises(BenchmarkDataError, match=message):
            compare(data(), **options)

    def test_nothing(self):
        with pytest.raises(BenchmarkDataError, match="no evaluations"):
            compare([])


class TestAggregates:
    def test_iqm_in_closed_form(self):
        """Of 5 x 2 sorted entries, two are cut at either end."""
        scores = np.arange(10.0).reshape(5, 2) ** 2
        found = iqm(scores, reps=200)
        assert found.point == pytest.approx(np.mean([4, 9, 16, 25, 36, 49]))
        assert found.low < found.point < found.high
        # With three seeds nothing is cut.
        assert iqm(np.array([[0.0], [1.0], [11.0]]), reps=10).point == 4.0

    def test_seeded_by_its_name_alone(self):
        scores = np.arange(6.0).reshape(6, 1)
        np.random.seed(1)
        before = np.random.get_state()[1].copy()
        first = iqm(scores, reps=50, name="x")
        np.testing.assert_array_equal(before, np.random.get_state()[1])
        np.random.seed(2)
        assert iqm(scores, reps=50, name="x") == first != iqm(scores, reps=50, name="y")

    def test_one_seed_has_no_interval(self):
        found = iqm(np.array([[3.0, 5.0]]))
        assert found.point == 4.0 and np.isnan([found.low, found.high]).all()

    def test_normalized(self):
        found = normalized_scores(compare(data()), ANCHORS, ["A-v5", "B-v5"])
        assert set(found) == {"trudi", "reppo"}
        np.testing.assert_allclose(found["trudi"][1], [0.2, 0.25])

    def test_profile(self):
        scores = np.array([[0.1, 0.4], [0.6, 0.9]])
        point, low, high = performance_profile(scores, np.array([0.0, 0.5, 1.0]), reps=50)
        np.testing.assert_array_equal(point, [1.0, 0.5, 0.0])
        assert (low <= point).all() and (point <= high).all()

    def test_improvement_is_rliable_s(self):
        rng = np.random.RandomState(0)
        x, y = rng.randint(0, 4, (5, 3)) * 1.0, rng.randint(0, 4, (4, 3)) * 1.0
        found = improvement_probability(x, y)
        assert found == pytest.approx(metrics.probability_of_improvement(x, y))
        assert improvement_probability(y, x) == pytest.approx(1 - found)

    def test_improvement_on_common_tasks(self):
        estimate, tasks = probability_of_improvement(compare(data()), "trudi", "ppo", reps=20)
        assert (estimate.point, tasks) == (1.0, ["A-v5"])


class TestReport:
    def test_report(self, tmp_path):
        rows = data()
        path = write_report(tmp_path, rows, compare(rows), ANCHORS, reps=50, source="x/data.csv")
        text = path.read_text()
        # IQM of 20, 30, 40, 50, 60: one is cut at either end.
        assert "| trudi | 40 [" in text and "A-v5, 200 frames" in text
        assert "missing |" in text
        assert "Left out, for having none: ppo." in text
        assert "Missing cells (5): B-v5/ppo/seed 0" in text
        assert "| A-v5 | trudi | 5 | 0, 1, 2, 3, 4 | 200 | 300 | 0.03 | abc |" in text
        assert "| A-v5 | 10 | 110 | one | 200 |" in text
        for name in PICTURES:
            assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
            assert f"]({name})" in text

        # The same again, byte by byte.
        before = {name: (tmp_path / name).read_bytes() for name in ("report.md", *PICTURES)}
        write_report(tmp_path, rows, compare(rows), ANCHORS, reps=50, source="x/data.csv")
        assert before == {name: (tmp_path / name).read_bytes() for name in before}

    def test_little_data(self, tmp_path):
        """One arm and one seed, on a task without an anchor."""
        rows = run("C-v5", "reppo", 0, [1.0])
        text = write_report(tmp_path, rows, compare(rows), ANCHORS).read_text()
        assert "| reppo | 1, 1 seed |" in text
        assert "No anchors, so not in this section: C-v5." in text
        assert "`trudi` is not among those compared" in text
        assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "report.md"]

    def test_nobody_else_s_files(self, tmp_path):
        (tmp_path / "report.md").write_text("mine")
        rows = run("A-v5", "trudi", 0, [1.0])
        with pytest.raises(BenchmarkDataError, match=r"report\.md and no benchmark report"):
            write_report(tmp_path, rows, compare(rows), ANCHORS)
        assert (tmp_path / "report.md").read_text() == "mine"


def test_anchors(tmp_path):
    path = tmp_path / "anchors.csv"
    path.write_text("task,random,reference,note\nA-v5,1,2.5,x\n")
    assert read_anchors(path) == {"A-v5": Anchor(1.0, 2.5, "x")}
    path.write_text("task,random,reference,note\nA-v5,1,1,x\n")
    with pytest.raises(BenchmarkDataError, match="line 2"):
        read_anchors(path)
