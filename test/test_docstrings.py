"""The examples in the docstrings run, and every public name has a docstring."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

import torchrl_trudi

MODULES = sorted(
    [
        torchrl_trudi.__name__,
        *(
            info.name
            for info in pkgutil.walk_packages(torchrl_trudi.__path__, f"{torchrl_trudi.__name__}.")
        ),
    ]
)


def public(name: str) -> dict[str, object]:
    """Classes and functions in the ``__all__`` of a module."""
    module = importlib.import_module(name)
    objects = {each: getattr(module, each) for each in getattr(module, "__all__", ())}
    return {
        each: value
        for each, value in objects.items()
        if inspect.isclass(value) or inspect.isroutine(value)
    }


def test_all_packages_are_walked():
    packages = {name.split(".")[1] for name in MODULES if "." in name}
    assert packages >= {"envs", "export", "modules", "objectives", "record", "trainers"}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples failed"


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    count = sum(
        len(case.examples)
        for name in MODULES
        for case in finder.find(importlib.import_module(name))
    )
    assert count > 50


@pytest.mark.parametrize("name", MODULES)
def test_public_names_have_docstrings(name):
    for each, value in public(name).items():
        # A dataclass without one gets its signature, and a subclass would show its parent's.
        own = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
        assert own and own.strip(), f"{name}.{each} has no docstring"
        assert not own.startswith(f"{each}("), f"{name}.{each} has a generated docstring"


@pytest.mark.parametrize("name", MODULES)
def test_public_methods_have_docstrings(name):
    for each, value in public(name).items():
        if not inspect.isclass(value) or value.__module__ != name:
            continue
        for attribute, member in vars(value).items():
            if attribute.startswith("_") or not (
                inspect.isfunction(member)
                or isinstance(member, (property, classmethod, staticmethod))
            ):
                continue
            if attribute == "extra_repr":
                continue
            assert inspect.getdoc(getattr(value, attribute)), (
                f"{name}.{each}.{attribute} has no docstring"
            )
