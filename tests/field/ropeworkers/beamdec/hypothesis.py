"""A hypothesis owns its cells."""

from typing import List, Optional

from .arena import CellArena


class Hypothesis:
    def __init__(self, arena: CellArena, cells: List[int], score: float = 0.0):
        self.arena = arena
        self.cells = cells
        self.score = score
        self.tokens: List[int] = []

    def extend(self, token: int, logp: float) -> bool:
        c = self.arena.push_cell()  # clean: appended to the hypothesis's cells
        if c is None:
            return False
        self.cells.append(c)
        self.tokens.append(token)
        self.score += logp
        return True

    def clone(self) -> Optional["Hypothesis"]:
        cells: List[int] = []
        for c in self.cells:
            d = self.arena.dup_cell(c)  # clean: near miss, popped in the rollback, else owned by the clone
            if d is None:
                while cells:
                    self.arena.pop_cell(cells.pop())
                return None
            cells.append(d)
        h = Hypothesis(self.arena, cells, self.score)
        h.tokens = list(self.tokens)
        return h

    def truncate(self, n: int) -> None:
        """Back off to n tokens."""
        while len(self.cells) > n:
            self.arena.pop_cell(self.cells.pop())
        del self.tokens[n:]

    def rewrite(self, token: int) -> bool:
        """Replace the last token; its cell is filled anew."""
        c = self.arena.push_cell()  # leak: a hypothesis without tokens returns before the cell is used
        if c is None or not self.tokens:
            return False
        self.arena.pop_cell(self.cells[-1])
        self.cells[-1] = c
        self.tokens[-1] = token
        return True

    def dispose(self) -> None:
        for c in self.cells:
            self.arena.pop_cell(c)
        self.cells = []
