"""A share of the combinations of pools, uses and reaches: leaks are told, right code is not, but for what is
known."""

import zlib
from itertools import product
from pathlib import Path

import pytest

from tests.combinations.judge import Cell, cells, missed, reported
from tests.combinations.program import Reach, reaches

_KNOWN = Path(__file__).parent / "combinations" / "known.txt"
_SHARE = 524
"""One cell in so many; `python -m tests.combinations` judges all."""

_REACHED = ("new_or_reuse", "counter_bool", "lease_object")


def _known(what: str) -> set[tuple[str, str]]:
    rows = (line.split() for line in _KNOWN.read_text().splitlines() if line and not line.startswith("#"))
    return {(one, other) for kind, one, other in rows if kind == what}


def _chosen() -> list[Cell]:
    return [cell for cell in cells() if zlib.crc32(f"{cell[0].name} {cell[1].name}".encode()) % _SHARE == 0]


def _reached() -> list[tuple[Cell, Reach]]:
    plain = [cell for cell in cells() if cell[0].name in _REACHED and cell[1].name == "early_return"]
    return list(product(plain, reaches()))


@pytest.mark.parametrize("cell", _chosen(), ids=lambda cell: f"{cell[0].name}-{cell[1].name}")
def test_combination(cell: Cell) -> None:
    names = (cell[0].name, cell[1].name)
    assert missed(*cell) == (names in _known("missed"))
    assert bool(reported(*cell, right=True)) == (names in _known("false"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "by"), _reached(), ids=lambda each: each.name if isinstance(each, Reach) else each[0].name
)
def test_reach(cell: Cell, by: Reach) -> None:
    assert missed(*cell, by) == ((cell[0].name, by.name) in _known("unreached"))
    assert reported(*cell, right=True, by=by) == []


def test_known_exceptions_are_judged() -> None:
    chosen = {(pool.name, use.name) for pool, use in _chosen()}
    assert (_known("missed") | _known("false")) <= chosen
