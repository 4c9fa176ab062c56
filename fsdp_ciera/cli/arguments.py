"""What the command lines read numbers with: wrong ones are said in one line by argparse."""

from __future__ import annotations

import argparse
from math import isfinite


def count(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
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
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number


def positive(text: str) -> float:
    """A finite number above 0."""
    number = not_negative(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return number
