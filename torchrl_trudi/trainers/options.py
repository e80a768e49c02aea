"""Options: dataclass fields that carry their own help text, choices and bounds.

A configuration is a tree of dataclasses whose leaves are made with :func:`option`. Everything that
needs to know about an option (validation, command-line checks, ``--help``, the documentation) reads
it from the field, so the four cannot drift apart.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException


class ConfigError(ValueError):
    """A configuration that cannot be run; the message has one line per problem."""


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    choices: tuple[str, ...] | None = None,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
) -> Any:
    """A dataclass field with its documentation and the values it accepts.

    Args:
        default: default value. Left out when ``factory`` is given.
        help: what the option does, in one or two sentences; shown by ``--help`` and in the docs.
        factory: makes the default value, for mutable defaults.
        choices: the accepted names.
        gt: exclusive lower bound.
        ge: inclusive lower bound.
        lt: exclusive upper bound.
        le: inclusive upper bound.

    Returns:
        The field. Typed ``Any`` so that it may stand as the default of a field of any type.
    """
    bounds = {">": gt, ">=": ge, "<": lt, "<=": le}
    metadata = {
        "help": help,
        "choices": choices,
        "bounds": {sign: bound for sign, bound in bounds.items() if bound is not None},
    }
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Option:
    """One leaf of a configuration schema.

    Args:
        key: dotted key, for instance ``"policy.num_steps"``.
        annotation: resolved type annotation of the field.
        field: the dataclass field.
    """

    key: str
    annotation: Any
    field: dataclasses.Field

    @property
    def help(self) -> str:
        """The documentation of the option."""
        return self.field.metadata.get("help", "")

    @property
    def choices(self) -> tuple[str, ...] | None:
        """The accepted names, or ``None`` when any value of the type is."""
        return self.field.metadata.get("choices")

    @property
    def bounds(self) -> dict[str, float]:
        """Bounds by comparison sign, for instance ``{">": 0}``."""
        return self.field.metadata.get("bounds", {})

    @property
    def default(self) -> Any:
        """The default value."""
        if self.field.default_factory is not dataclasses.MISSING:
            return self.field.default_factory()
        return self.field.default

    @property
    def nullable(self) -> bool:
        """Whether ``null`` is accepted."""
        return type(None) in typing.get_args(self.annotation)

    @property
    def is_mapping(self) -> bool:
        """Whether the option is a free-form mapping, which accepts keys of its own."""
        return dict in (self.annotation, typing.get_origin(self.annotation))

    @property
    def type_name(self) -> str:
        """The type, in the words of someone who writes YAML."""
        if self.is_mapping:
            return "mapping"
        union = (typing.Union, types.UnionType)
        members = (
            typing.get_args(self.annotation)
            if typing.get_origin(self.annotation) in union
            else (self.annotation,)
        )
        names = ["null" if m is type(None) else getattr(m, "__name__", str(m)) for m in members]
        return " or ".join(names)

    @property
    def accepts(self) -> str:
        """The accepted values in words; empty when any value of the type is accepted."""
        if self.choices is not None:
            return " | ".join(self.choices)
        return " and ".join(f"{sign} {bound:g}" for sign, bound in self.bounds.items())

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value of the right type.

        Args:
            value: the value, already converted to the type of the option.

        Returns:
            One line with what was given and what is accepted, or ``None`` when nothing is wrong.
        """
        if value is None and self.nullable:
            return None
        if self.choices is not None and value not in self.choices:
            hint = nearest(str(value), self.choices)
            return (
                f"{self.key}: got {value!r}"
                + (f" (did you mean {hint!r}?)" if hint else "")
                + f", accepted: {self.accepts}"
            )
        # NaN compares false with everything, so each test asks for the good case.
        tests: dict[str, Callable[[float, float], bool]] = {
            ">": lambda x, b: x > b,
            ">=": lambda x, b: x >= b,
            "<": lambda x, b: x < b,
            "<=": lambda x, b: x <= b,
        }
        if not all(tests[sign](value, bound) for sign, bound in self.bounds.items()):
            return f"{self.key}: got {value!r}, accepted: {self.accepts}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"{self.key}: got {value!r}, accepted: a finite number"
        return None


def options(schema: type, prefix: str = "") -> Iterator[Option]:
    """Walk over the leaves of a configuration schema, in the order of their declaration.

    Args:
        schema: a dataclass whose fields are leaves or dataclasses.
        prefix: put in front of every key, with its dot.

    Yields:
        Every leaf.
    """
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        annotation = hints[field.name]
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            yield from options(annotation, f"{prefix}{field.name}.")
        else:
            yield Option(f"{prefix}{field.name}", annotation, field)


def sections(schema: type) -> list[str]:
    """Dotted keys of the sections (nested dataclasses) of a schema.

    Args:
        schema: a dataclass whose fields are leaves or dataclasses.

    Returns:
        The keys, outer sections before the ones inside them.
    """
    keys: dict[str, None] = {}
    for leaf in options(schema):
        parts = leaf.key.split(".")[:-1]
        for depth in range(1, len(parts) + 1):
            keys[".".join(parts[:depth])] = None
    return list(keys)


