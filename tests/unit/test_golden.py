"""What gathers decode and send, against what was frozen before the house was rebuilt (golden_gathers.py)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from golden_gathers import GOLDEN, measure

MOST_BYTES = {"value_delta": 1.0}
"""As a share of what was frozen; 0.5 % more where nothing is said."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return measure()


def test_every_gather_decodes_to_the_frozen_bits(found: dict[str, Any]) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert {name: one["digests"] for name, one in found.items()} == {
        name: one["digests"] for name, one in golden.items()
    }


def test_no_codec_sends_more_than_it_did(found: dict[str, Any]) -> None:
    golden = json.loads(GOLDEN.read_text())
    for name, one in golden.items():
        frozen, sent = (sum(each["wire_bytes"].values()) for each in (one, found[name]))
        assert sent <= frozen * MOST_BYTES.get(name.partition(",")[0], 1.005), (name, frozen, sent)
