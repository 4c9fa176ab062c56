"""Checks values against type hints: what a recipe key may hold is written once, as the annotation of its field.

Understood hints: `bool`, `int`, `float`, `str`, `None`, `Literal[...]`, `tuple[T, ...]`, unions of them, and
`Annotated[int | float, Range(...)]`. Whatever is not allowed raises `RecipeError` with one line that names the key,
what was given and what is allowed.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from fsdp_ciera.errors import RecipeError


class Range(NamedTuple):
    """The numbers a key allows: `low <= value <= high`, or `low < value` with `above`."""

    low: float
    high: float = math.inf
    above: bool = False

    def allows(self, value: float) -> bool:
        """Whether `value` is in the range."""
        return (value > self.low if self.above else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        upper = "" if self.high == math.inf else f" and at most {self.high}"
        return f"{'above' if self.above else 'of at least'} {self.low}{upper}"


class _Rejected(Exception):
    """The value does not fit the hint; the message is filled in where the key is known."""


def check(hint: Any, value: object, key: str) -> Any:
    """`value` as the hint wants it (int -> float, list -> tuple, a lone value -> tuple of one), or `RecipeError`."""
    try:
        return _convert(hint, value)
    except _Rejected:
        raise RecipeError(f"{key}: got {_show(value)}, allowed: {describe(hint)}") from None


def describe(hint: Any) -> str:
    """The hint in words, as it ends an error line."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kind, limits = arguments
        return f"{describe(kind)} {limits}"
    if origin is Literal:
        return "one of " + ", ".join(_show(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(member) for member in arguments if member is not type(None))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"a list, each {describe(arguments[0])}"
        return f"a list of {len(arguments)}, each {describe(arguments[0])}"
    return {bool: "true or false", int: "an integer", float: "a number", str: "a non-empty string"}[hint]


def suggest(name: str, allowed: Iterable[str]) -> str:
    """`" (did you mean 'steps'?)"` for the nearest allowed name, or nothing when none is near."""
    nearest = difflib.get_close_matches(name, list(allowed), n=1)
    return f" (did you mean '{nearest[0]}'?)" if nearest else ""


def hints(section: type[Section]) -> Mapping[str, Any]:
    """Field name -> type hint of one section, annotations resolved."""
    resolved = get_type_hints(section, include_extras=True)
    return {field.name: resolved[field.name] for field in fields(section)}


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of the recipe's sections: every value is checked on construction, from a file or from Python alike."""

    def __post_init__(self) -> None:
        for name, hint in hints(type(self)).items():
            object.__setattr__(self, name, check(hint, getattr(self, name), f"{section_name(type(self))}.{name}"))


S = TypeVar("S", bound=Section)


def section_name(section: type[Section]) -> str:
    """`Data` -> `"data"`: the table's name in the file."""
    return section.__name__.lower()


def build(section: type[S], table: object) -> S:
    """One section from its TOML table. Raises `RecipeError` for unknown or missing keys, and values that are not allowed."""
    name = section_name(section)
    if not isinstance(table, dict):
        raise RecipeError(f"{name}: got {_show(table)}, allowed: a table, written as [{name}]")
    allowed = {field.name: field for field in fields(section)}
    for key in table:
        if key not in allowed:
            raise RecipeError(
                f"{name}.{key} is not a key{suggest(key, allowed)}; allowed in [{name}]: {', '.join(allowed)}"
            )
    for key, field in allowed.items():
        if key not in table and _is_required(field):
            raise RecipeError(f"{name}.{key} is missing; required: {describe(hints(section)[key])}")
    return section(**table)


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _convert(hint: Any, value: object) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kind, limits = arguments
        number = _convert(kind, value)
        return number if limits.allows(number) else _reject()
    if origin is Literal:
        # True == 1 in Python, so that the types are compared too.
        return value if any(value == choice and type(value) is type(choice) for choice in arguments) else _reject()
    if origin in (Union, types.UnionType):
        for member in arguments:
            try:
                return _convert(member, value)
            except _Rejected:
                continue
        _reject()
    if origin is tuple:
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        if arguments[-1] is Ellipsis:
            return tuple(_convert(arguments[0], item) for item in items)
        if len(items) != len(arguments):
            _reject()
        return tuple(_convert(kind, item) for kind, item in zip(arguments, items, strict=True))
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if hint is str and isinstance(value, str):
        return value if value else _reject()
    if hint in (bool, int, types.NoneType) and type(value) is hint:
        return value
    return _reject()


def _reject() -> Any:
    raise _Rejected


def _show(value: object) -> str:
    """A value as TOML would write it, near enough for an error line."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return '"' + value + '"'
        case list() | tuple():
            return "[" + ", ".join(map(_show, value)) + "]"
        case dict():
            return "a table"
        case _:
            return str(value)
