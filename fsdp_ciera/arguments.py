"""Readers of values on command lines. Their errors are one line, and help shows values as a user writes them."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Annotated, Any, TypeVar

from tyro.conf import UseAppendAction, arg
from tyro.constructors import PrimitiveConstructorSpec

from fsdp_ciera.errors import UnitError

T = TypeVar("T")


def count(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise UnitError(f"{text!r} is not a whole number of at least 1")
    return number


def count_or_zero(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if text == "0" else count(text)


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not (isfinite(number) and number >= 0):
        raise UnitError(f"{text!r} is not a number of at least 0")
    return number


def positive(text: str) -> float:
    """A finite number above 0."""
    number = not_negative(text)
    if number <= 0:
        raise UnitError(f"{text!r} is not above 0")
    return number


def _read_with(
    read: Callable[[str], T], metavar: str, write: Callable[[T], str] = "{:g}".format
) -> PrimitiveConstructorSpec[T]:
    """How tyro reads and shows one word."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: isinstance(value, (int, float)),
        str_from_instance=lambda value: [write(value)],
    )


Count = Annotated[int, _read_with(count, "N", str)]
CountOrZero = Annotated[int, _read_with(count_or_zero, "N", str)]
NotNegative = Annotated[float, _read_with(not_negative, "NUMBER")]
Positive = Annotated[float, _read_with(positive, "NUMBER")]

Overrides = Annotated[tuple[str, ...], arg(name="set", metavar="SECTION.KEY=VALUE"), UseAppendAction]
"""`--set` of the commands that read a recipe."""


def named(name: str | None = None, metavar: str | None = None) -> Any:
    """For `Annotated`: names the flag, where the field's own name does not do, and its value in help."""
    return arg(name=name, metavar=metavar)
