"""Block tables held as tensors (one row per sequence, -1 is empty)."""
from __future__ import annotations

import typing as tp

import torch


class TensorBlockPool:
    def __init__(self, n: int, device: str = "cpu"):
        self.refcnt = torch.zeros(n, dtype=torch.int32, device=device)
        self.queue = torch.arange(n, dtype=torch.int32, device=device)
        self.head = 0
        self.count = n

    def alloc_blocks(self, k: int) -> torch.Tensor | None:
        if k > self.count:
            return None
        idx = (self.head + torch.arange(k)) % self.queue.numel()
        out = self.queue[idx]
        self.head = (self.head + k) % self.queue.numel()
        self.count -= k
        self.refcnt[out.long()] = 1
        return out

    def dealloc_blocks(self, blocks: torch.Tensor) -> None:
        blocks = blocks.long()
        self.refcnt[blocks] -= 1
        dead = blocks[self.refcnt[blocks] == 0].to(torch.int32)
        idx = (self.head + self.count + torch.arange(dead.numel())) % self.queue.numel()
        self.queue[idx] = dead
        self.count += dead.numel()

    def inc_ref(self, blocks: torch.Tensor) -> None:
        self.refcnt[blocks.long()] += 1

    def dec_ref(self, blocks: torch.Tensor) -> None:
        self.dealloc_blocks(blocks)


class BlockTable:
    def __init__(self, pool: TensorBlockPool, rows: int, width: int):
        self.pool = pool
        self.t = torch.full((rows, width), -1, dtype=torch.int32)
        self.len = [0] * rows

    def extend(self, row: int, k: int) -> bool:
        if self.len[row] + k > self.t.shape[1]:
            return False
        got = self.pool.alloc_blocks(k)  # clean: copied to the row, which clear_row() deallocates
        if got is None:
            return False
        self.t[row, self.len[row] : self.len[row] + k] = got
        self.len[row] += k
        return True

    def extend_late(self, row: int, k: int) -> bool:
        got = self.pool.alloc_blocks(k)  # leak: the width is looked at after the allocation
        if got is None:
            return False
        if self.len[row] + k > self.t.shape[1]:
            return False
        self.t[row, self.len[row] : self.len[row] + k] = got
        self.len[row] += k
        return True

    def clear_row(self, row: int) -> None:
        n = self.len[row]
        if n:
            self.pool.dealloc_blocks(self.t[row, :n])
        self.t[row].fill_(-1)
        self.len[row] = 0

    def share(self, src: int, dst: int) -> None:
        self.clear_row(dst)
        n = self.len[src]
        self.pool.inc_ref(self.t[src, :n])  # clean: the destination row holds the reference
        self.t[dst, :n] = self.t[src, :n]
        self.len[dst] = n

    def share_if_room(self, src: int, dst: int, k: int) -> bool:
        n = self.len[src]
        self.pool.inc_ref(self.t[src, :n])  # leak: no room for the extension, and the reference stays
        if n + k > self.t.shape[1]:
            return False
        self.clear_row(dst)
        self.t[dst, :n] = self.t[src, :n]
        self.len[dst] = n
        return True

    def with_prefix(self, src: int, fn: tp.Callable[[torch.Tensor], tp.Any]) -> tp.Any:
        blocks = self.t[src, : self.len[src]].clone()
        self.pool.inc_ref(blocks)  # clean: dropped in the finally
        try:
            return fn(blocks)
        finally:
            self.pool.dec_ref(blocks)

    def prefix_sum(self, src: int, stop: int) -> int:
        blocks = self.t[src, : self.len[src]].clone()
        self.pool.inc_ref(blocks)  # leak: only the part up to the stop is dropped
        total = int(blocks[:stop].sum())
        self.pool.dec_ref(blocks[:stop])
        return total

    def prefill(self, rows: tp.Sequence[int], need: tp.Sequence[int]) -> bool:
        total = sum(need)
        got = self.pool.alloc_blocks(total)  # clean: near miss, split over the rows with nothing left
        if got is None:
            return False
        for row, part in zip(rows, got.split(list(need)), strict=True):
            self.clear_row(row)
            self.t[row, : part.numel()] = part
            self.len[row] = part.numel()
        return True

    def prefill_even(self, rows: tp.Sequence[int], total: int) -> bool:
        got = self.pool.alloc_blocks(total)  # leak: what does not divide evenly is in no row
        if got is None:
            return False
        per = total // len(rows)
        for i, row in enumerate(rows):
            self.clear_row(row)
            self.t[row, :per] = got[i * per : (i + 1) * per]
            self.len[row] = per
        return True

    def sort_test(self, k: int) -> bool:
        got = self.pool.alloc_blocks(k)  # clean: near miss, a permutation of the same blocks is deallocated
        if got is None:
            return False
        got = got.sort().values
        ok = bool((got.diff() > 0).all())
        self.pool.dealloc_blocks(got)
        return ok

    def unique_test(self, k: int) -> bool:
        got = self.pool.alloc_blocks(k)  # leak: the mask keeps a part, the rest is not deallocated
        if got is None:
            return False
        got = got[got % 2 == 0]
        self.pool.dealloc_blocks(got)
        return got.numel() == k
