"""Pinned host staging buffers used by a KV offload worker."""
from __future__ import annotations

import threading

import torch


class StagingPool:
    """Fixed number of equally sized host buffers."""

    def __init__(self, count: int, nbytes: int):
        self._lock = threading.Lock()
        self._idle = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(count)]
        self.nbytes = nbytes

    def borrow(self) -> torch.Tensor | None:
        with self._lock:
            if not self._idle:
                return None
            return self._idle.pop()  # clean: handed to the borrower

    def borrow_at_least(self, nbytes: int) -> torch.Tensor | None:
        with self._lock:
            if not self._idle:
                return None
            buf = self._idle.pop()  # leak: a too small buffer is neither returned nor put back
        if buf.numel() < nbytes:
            return None
        return buf

    def restore(self, buf: torch.Tensor) -> None:
        with self._lock:
            self._idle.append(buf)


class OffloadWorker:
    def __init__(self, pool: StagingPool, store: dict[str, torch.Tensor]):
        self.pool = pool
        self.store = store
        self.pending: dict[str, torch.Tensor] = {}
        self.dropped = 0

    def _stage(self, gpu_block: torch.Tensor) -> torch.Tensor | None:
        """Copy a block to a staging buffer; the caller restores the buffer."""
        buf = self.pool.borrow()  # clean: near miss, the helper gives the buffer to its caller
        if buf is None:
            return None
        flat = gpu_block.reshape(-1).view(torch.uint8)
        buf[: flat.numel()].copy_(flat, non_blocking=True)
        return buf

    def save(self, key: str, gpu_block: torch.Tensor) -> bool:
        staged = self._stage(gpu_block)  # leak: only a clone is stored and the staging buffer is forgotten
        if staged is None:
            self.dropped += 1
            return False
        self.store[key] = staged[: gpu_block.nbytes].clone()
        return True

    def save_sync(self, key: str, gpu_block: torch.Tensor) -> bool:
        staged = self._stage(gpu_block)  # clean: restored after the clone
        if staged is None:
            return False
        self.store[key] = staged[: gpu_block.nbytes].clone()
        self.pool.restore(staged)
        return True

    def save_async(self, key: str, gpu_block: torch.Tensor) -> None:
        if key in self.pending:
            return
        staged = self._stage(gpu_block)  # clean: near miss, kept in `pending` and restored by drain()
        if staged is not None:
            self.pending[key] = staged

    def resave_async(self, key: str, gpu_block: torch.Tensor) -> None:
        staged = self._stage(gpu_block)  # leak: overwrites a buffer still pending under the same key
        if staged is None:
            return
        self.pending[key] = staged

    def drain(self) -> int:
        n = 0
        while self.pending:
            key, buf = self.pending.popitem()
            self.store[key] = buf.clone()
            self.pool.restore(buf)
            n += 1
        return n

    def load_many(self, keys: list[str], out: torch.Tensor) -> list[str]:
        missing = []
        for row, key in enumerate(keys):
            buf = self.pool.borrow()  # leak: a missing key continues without restoring the buffer
            if buf is None:
                break
            data = self.store.get(key)
            if data is None:
                missing.append(key)
                continue
            buf[: data.numel()].copy_(data)
            out[row, : data.numel()].copy_(buf[: data.numel()])
            self.pool.restore(buf)
        return missing

    def load_one(self, key: str, out: torch.Tensor) -> bool:
        buf = self.pool.borrow()  # clean: near miss, the miss path returns inside try/finally
        if buf is None:
            return False
        try:
            data = self.store.get(key)
            if data is None:
                return False
            buf[: data.numel()].copy_(data)
            out[: data.numel()].copy_(buf[: data.numel()])
            return True
        finally:
            self.pool.restore(buf)

    def double_buffer(self, src: list[torch.Tensor], out: list[torch.Tensor]) -> bool:
        front = self.pool.borrow()  # clean: near miss, given back when the second one fails and at the end
        if front is None:
            return False
        back = self.pool.borrow()  # clean: restored at the end, swapped names only
        if back is None:
            self.pool.restore(front)
            return False
        for chunk in src:
            front[: chunk.numel()].copy_(chunk)
            out.append(front[: chunk.numel()].clone())
            front, back = back, front
        self.pool.restore(front)
        self.pool.restore(back)
        return True

    def checksum(self, blocks: list[torch.Tensor]) -> int:
        total = 0
        scratch = self.pool.borrow()  # clean: None-checked and restored after the loop
        if scratch is None:
            return -1
        for b in blocks:
            scratch[: b.numel()].copy_(b)
            if int(b.numel()) == 0:
                break
            total += int(scratch[: b.numel()].sum())
        self.pool.restore(scratch)
        return total
