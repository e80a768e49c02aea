"""The rows of a benchmark and its cells on disk."""

from __future__ import annotations

import dataclasses
import os

import pytest

from torchrl_trudi.record import ScalarWriter
from torchrl_trudi.record.benchmark import (
    COLUMNS,
    BenchmarkDataError,
    Row,
    merge_rows,
    read_rows,
    run_rows,
    training_seconds,
    write_rows,
)
from torchrl_trudi.record.benchmark_cells import (
    Attempt,
    Cell,
    CellLocked,
    CellRecord,
    cells_in,
    trained_frames,
)

WHERE = {"task": "Hopper-v5", "arm": "trudi", "seed": 0}


def row(frames=100, seed=0, value=1.0, **changes):
    base = Row("Hopper-v5", "trudi", seed, frames, value, 2.0, 3.0, "abc")
    return dataclasses.replace(base, **changes)


def write_run(path, *, seconds=True, evaluations=(100, 300)):
    """A run of four iterations at 10, 20, 10 and 20 frames per second."""
    with ScalarWriter(path) as writer:
        total = 0.0
        for frames, speed in ((100, 10.0), (200, 20.0), (300, 10.0), (400, 20.0)):
            total += 100 / speed
            scalars = {"time/frames_per_second": speed}
            if seconds:
                scalars["time/seconds"] = total
            writer.write(frames, scalars)
            if frames in evaluations:
                writer.write(frames, {"eval/return_deterministic": frames + 0.123456})
                writer.write(frames, {"eval/return_stochastic": float(frames)})
    return path


def test_columns():
    assert (
        *("task", "arm", "seed", "frames", "return_deterministic", "return_stochastic"),
        *("wall_s", "commit"),
    ) == COLUMNS


class TestRunRows:
    @pytest.mark.parametrize("seconds", [True, False], ids=["logged", "reconstructed"])
    def test_rows(self, tmp_path, seconds):
        rows = run_rows(write_run(tmp_path, seconds=seconds), **WHERE, commits=[(0, "abc")])
        assert [(r.frames, r.return_deterministic, r.return_stochastic) for r in rows] == [
            (100, 100.1235, 100.0),
            (300, 300.1235, 300.0),
        ]
        assert [r.wall_s for r in rows] == [10.0, 25.0]

    def test_time_logged_only_later(self, tmp_path):
        """A run of an older version, continued by this one: what it logs is cumulative."""
        with ScalarWriter(tmp_path) as writer:
            writer.write(100, {"time/frames_per_second": 10.0})
            writer.write(200, {"time/frames_per_second": 10.0, "time/seconds": 21.0})
            writer.write(300, {"time/frames_per_second": 10.0})
        frames, seconds = training_seconds(tmp_path)
        assert (frames.tolist(), seconds.tolist()) == ([100, 200, 300], [10.0, 21.0, 31.0])

    def test_each_row_has_the_commit_that_made_it(self, tmp_path):
        run = write_run(tmp_path, evaluations=(100, 200, 300, 400))
        rows = run_rows(run, **WHERE, commits=[(0, "a"), (200, "b")])
        assert [r.commit for r in rows] == ["a", "a", "b", "b"]

    def test_half_an_evaluation_is_none(self, tmp_path):
        run = write_run(tmp_path)
        with (run / "scalars.csv").open("a") as file:
            file.write("400,eval/return_deterministic,1.0\n")
        assert [r.frames for r in run_rows(run, **WHERE, commits=[(0, "a")])] == [100, 300]

    def test_no_evaluation(self, tmp_path):
        assert run_rows(write_run(tmp_path, evaluations=()), **WHERE, commits=[(0, "a")]) == []

    def test_no_time(self, tmp_path):
        with ScalarWriter(tmp_path) as writer:
            names = ("deterministic", "stochastic")
            writer.write(100, {f"eval/return_{name}": 1.0 for name in names})
        with pytest.raises(BenchmarkDataError, match="neither time/seconds nor"):
            run_rows(tmp_path, **WHERE, commits=[(0, "a")])


