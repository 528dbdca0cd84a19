"""Prefetching of embedding rows from host memory into a pinned device cache."""
from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Iterable, Optional

import torch


@dataclass
class CacheLine:
    slot: int
    row: int = -1
    locks: int = 0


@dataclass
class LookupBatch:
    step: int
    rows: list[int]
    lines: list[CacheLine] = field(default_factory=list)
    weights: Optional[torch.Tensor] = None


class UvmCache:
    def __init__(self, slots: int, dim: int, host: torch.Tensor, device: torch.device) -> None:
        self.host = host
        self.table = torch.empty(slots, dim, device=device)
        self._vacant = [CacheLine(i) for i in range(slots)]
        self._resident: OrderedDict[int, CacheLine] = OrderedDict()

    def lock_row(self, row: int) -> Optional[CacheLine]:
        line = self._resident.get(row)
        if line is None:
            line = self._take_line()
            if line is None:
                return None
            line.row = row
            self.table[line.slot].copy_(self.host[row], non_blocking=True)
            self._resident[row] = line
        self._resident.move_to_end(row)
        line.locks += 1
        return line

    def _take_line(self) -> Optional[CacheLine]:
        if self._vacant:
            return self._vacant.pop()
        for row, line in self._resident.items():
            if line.locks == 0:
                self.host[row].copy_(self.table[line.slot])
                del self._resident[row]
                return line
        return None

    def unlock_row(self, line: CacheLine) -> None:
        line.locks -= 1

    def shrink(self, keep: int) -> None:
        parked: list[CacheLine] = []
        while len(self._vacant) > keep:
            parked.append(self._vacant.pop())  # clean: near miss, parked lines are put back after the count
        torch.cuda.empty_cache()
        self._vacant.extend(parked)


class EmbeddingPrefetcher:
    def __init__(self, cache: UvmCache, depth: int) -> None:
        self.cache = cache
        self.depth = depth
        self.pending: deque[LookupBatch] = deque()
        self.hot: dict[int, CacheLine] = {}
        self.padding: Optional[CacheLine] = None

    def _release(self, batch: LookupBatch) -> None:
        for line in batch.lines:
            self.cache.unlock_row(line)
        batch.lines.clear()

    def prefetch(self, batch: LookupBatch) -> bool:
        if len(self.pending) >= self.depth:
            return False
        for row in batch.rows:
            line = self.cache.lock_row(row)  # clean: near miss, a full cache releases the batch, else pending owns it
            if line is None:
                self._release(batch)
                return False
            batch.lines.append(line)
        self.pending.append(batch)
        return True

    def prefetch_unique(self, batch: LookupBatch) -> bool:
        by_row: dict[int, CacheLine] = {}
        for row in batch.rows:
            line = self.cache.lock_row(row)  # leak: a repeated row is locked again but has one entry in the dict
            if line is None:
                for held in by_row.values():
                    self.cache.unlock_row(held)
                return False
            by_row[row] = line
        batch.lines = list(by_row.values())
        self.pending.append(batch)
        return True

    def consume(self) -> Optional[torch.Tensor]:
        if not self.pending:
            return None
        batch = self.pending.popleft()
        index = torch.tensor([line.slot for line in batch.lines], device=self.cache.table.device)
        batch.weights = self.cache.table[index]
        self._release(batch)
        return batch.weights

    def cancel_after(self, step: int) -> None:
        kept: deque[LookupBatch] = deque()
        for batch in self.pending:
            if batch.step > step:
                self._release(batch)
            else:
                kept.append(batch)
        self.pending = kept

    def pin_hot(self, rows: Iterable[int]) -> int:
        for row in rows:
            if row in self.hot:
                continue
            line = self.cache.lock_row(row)  # clean: near miss, rows already hot are skipped first and unpin_hot unlocks all
            if line is None:
                break
            self.hot[row] = line
        return len(self.hot)

    def unpin_hot(self) -> None:
        while self.hot:
            _, line = self.hot.popitem()
            self.cache.unlock_row(line)

    def set_padding(self, row: int) -> None:
        self.padding = self.cache.lock_row(row)  # leak: the padding row set before stays locked

    def clear_padding(self) -> None:
        if self.padding is not None:
            self.cache.unlock_row(self.padding)
            self.padding = None

    def read_row(self, row: int, out: torch.Tensor) -> bool:
        line = self.cache.lock_row(row)  # leak: the early return for a row already up to date skips unlock_row
        if line is None:
            return False
        source = self.cache.table[line.slot]
        if torch.equal(source, out):
            return True
        out.copy_(source)
        self.cache.unlock_row(line)
        return True

    def pooled(self, rows: list[int]) -> Optional[torch.Tensor]:
        total: Optional[torch.Tensor] = None
        for row in rows:
            line = self.cache.lock_row(row)  # clean: near miss, unlocked before the branch on the total
            if line is None:
                return total
            value = self.cache.table[line.slot].clone()
            self.cache.unlock_row(line)
            if total is None:
                total = value
                continue
            total += value
        return total

    def exchange(self, a: int, b: int) -> bool:
        left = self.cache.lock_row(a)  # leak: the False for a full cache leaves the first row locked
        if left is None:
            return False
        right = self.cache.lock_row(b)  # clean: unlocked after the swap
        if right is None:
            return False
        tmp = self.cache.table[left.slot].clone()
        self.cache.table[left.slot].copy_(self.cache.table[right.slot])
        self.cache.table[right.slot].copy_(tmp)
        self.cache.unlock_row(left)
        self.cache.unlock_row(right)
        return True

    def update(self, row: int, grad: torch.Tensor, lr: float) -> bool:
        line = self.cache.lock_row(row)  # clean: near miss, finally unlocks also where the gradient is not finite
        if line is None:
            return False
        try:
            if not torch.isfinite(grad).all():
                return False
            self.cache.table[line.slot].add_(grad, alpha=-lr)
            return True
        finally:
            self.cache.unlock_row(line)

    def close(self) -> None:
        self.cancel_after(-1)
        self.unpin_hot()
        self.clear_padding()
