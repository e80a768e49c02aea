"""Command-line checks that answer a slip with one line instead of a traceback."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.errors import HydraException

from torchrl_trudi.trainers.config import CHOICES, TrainConfig
from torchrl_trudi.trainers.options import ConfigError, convert, nearest, options, sections

# Flags of Hydra that take the next word as their value.
_VALUE_FLAGS = {"--cfg", "-c", "--package", "-p", "--experimental-rerun", "--info", "-i"}
# Flags that change which configuration is composed, or that belong to the shell: the schema says
# nothing about those calls, and Hydra answers for itself.
_OPAQUE_FLAGS = {
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    *("--shell-completion", "-sc", "--hydra-help", "--version"),
}


def check_overrides(
    argv: Sequence[str],
    schema: type = TrainConfig,
    config_dir: str | Path | None = None,
    prog: str | None = None,
) -> None:
    """Check command-line overrides before Hydra composes the configuration.

    Unknown keys, unknown presets and values of the wrong type or outside the accepted range end the
    process with code 2 and one line on stderr for each; good overrides, and everything that belongs
    to Hydra (flags, ``hydra.*``, ``+key=value``, ``~key``), pass.

    Args:
        argv: the arguments, without the name of the script (``sys.argv[1:]``).
        schema: dataclass of the options.
        config_dir: directory of the Hydra config files; each directory in it is a group of presets.
        prog: name of the script in messages; by default that of the running one.

    Raises:
        SystemExit: with code 2 if an override is wrong.
    """
    problems = find_problems(argv, schema, config_dir)
    if problems:
        _exit(problems, prog)


def find_problems(
    argv: Sequence[str], schema: type = TrainConfig, config_dir: str | Path | None = None
) -> list[str]:
    """The problems of command-line overrides, for callers that do not want to exit.

    Args:
        argv: the arguments, without the name of the script.
        schema: dataclass of the options.
        config_dir: directory of the Hydra config files; each directory in it is a group of presets.

    Returns:
        One line for each wrong override.
    """
    if any(word.split("=", 1)[0] in _OPAQUE_FLAGS for word in argv):
        return []
    groups = (
        _groups(config_dir) if schema is not TrainConfig else {**_groups(config_dir), **CHOICES}
    )
    parser = OverridesParser.create()
    problems = []
    for word in _override_words(argv):
        try:
            override = parser.parse_override(word)
        except HydraException:
            problems.append(f"cannot read {word!r}, accepted: OPTION=VALUE")
            continue
        problem = _check(override, word, schema, groups)
        if problem:
            problems.append(problem)
    return problems


@contextlib.contextmanager
def exit_on_config_error(prog: str | None = None) -> Iterator[None]:
    """Context of a script in which a :class:`ConfigError` ends the process without a traceback.

    Args:
        prog: name of the script in messages; by default that of the running one.

    Raises:
        SystemExit: with code 2, and the problems on stderr, one a line.
    """
    try:
        yield
    except ConfigError as error:
        _exit(str(error).splitlines(), prog)


def _exit(problems: Sequence[str], prog: str | None) -> NoReturn:
    name = Path(sys.argv[0]).name if prog is None else prog
    for problem in problems:
        # An indented line belongs to the one before it.
        prefix = "" if problem.startswith(" ") else f"{name}: error: "
        sys.stderr.write(f"{prefix}{problem}\n")
    raise SystemExit(2)


def _groups(config_dir: str | Path | None) -> dict[str, list[str]]:
    """Presets by group: the YAML files of each directory in ``config_dir``."""
    if config_dir is None:
        return {}
    folders = [path for path in sorted(Path(config_dir).iterdir()) if path.is_dir()]
    return {
        folder.name: sorted(path.stem for path in folder.glob("*.y*ml"))
        for folder in folders
        if folder.name != "hydra"
    }


def _override_words(argv: Sequence[str]) -> list[str]:
    """The words that are overrides: no flag, and no value of a flag."""
    words = []
    skip = False
    for word in argv:
        if skip:
            # ``--info`` takes an optional value; an override after it is not one.
            skip = False
            if "=" not in word:
                continue
        if word.startswith("-"):
            skip = word in _VALUE_FLAGS
            continue
        words.append(word)
    return words


def _check(
    override: Override, word: str, schema: type, groups: Mapping[str, Sequence[str]]
) -> str | None:
    key = override.key_or_group
    if key.split(".", 1)[0].split("/", 1)[0] == "hydra" or override.is_delete():
        return None
    if key in groups:
        return _check_preset(key, override, groups[key], sections(schema))
    leaves = {leaf.key: leaf for leaf in options(schema)}
    inner = sections(schema)
    if key not in leaves:
        if override.is_add() or override.is_force_add():
            # Where a new key may go is Hydra's to say.
            return None
        parent = key.rsplit(".", 1)[0]
        while parent not in leaves and "." in parent:
            parent = parent.rsplit(".", 1)[0]
        if parent in leaves and leaves[parent].is_mapping:
            return f"{key}: not set yet, add it with +{word}"
        if key in inner:
            return _check_section(key, override, schema)
        hint = nearest(key, [*leaves, *inner, *groups])
        if hint:
            return f"unknown option {key!r}, did you mean {hint!r}?"
        top = dict.fromkeys([*groups, *(known.split(".")[0] for known in leaves)])
        return f"unknown option {key!r}, accepted: {', '.join(top)} (see --help)"
    leaf = leaves[key]
    values = _values(override)
    adds = override.is_add() or override.is_force_add()
    if leaf.is_mapping and not adds and any(isinstance(v, dict) and v for v in values):
        return f"{key}: add its entries with +{word}"
    for value in values:
        _, problem = convert(leaf, value)
        if problem:
            return problem
    return None


def _check_preset(
    group: str, override: Override, names: Sequence[str], inner: Container[str]
) -> str | None:
    for value in _values(override):
        if group in inner and not isinstance(value, str):
            # Hydra takes names alone where there are presets.
            return (
                f"{group}: got {value!r}, accepted: {', '.join(names)}; set its options one by one, "
                f"{group}.OPTION=VALUE"
            )
        for name in value if isinstance(value, list) else [value]:
            # With or without the extension, as Hydra reads it.
            stem = str(name).removesuffix(".yaml").removesuffix(".yml")
            if name is not None and stem not in names:
                hint = nearest(stem, names)
                return (
                    f"{group}: unknown preset {str(name)!r}"
                    + (f", did you mean {hint!r}?" if hint else "")
                    + f" (accepted: {', '.join(names)})"
                )
    return None


def _check_section(section: str, override: Override, schema: type) -> str | None:
    """A whole section given as a mapping: each of its entries is checked as an option."""
    leaves = {leaf.key: leaf for leaf in options(schema)}
    for value in _values(override):
        if not isinstance(value, dict):
            first = next(key for key in leaves if key.startswith(f"{section}."))
            return f"{section}: got {value!r}, but it is a section; set one of its options, such as {first}=..."
        for name, entry in value.items():
            key = f"{section}.{name}"
            if key not in leaves:
                hint = nearest(key, leaves)
                return f"unknown option {key!r}" + (f", did you mean {hint!r}?" if hint else "")
            _, problem = convert(leaves[key], entry)
            if problem:
                return problem
    return None


def _values(override: Override) -> list[Any]:
    """The values of an override; several for a choice sweep, none for a sweep that has no list."""
    if not override.is_sweep_override():
        return [override.value()]
    sweep = override.value()
    if isinstance(sweep, ChoiceSweep):
        return [value.text if isinstance(value, QuotedString) else value for value in sweep.list]
    return []
