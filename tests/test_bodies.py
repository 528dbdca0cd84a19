"""Pools' own bodies over their stores: what is lost is told, right code is not, but for what is known."""

import zlib
from pathlib import Path

import pytest

from tests.combinations.bodies.judge import Cell, cells, reported

_KNOWN = Path(__file__).parent / "combinations" / "bodies" / "known.txt"
_SHARE = 4
"""One cell in so many; `python -m tests.combinations.bodies` judges all."""


def _known(what: str) -> set[tuple[str, str]]:
    rows = (line.split() for line in _KNOWN.read_text().splitlines() if line and not line.startswith("#"))
    return {(store, way) for kind, store, way in rows if kind == what}


def _chosen() -> list[Cell]:
    return [cell for cell in cells() if zlib.crc32(f"{cell[0].name} {cell[1].name}".encode()) % _SHARE == 0]


@pytest.mark.parametrize("cell", _chosen(), ids=lambda cell: f"{cell[0].name}-{cell[1].name}")
def test_body(cell: Cell) -> None:
    names = (cell[0].name, cell[1].name)
    assert (not reported(*cell, right=False)) == (names in _known("missed"))
    assert bool(reported(*cell, right=True)) == (names in _known("false"))


def test_known_exceptions_are_judged() -> None:
    chosen = {(store.name, way.name) for store, way in _chosen()}
    assert (_known("missed") | _known("false")) <= chosen
