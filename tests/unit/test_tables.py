"""Change-rate tables: what they say between and beyond what was measured, and what is no table."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fsdp_ciera.errors import CieraFileError, CieraPolicyError
from fsdp_ciera.policies.categories import CATEGORIES
from fsdp_ciera.policies.rates import Rates
from fsdp_ciera.policies.tables import (
    DEFAULT_TABLE,
    load_table,
    parse_table,
    rates_for,
    shipped_tables,
    table_for_model,
)
from fsdp_ciera.recipes.models import MODELS


def content(**changes: Any) -> dict[str, Any]:
    entries = [
        {"lr": 1e-4, "categories": {"attention": {"value_change": 0.08, "block_change": {"512": 0.4}},
                                    "all": {"value_change": 0.16}}},
        {"lr": 1e-6, "categories": {"attention": {"value_change": 0.02}}},
    ]  # fmt: skip
    return {
        "format": 1,
        "name": "mine",
        "model": "M",
        "provenance": {"source": "a test"},
        "entries": entries,
        **changes,
    }


def test_between_two_learning_rates_shares_are_interpolated_in_logarithms() -> None:
    table = parse_table(content())
    assert table.lrs == [1e-6, 1e-4]
    rates, notes = table.lookup("attention", 1e-5)
    assert rates.value_change == pytest.approx(math.sqrt(0.02 * 0.08))
    assert rates.block_change == {512: 0.4}
    assert [note.partition(" at a learning")[0] for note in notes] == ["mine: block_change of {category}"]
    rates, notes = table.lookup("attention", 1e-4)
    assert (rates.value_change, notes) == (0.08, ())


def test_beyond_them_the_nearest_counts_and_a_note_says_so() -> None:
    rates, notes = parse_table(content()).lookup("attention", 1e-3)
    assert rates.value_change == 0.08
    assert any("value_change" in note and "0.001 is that of 0.0001" in note for note in notes)


def test_a_category_that_is_not_listed_gets_the_figures_of_all() -> None:
    assert parse_table(content()).lookup("embedding", 1e-4).rates.value_change == 0.16
    assert parse_table(content()).lookup("attention", 1e-4).rates.value_change == 0.08


def test_what_a_table_lacks_comes_from_the_default_table() -> None:
    lookup = rates_for(parse_table(content()), "attention", 1e-4, 512)
    spare, _ = shipped_tables()[DEFAULT_TABLE].lookup("attention", 1e-4)
    assert lookup.rates.value_change == 0.08
    assert lookup.rates.exponent_change == spare.exponent_change
    assert any("mine does not know exponent_change" in note and DEFAULT_TABLE in note for note in lookup.notes)
    assert any(
        "blocks of 2048 values" in note for note in rates_for(parse_table(content()), "attention", 1e-4, 2048).notes
    )


def test_the_default_table_knows_every_figure_of_every_category() -> None:
    table = shipped_tables()[DEFAULT_TABLE]
    for lr, _ in table.entries:
        for category in CATEGORIES:
            rates, _ = table.lookup(category, lr)
            assert None not in (rates.exponent_change, rates.value_change, rates.exponent_entropy_bits), (lr, category)
            assert set(rates.block_change) == {64, 128, 256, 512, 1024}
            if category not in ("routing_gate", "layer_norm"):  # their shards are shorter than the larger blocks
                assert list(rates.block_change.values()) == sorted(rates.block_change.values())


def test_the_papers_medians() -> None:
    at = {name: table.lookup for name, table in shipped_tables().items()}
    assert at["olmoe-1b-7b"]("expert_ffn", 1e-4).rates.block_change == {512: 0.22}
    assert at["olmoe-1b-7b"]("attention", 1e-4).rates.block_change == {512: 0.96}
    assert at["olmoe-1b-7b"]("routing_gate", 1e-4).rates.block_change == {512: 0.94}
    assert at["olmoe-1b-7b"]("embedding", 1e-4).rates.block_change[512] == pytest.approx(0.645)
    assert at["deepseek-moe-16b"]("layer_norm", 1e-4).rates.block_change == {512: 0.0}
    assert at["minicpm-moe-8x2b"]("layer_norm", 1e-4).rates.block_change == {512: 0.13}
    assert at["minicpm-moe-8x2b"]("expert_ffn", 1e-4).rates.block_change[512] == pytest.approx(0.75)
    assert at["minicpm-moe-8x2b"]("expert_ffn", 1e-5).rates.exponent_change == pytest.approx(0.00075)
    for table in shipped_tables().values():
        assert {"source", "data", "date", "dtype", "world_size", "notes"} <= set(table.provenance), table.name


def test_every_model_of_the_paper_has_a_table_or_a_neighbour_that_is_named() -> None:
    for model in MODELS:
        table, notes = table_for_model(model)
        assert (table.name == model) == (not notes)
        assert all(f"no table for {model}: that of {table.name} stands in" in note for note in notes)


def test_a_table_is_loaded_by_name_or_path(tmp_path: Path) -> None:
    assert load_table("olmoe-1b-7b").model == "OLMoE-1B-7B"
    path = tmp_path / "t.json"
    path.write_text(json.dumps(content()))
    assert load_table(str(path)).name == "mine"
    with pytest.raises(CieraPolicyError, match=r"tables='olmoe' is not a shipped table \(.*olmoe-1b-7b.*ciera profile"):
        load_table("olmoe")
    with pytest.raises(CieraFileError, match="cannot be read: No such file"):
        load_table(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"format": 2}, "format 2 is not 1"),
        ({"entries": []}, "it has no entries"),
        ({"entries": [{"lr": 0, "categories": {}}]}, "is not above 0"),
        ({"entries": [{"lr": 1, "categories": {"experts": {}}}]}, "category 'experts' is not known"),
        ({"entries": [{"lr": 1, "categories": {"all": {"speed": 1}}}]}, "'speed' is no rate"),
        ({"entries": [{"lr": 1, "categories": {"all": {"value_change": 2}}}]}, "must be a number from 0 to 1"),
        ({"entries": [{"lr": 1, "categories": {"all": {"value_change": [0.3, 0.1]}}}]}, "or .low, high."),
        ({"entries": [{"categories": {}}]}, "lr"),
    ],
)
def test_what_is_no_table_is_an_error(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(content(**changes)))
    with pytest.raises(CieraFileError, match=text):
        load_table(str(path))


def test_rates_survive_json_and_a_range_is_its_middle() -> None:
    rates = Rates(value_change=0.1, block_change={512: 0.3, 64: 0.1}, codec_bits={"entropy": 10.6})
    assert Rates.from_json(json.loads(json.dumps(rates.to_json()))) == rates
    assert list(rates.block_change) == [64, 512]
    assert Rates.from_json({"value_change": [0.1, 0.3]}).value_change == pytest.approx(0.2)
