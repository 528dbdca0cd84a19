from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional


class RowTable:
    """Rows of the persistent batch."""

    def __init__(self, rows: int) -> None:
        self._free = list(reversed(range(rows)))

    def claim(self) -> Optional[int]:
        if not self._free:
            return None
        return self._free.pop()

    def vacate(self, row: int) -> None:
        self._free.append(row)


class EncoderBudget:
    """Slots for multimodal encoder outputs."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.held: dict[str, int] = {}

    def hold(self, req_id: str, n: int) -> bool:
        if n > self.slots:
            return False
        self.slots -= n
        self.held[req_id] = self.held.get(req_id, 0) + n
        return True

    def let_go(self, req_id: str) -> None:
        self.slots += self.held.pop(req_id, 0)


@dataclass(eq=False)
class Grammar:
    schema: str
    state: list[int] = field(default_factory=list)


class GrammarPool:
    def __init__(self, size: int) -> None:
        self._spare = [Grammar("") for _ in range(size)]

    def compile(self, schema: str) -> Optional[Grammar]:
        if not self._spare:
            return None
        grammar = self._spare.pop()
        grammar.schema, grammar.state = schema, []
        return grammar

    def recycle(self, grammar: Grammar) -> None:
        self._spare.append(grammar)
