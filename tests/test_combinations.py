"""A share of the combinations of pools and uses: leaks are told, right code is not, but for what is known."""

import zlib
from pathlib import Path

import pytest

from tests.combinations.judge import Cell, cells, missed, reported

_KNOWN = Path(__file__).parent / "combinations" / "known.txt"
_SHARE = 8  # one cell in so many; `python -m tests.combinations` judges all


def _known(what: str) -> set[tuple[str, str]]:
    rows = (line.split() for line in _KNOWN.read_text().splitlines() if not line.startswith("#"))
    return {(pool, use) for kind, pool, use in rows if kind == what}


def _chosen() -> list[Cell]:
    return [cell for cell in cells() if zlib.crc32(f"{cell[0].name} {cell[1].name}".encode()) % _SHARE == 0]


@pytest.mark.parametrize("cell", _chosen(), ids=lambda cell: f"{cell[0].name}-{cell[1].name}")
def test_combination(cell: Cell) -> None:
    names = (cell[0].name, cell[1].name)
    assert missed(*cell) == (names in _known("missed"))
    assert bool(reported(*cell, right=True)) == (names in _known("false"))


def test_known_exceptions_are_combinations() -> None:
    there = {(pool.name, use.name) for pool, use in cells()}
    assert (_known("missed") | _known("false")) <= there