def convert(leaf: Option, value: Any) -> tuple[Any, str | None]:
    """Convert a value to the type of an option, as OmegaConf does.

    Args:
        leaf: the option.
        value: the value as given; text such as ``"1.0e4"`` is read as a number where one is asked.

    Returns:
        The converted value, and one line that says what is wrong or ``None``. The value is
        ``None`` if it could not be converted.
    """
    if isinstance(value, str) and "${" in value:
        # An interpolation has no value before the whole configuration is composed.
        return value, None
    config = OmegaConf.structured(_single(leaf.annotation))
    try:
        OmegaConf.update(config, "value", value)
    except (OmegaConfBaseException, ValueError, TypeError):
        return None, f"{leaf.key}: got {value!r}, accepted: {describe(leaf, value)}"
    if leaf.is_mapping:
        return value, None
    return config.value, leaf.problem(config.value)


@functools.cache
def _single(annotation: Any) -> type:
    """A schema with one option: far cheaper to instantiate than a whole one."""
    # "???" is OmegaConf's mark of a missing value, good for every type.
    return dataclasses.make_dataclass(
        "Single",
        [("value", annotation, dataclasses.field(default="???"))],  # type: ignore[arg-type]
    )


def describe(leaf: Option, value: Any) -> str:
    """The accepted values of an option, with a hint for a common slip.

    Args:
        leaf: the option.
        value: the value that was refused because of its type.

    Returns:
        A phrase.
    """
    words = {
        "int": "an integer (int)",
        "float": "a number (float)",
        "bool": "true or false (bool)",
        "str": "text (str)",
        "null": "null",
        "mapping": "a mapping such as {key: value}",
        "list": "a list such as [a, b]",
    }
    phrase = " or ".join(words.get(name, name) for name in leaf.type_name.split(" or "))
    if leaf.accepts:
        phrase += f", {leaf.accepts}"
    try:
        number = float(value)
    except (TypeError, ValueError):
        return phrase
    if "int" in leaf.type_name and not isinstance(value, bool) and number.is_integer():
        phrase += f" (write {number:.0f})"
    return phrase


def nearest(given: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like a given one.

    A name whose last component is right (``num_steps`` or ``critic.num_steps`` for
    ``policy.num_steps``) is preferred to one that merely shares letters.

    Args:
        given: the name as written.
        known: the valid names.

    Returns:
        The nearest name, or ``None`` when nothing resembles it.
    """
    known = list(known)
    tail = given.rsplit(".", 1)[-1]
    same_tail = [name for name in known if name.rsplit(".", 1)[-1] == tail]
    if same_tail:
        return difflib.get_close_matches(given, same_tail, n=1, cutoff=0.0)[0]
    # A bare misspelt name has no section to compare: look at last components too.
    tails = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
    matches = difflib.get_close_matches(given, known, n=1, cutoff=0.6)
    if not matches and "." not in given:
        matches = [tails[t] for t in difflib.get_close_matches(given, tails, n=1, cutoff=0.6)]
    if not matches:
        matches = difflib.get_close_matches(given, known, n=1, cutoff=0.4)
    return matches[0] if matches else None


def format_value(value: Any) -> str:
    """A value as YAML writes it.

    Args:
        value: a leaf of a configuration.

    Returns:
        The text, for instance ``null`` for ``None`` and ``0.0003`` for ``3e-4``.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(format_value, value))}]"
    return str(value)


def markdown_table(schema: type) -> str:
    """Document a configuration schema.

    Args:
        schema: a dataclass whose fields are leaves or dataclasses.

    Returns:
        A Markdown table with one row per option.
    """
    rows = ["| option | type | default | accepted | meaning |", "| --- | --- | --- | --- | --- |"]
    for leaf in options(schema):
        accepts = ", ".join(f"`{c}`" for c in leaf.choices) if leaf.choices else leaf.accepts
        cells = [f"`{leaf.key}`", leaf.type_name, f"`{format_value(leaf.default)}`", accepts]
        cells.append(leaf.help)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def text_table(schema: type, indent: str = "  ", width: int = 100) -> str:
    """Document a configuration schema for a terminal.

    Args:
        schema: a dataclass whose fields are leaves or dataclasses.
        indent: put in front of every line.
        width: lines are wrapped at this many characters.

    Returns:
        Two or more lines per option: ``key=default`` with the accepted values, then the help text.
    """
    import textwrap

    lines = []
    for leaf in options(schema):
        accepts = f", {leaf.accepts}" if leaf.accepts else ""
        lines.append(
            f"{indent}{leaf.key}={format_value(leaf.default)}  ({leaf.type_name}{accepts})"
        )
        lines += textwrap.wrap(
            leaf.help, width, initial_indent=indent + "    ", subsequent_indent=indent + "    "
        )
    return "\n".join(lines) + "\n"
