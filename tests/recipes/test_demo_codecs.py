"""What benchmarks/demo_codecs.py makes of its figures; the runs themselves take minutes and are not tests."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from places import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

from demo_codecs import CODECS, MARKS, STOCK, Measured, Setting, draw, is_reached, recipe_of, settings_of, table_of

SETTING = Setting(codec="value_delta", num_micro_batches=1, lr=1e-5, root_is_freed=True)
RUN = Measured(
    setting=SETTING,
    raw_bytes=[1000, 1000, 1000, 3000],
    wire_bytes=[1000, 500, 10, 30],
    cache_bytes=7,
    seconds_per_step=1.0,
    same_bits=True,
)


def test_the_first_two_steps_do_not_count() -> None:
    assert RUN.ratio == 100
    assert RUN.ratios == [1, 2, 100, 100]


def test_marks_are_for_runs_that_free_the_root() -> None:
    assert RUN.mark == 100 and is_reached(RUN)
    missed = replace(RUN, wire_bytes=[1000, 500, 10, 31])
    assert not is_reached(missed)
    assert is_reached(replace(missed, setting=replace(SETTING, root_is_freed=False)))
    assert is_reached(replace(missed, setting=replace(SETTING, lr=3e-5)))  # no mark is set there


def test_every_mark_is_measured_and_stock_comes_first() -> None:
    settings = settings_of(CODECS, [1e-5, 1e-4])
    measured = {(s.codec, s.num_micro_batches, s.lr) for s in settings if s.root_is_freed}
    assert measured == {(*run, lr) for run, marks in MARKS.items() for lr in marks}
    assert len(set(settings)) == len(settings)
    for count in (1, 4):
        assert next(s for s in settings if s.num_micro_batches == count).codec == STOCK


@pytest.mark.parametrize("root_is_freed", [False, True])
def test_the_recipe_is_the_setting(tmp_path: Path, root_is_freed: bool) -> None:
    recipe = recipe_of(Setting(codec="entropy", num_micro_batches=4, lr=1e-4, root_is_freed=root_is_freed), 5, tmp_path)
    assert recipe.ciera.codecs == ("entropy",)
    assert recipe.parallel.reshard_root_after_forward is root_is_freed
    assert (recipe.train.gradient_accumulation, recipe.train.steps, recipe.optimizer.lr) == (4, 5, 1e-4)
    stock = recipe_of(Setting(codec=STOCK, num_micro_batches=1, lr=1e-4, root_is_freed=False), 5, tmp_path)
    assert stock.ciera.policy == "none"


def test_table_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    console = Console(width=120, record=True)
    console.print(table_of([RUN], "title"))
    text = console.export_text()
    assert "100.00" in text and "reached" in text
    draw([RUN], "a model", tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
