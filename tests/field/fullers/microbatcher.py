"""Micro-batching front of an encoder: requests claim a row of the batch tensor and wait for their result."""
from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, Iterator, List, Optional

logger = logging.getLogger(__name__)


class RowPool:
    def __init__(self, rows: int, width: int) -> None:
        self.width = width
        self.tensor = [[0.0] * width for _ in range(rows)]
        self._free: Deque[int] = deque(range(rows))

    def claim(self) -> Optional[int]:
        return self._free.popleft() if self._free else None

    def surrender(self, row: int) -> None:
        self.tensor[row] = [0.0] * self.width
        self._free.append(row)

    def __len__(self) -> int:
        return len(self._free)


@dataclass
class Item:
    row: int
    deadline: float
    done: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class MicroBatcher:
    """Serves items in arrival order; an item past its deadline is answered with None."""

    def __init__(self, rows: RowPool, max_batch: int = 4) -> None:
        self.rows = rows
        self.max_batch = max_batch
        self._bulk: Deque[Item] = deque()
        self._urgent: Deque[Item] = deque()

    def enqueue(self, values: List[float], deadline: float) -> Optional[asyncio.Future]:
        row = self.rows.claim()  # leak: run_bulk drops an item past its deadline without surrendering the row
        if row is None:
            return None
        self.rows.tensor[row][: len(values)] = values
        item = Item(row, deadline)
        self._bulk.append(item)
        return item.done

    def enqueue_urgent(self, values: List[float], deadline: float) -> Optional[asyncio.Future]:
        row = self.rows.claim()  # clean: run_urgent surrenders it for late items and served ones alike
        if row is None:
            return None
        self.rows.tensor[row][: len(values)] = values
        item = Item(row, deadline)
        self._urgent.append(item)
        return item.done

    def _encode(self, row: int) -> float:
        return sum(self.rows.tensor[row])

    def run_bulk(self, now: float) -> int:
        served = 0
        while self._bulk and served < self.max_batch:
            item = self._bulk.popleft()
            if item.deadline < now:
                item.done.set_result(None)
                continue
            item.done.set_result(self._encode(item.row))
            self.rows.surrender(item.row)
            served += 1
        return served

    def run_urgent(self, now: float) -> int:
        served = 0
        while self._urgent and served < self.max_batch:
            item = self._urgent.popleft()
            late = item.deadline < now
            item.done.set_result(None if late else self._encode(item.row))
            self.rows.surrender(item.row)
            served += not late
        return served

    def claimed(self, n: int) -> Iterator[int]:
        """Yields up to n claimed rows; whoever iterates surrenders them."""
        for _ in range(n):
            row = self.rows.claim()  # clean: handed to the consumer
            if row is None:
                return
            yield row

    def score_all(self, batch: List[List[float]]) -> List[float]:
        scores: List[float] = []
        for values, row in zip(batch, self.claimed(len(batch))):  # clean: near miss, every row drawn is surrendered in its round
            self.rows.tensor[row][: len(values)] = values
            scores.append(self._encode(row))
            self.rows.surrender(row)
        return scores

    def stack(self, batch: Dict[str, List[float]]) -> Dict[str, int]:
        """Rows by name; the caller surrenders them."""
        placed: Dict[str, int] = {}
        for name, row in zip(batch, self.claimed(len(batch))):  # clean: returned in the table
            self.rows.tensor[row][: len(batch[name])] = batch[name]
            placed[name] = row
        return placed

    def rank(self, batch: Dict[str, List[float]], top: int) -> List[str]:
        placed = self.stack(batch)  # leak: only the rows of the names returned are surrendered
        order = sorted(placed, key=lambda name: -self._encode(placed[name]))[:top]
        for name in order:
            self.rows.surrender(placed[name])
        return order

    def best(self, batch: Dict[str, List[float]]) -> Optional[str]:
        placed = self.stack(batch)  # clean: near miss, popped until the table is empty
        name = max(placed, key=lambda n: self._encode(placed[n]), default=None)
        while placed:
            _, row = placed.popitem()
            self.rows.surrender(row)
        return name


async def _main() -> None:
    rows = RowPool(4, 3)
    mb = MicroBatcher(rows)
    fut = mb.enqueue([1.0, 2.0], deadline=10.0)
    late = mb.enqueue_urgent([1.0], deadline=1.0)
    assert mb.run_bulk(now=5.0) == 1 and await fut == 3.0
    assert mb.run_urgent(now=5.0) == 0 and await late is None
    assert mb.score_all([[1.0], [2.0, 2.0]]) == [1.0, 4.0]
    assert mb.best({"a": [1.0], "b": [5.0]}) == "b"
    assert len(rows) == 4


if __name__ == "__main__":
    asyncio.run(_main())
