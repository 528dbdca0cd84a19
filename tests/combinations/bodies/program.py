"""Writes the class of one store with one more method, as that loses something and as it is right.

A store (`stores/NAME.py`) is a class with a head: each `# WORD: code` line says how it spells a word, X
being the argument; `|` parts statements. A way (`ways/NAME.txt`) is a method, indented by four after a first
column: `-` marks the lines that only the losing one has, `+` those of the right one. It fits a store that has
all its words: `TAKE(x)` takes a thing out, `PUT(x)` puts it in, `EMPTY`, `COUNT` and `BAD(x)` ask;
`CHARGE(n)`, `REFUND(n)` and `SHORT(n)` are of amounts; `TRY(n)` may be refused, and `UNDO(n)` takes it back;
`HOLD(x)` and `DROP(x)` count references.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_HERE = Path(__file__).parent
_WORD = re.compile(r"\b([A-Z]{3,})\b(?:\(([^()]*)\))?")
_HEAD = re.compile(r"^# ([A-Z]+): (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Store:
    """One way of keeping what a pool lends."""

    name: str
    text: str

    @cached_property
    def words(self) -> dict[str, str]:
        return dict(_HEAD.findall(self.text))

    def spelled(self, line: str) -> str:
        """The line, or several of its indentation, in this store's words."""
        spelled = _WORD.sub(lambda said: re.sub(r"\bX\b", said[2] or "", self.words[said[1]]), line)
        indent = line[: len(line) - len(line.lstrip())]
        return "\n".join(indent + part.strip() for part in spelled.split("|")) if "|" in spelled else spelled


@dataclass(frozen=True)
class Body:
    """One method that takes."""

    name: str
    text: str

    def fits(self, store: Store) -> bool:
        return {said[1] for said in _WORD.finditer(self.text)} <= store.words.keys()

    def lines(self, right: bool) -> list[str]:
        dropped = "-" if right else "+"
        return [f"   {' ' + line[1:]}" for line in self.text.splitlines() if line and line[0] != dropped]


def stores() -> list[Store]:
    return [Store(path.stem, path.read_text()) for path in sorted((_HERE / "stores").glob("*.py"))]


def ways() -> list[Body]:
    return [Body(path.stem, path.read_text()) for path in sorted((_HERE / "ways").glob("*.txt"))]


def program(store: Store, way: Body, right: bool) -> str:
    method = "\n".join(store.spelled(line) for line in way.lines(right))
    return f"{_HEAD.sub('', store.text).strip()}\n\n{method}\n"
