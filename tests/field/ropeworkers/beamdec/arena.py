"""KV cells for beams and logits buffers shared by all searches."""

from typing import Dict, List, Optional, Tuple

import torch


class CellArena:
    """A cell is one row of K and V for all layers. Cells are passed around by index."""

    def __init__(self, cells: int, width: int):
        self.k = torch.zeros(cells, width)
        self.v = torch.zeros(cells, width)
        self._stack = list(range(cells - 1, -1, -1))

    def push_cell(self) -> Optional[int]:
        return self._stack.pop() if self._stack else None

    def pop_cell(self, c: int) -> None:
        self._stack.append(c)

    def dup_cell(self, c: int) -> Optional[int]:
        d = self.push_cell()  # clean: returned to the caller, who pops it
        if d is None:
            return None
        self.k[d].copy_(self.k[c])
        self.v[d].copy_(self.v[c])
        return d


class LogitBuffers:
    def __init__(self):
        self._shelf: Dict[Tuple[int, int], List[torch.Tensor]] = {}
        self.lent = 0

    def lend(self, rows: int, vocab: int) -> torch.Tensor:
        self.lent += 1
        shelf = self._shelf.get((rows, vocab))
        if shelf:
            return shelf.pop()
        return torch.empty(rows, vocab)

    def shelve(self, t: torch.Tensor) -> None:
        self.lent -= 1
        self._shelf.setdefault((t.shape[0], t.shape[1]), []).append(t)