class TestFile:
    def test_round_trip_sorts(self, tmp_path):
        path = tmp_path / "new" / "data.csv"
        rows = [row(1000), row(200), row(200, seed=1), row(100, arm="reppo")]
        write_rows(path, rows)
        assert read_rows(path) == sorted(rows)
        assert path.read_text().splitlines()[:2] == [
            "task,arm,seed,frames,return_deterministic,return_stochastic,wall_s,commit",
            "Hopper-v5,reppo,0,100,1.0,2.0,3.0,abc",
        ]
        assert [each.name for each in path.parent.iterdir()] == ["data.csv"]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a,b\n", "line 1"),
            (",".join(COLUMNS) + "\nHopper-v5,trudi,0,x,1,2,3,abc\n", "line 2"),
            (",".join(COLUMNS) + "\nHopper-v5,trudi,0,1,2,3,abc\n", "line 2"),
            (
                ",".join(COLUMNS) + "\n" + "Hopper-v5,trudi,0,1,1,2,3,abc\n" * 2,
                "line 3: a second row",
            ),
        ],
    )
    def test_errors_name_the_line(self, tmp_path, text, message):
        path = tmp_path / "data.csv"
        path.write_text(text)
        with pytest.raises(BenchmarkDataError, match=message):
            read_rows(path)


class TestMerge:
    def test_rows_of_other_cells_stay(self):
        old, new = [row(100), row(100, seed=1)], [row(100), row(200)]
        assert merge_rows(old, new) == [row(100), row(200), row(100, seed=1)]

    def test_conflict(self):
        with pytest.raises(BenchmarkDataError, match=r"Hopper-v5, trudi, seed 0, 100 frames: 1\.0"):
            merge_rows([row(100)], [row(100, value=5.0)])
        with pytest.raises(BenchmarkDataError, match="def in the run"):
            merge_rows([row(100)], [row(100, commit="def")])

    def test_replace_drops_the_whole_cell(self):
        old = [row(100), row(200), row(100, seed=1)]
        new = [row(100, value=5.0)]
        assert merge_rows(old, new, replace=True) == [row(100, value=5.0), row(100, seed=1)]

    def test_nan_is_no_conflict(self):
        bad = row(value=float("nan"))
        assert len(merge_rows([bad], [row(value=float("nan"))])) == 1


@pytest.fixture
def cell(tmp_path):
    return Cell(tmp_path, "hopper", "trudi", 0)


def record(*attempts):
    return CellRecord("Hopper-v5", "hopper", "trudi", 0, "finished", 400, {}, attempts=[*attempts])


class TestCells:
    def test_record_round_trip(self, cell):
        assert cell.read() is None
        made = record(Attempt("abc", ["python"], 0, "run", {"torch": "2"}, wall_clock_s=1.5))
        cell.write(made)
        assert cell.read() == made
        assert '"commit": "abc"' in (cell.path / "cell.json").read_text()

    @pytest.mark.parametrize("text", ["", "{}", "[]", '{"attempts": [], "status": "done"}'])
    def test_damaged_record(self, cell, text):
        cell.path.mkdir(parents=True)
        (cell.path / "cell.json").write_text(text)
        with pytest.raises(BenchmarkDataError, match=r"cell\.json"):
            cell.read()

    def test_rows_come_from_the_last_run(self, cell):
        write_run(cell.path / "run", evaluations=(100, 200))
        write_run(cell.path / "run-1", evaluations=(300, 400))
        attempts = [Attempt("a", None, 0, "run", {}), Attempt("b", None, 0, "run-1", {})]
        attempts.append(Attempt("c", None, 300, "run-1", {}))
        found = cell.rows(record(*attempts))
        assert [(r.frames, r.commit) for r in found] == [(300, "b"), (400, "c")]
        assert cell.new_run_dir().name == "run-2"

    def test_lock(self, cell):
        with cell.locked(), pytest.raises(CellLocked, match="hopper/trudi/seed0"):
            cell.lock()
        os.close(cell.lock())

    def test_cells_in(self, tmp_path, cell):
        for name in ("hopper/trudi/seed10", "hopper/trudi/seed2", "hopper/trudi/seedX", "a/b/c"):
            (tmp_path / name).mkdir(parents=True)
        assert [each.seed for each in cells_in(tmp_path)] == [2, 10]
        with pytest.raises(FileNotFoundError):
            cells_in(tmp_path / "nowhere")

    def test_trained_frames(self, tmp_path):
        assert trained_frames(tmp_path) == (0, 0)
        for name in ("checkpoint-000000000200", "checkpoint-000000000300", "checkpoint-tmp"):
            (tmp_path / "checkpoints" / name).mkdir(parents=True)
        assert trained_frames(tmp_path) == (300, 0)
        assert trained_frames(write_run(tmp_path)) == (300, 300)
