from __future__ import annotations

import dataclasses

import pytest

from torchrl_trudi.trainers.options import (
    convert,
    markdown_table,
    nearest,
    option,
    options,
    sections,
    text_table,
)


@dataclasses.dataclass
class Inner:
    size: int = option(4, "Width | height.", ge=1, lt=10)
    mode: str = option("on", "Mode.", choices=("on", "off"))


@dataclasses.dataclass
class Middle:
    inner: Inner = dataclasses.field(default_factory=Inner)


@dataclasses.dataclass
class Schema:
    rate: float | None = option(None, "Rate.", gt=0)
    extra: dict[str, int] = option(factory=dict, help="More.")
    middle: Middle = dataclasses.field(default_factory=Middle)


LEAVES = {leaf.key: leaf for leaf in options(Schema)}


def test_walk_keeps_order_and_resolves_types():
    assert list(LEAVES) == ["rate", "extra", "middle.inner.size", "middle.inner.mode"]
    assert [leaf.type_name for leaf in LEAVES.values()] == [
        "float or null",
        "mapping",
        "int",
        "str",
    ]
    assert sections(Schema) == ["middle", "middle.inner"]


def test_defaults_are_usable_and_not_shared():
    assert Schema().middle.inner.size == 4
    assert Schema().extra is not Schema().extra
    assert LEAVES["extra"].default == {}


@pytest.mark.parametrize(
    ("key", "value", "ok"),
    [
        ("middle.inner.size", 1, True),
        ("middle.inner.size", 9, True),
        ("middle.inner.size", 0, False),
        ("middle.inner.size", 10, False),
        ("middle.inner.mode", "off", True),
        ("middle.inner.mode", "of", False),
        ("rate", None, True),
        ("rate", 0.0, False),
        ("rate", 1e-9, True),
        ("rate", float("nan"), False),
        ("rate", float("inf"), False),
    ],
)
def test_problem_applies_bounds_and_choices(key, value, ok):
    problem = LEAVES[key].problem(value)
    assert (problem is None) == ok
    if not ok:
        assert key in problem and repr(value) in problem and "accepted" in problem


def test_problem_suggests_the_nearest_choice():
    assert "did you mean 'off'?" in LEAVES["middle.inner.mode"].problem("of")


@pytest.mark.parametrize(
    ("key", "given", "value"),
    [
        ("rate", "1.0e4", 1e4),
        ("rate", 2, 2.0),
        ("rate", None, None),
        ("middle.inner.size", "3", 3),
        ("extra", {"a": 1}, {"a": 1}),
        ("middle.inner.size", "${rate}", "${rate}"),
    ],
)
def test_convert(key, given, value):
    converted, problem = convert(LEAVES[key], given)
    assert problem is None
    assert converted == value and type(converted) is type(value)


@pytest.mark.parametrize(
    ("key", "given", "words"),
    [
        ("rate", "fast", ["a number", "or null", "> 0"]),
        ("middle.inner.size", "big", ["an integer"]),
        ("middle.inner.size", 3.0, ["an integer", "write 3"]),
        ("middle.inner.size", True, ["an integer"]),
        ("middle.inner.size", None, ["an integer"]),
        ("extra", 3, ["a mapping"]),
        ("extra", {"a": "x"}, ["a mapping"]),
    ],
)
def test_convert_says_what_is_accepted(key, given, words):
    converted, problem = convert(LEAVES[key], given)
    assert converted is None
    assert problem.startswith(f"{key}: got {given!r}, accepted: ")
    assert all(word in problem for word in words)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("polciy.num_steps", "policy.num_steps"),
        ("num_steps", "policy.num_steps"),
        ("polciy.num_layers", "policy.num_layers"),
        ("critc.num_layers", "critic.num_layers"),
        ("nmu_steps", "policy.num_steps"),
        ("xyzzy", None),
    ],
)
def test_nearest(given, name):
    known = ["seed", "critic.num_layers", "policy.num_layers", "policy.num_steps"]
    assert nearest(given, known) == name


def test_markdown_table_is_well_formed():
    lines = markdown_table(Schema).splitlines()
    assert len(lines) == 2 + len(LEAVES)
    # Pipes inside cells are escaped, so each row has the same number of columns.
    assert {line.replace("\\|", "").count("|") for line in lines} == {6}
    assert "Width \\| height." in lines[4]
    assert "| `4` | >= 1 and < 10 |" in lines[4]


def test_text_table_lists_key_default_and_help():
    text = text_table(Schema)
    assert "middle.inner.mode=on  (str, on | off)" in text
    assert "rate=null  (float or null, > 0)" in text
    assert "Width | height." in text
