"""Swaps partitioned optimizer state between NVMe and pinned memory (ZeRO-Infinity style)."""
from __future__ import annotations

import os
import threading
from collections import defaultdict
from pathlib import Path
from typing import Iterator

import torch


class PinnedBuffer:
    def __init__(self, numel: int) -> None:
        self.data = torch.empty(numel, dtype=torch.float32, pin_memory=torch.cuda.is_available())
        self.owner: str | None = None

    def view(self, numel: int) -> torch.Tensor:
        return self.data.narrow(0, 0, numel)


class SwapBufferManager:
    def __init__(self, numel: int, count: int) -> None:
        self._lock = threading.Lock()
        self.free_buffers = [PinnedBuffer(numel) for _ in range(count)]
        self.used: dict[int, PinnedBuffer] = {}

    def allocate(self, owner: str) -> PinnedBuffer | None:
        with self._lock:
            if not self.free_buffers:
                return None
            buf = self.free_buffers.pop()
            buf.owner = owner
            self.used[id(buf)] = buf
            return buf

    def allocate_many(self, owner: str, n: int) -> list[PinnedBuffer] | None:
        bufs = []
        for _ in range(n):
            buf = self.allocate(owner)  # clean: near miss, those collected are freed when the pool is short
            if buf is None:
                for taken in bufs:
                    self.free(taken)
                return None
            bufs.append(buf)
        return bufs

    def free(self, buf: PinnedBuffer) -> None:
        with self._lock:
            del self.used[id(buf)]
            buf.owner = None
            self.free_buffers.append(buf)


class OptimizerSwapper:
    MAX_RETRIES = 3

    def __init__(self, root: Path, buffers: SwapBufferManager) -> None:
        self.root = root
        self.buffers = buffers
        self.pending_writes: dict[str, PinnedBuffer] = {}
        self.prefetched: dict[str, PinnedBuffer] = {}
        self.grad_parts: dict[str, list[PinnedBuffer]] = defaultdict(list)
        self.bounce: PinnedBuffer | None = None

    def _path(self, name: str) -> Path:
        return self.root / f"{name}.tensor.swp"

    def _read(self, name: str, buf: PinnedBuffer) -> bool:
        raw = self._path(name).read_bytes()
        if len(raw) % 4:
            return False
        src = torch.frombuffer(bytearray(raw), dtype=torch.float32)
        buf.view(src.numel()).copy_(src)
        return True

    def _write(self, name: str, buf: PinnedBuffer, numel: int) -> None:
        self._path(name).write_bytes(buf.view(numel).numpy().tobytes())

    def swap_out_async(self, name: str, tensor: torch.Tensor) -> bool:
        if name in self.pending_writes:
            self.wait(name, tensor.numel())
        buf = self.buffers.allocate(name)  # clean: near miss, an earlier pending write of the name was waited for
        if buf is None:
            return False
        buf.view(tensor.numel()).copy_(tensor.flatten(), non_blocking=True)
        self.pending_writes[name] = buf
        return True

    def wait(self, name: str, numel: int) -> None:
        buf = self.pending_writes.pop(name)
        self._write(name, buf, numel)
        self.buffers.free(buf)

    def prefetch(self, name: str) -> None:
        buf = self.buffers.allocate(name)  # leak: prefetching a name twice overwrites the first buffer in prefetched
        if buf is None:
            return
        if not self._path(name).exists():
            self.buffers.free(buf)
            return
        self._read(name, buf)
        self.prefetched[name] = buf

    def swap_in(self, name: str, dst: torch.Tensor) -> bool:
        buf = self.prefetched.pop(name, None)
        if buf is None:
            buf = self.buffers.allocate(name)  # clean: near miss, freed below as a prefetched one is
            if buf is None:
                return False
            if not self._read(name, buf):
                self.buffers.free(buf)
                return False
        dst.copy_(buf.view(dst.numel()).view_as(dst))
        self.buffers.free(buf)
        return True

    def swap_in_checked(self, name: str, dst: torch.Tensor) -> bool:
        for _ in range(self.MAX_RETRIES):
            buf = self.buffers.allocate(name)  # leak: a short read goes round the loop without freeing the buffer
            if buf is None:
                return False
            if not self._read(name, buf):
                continue
            dst.copy_(buf.view(dst.numel()).view_as(dst))
            self.buffers.free(buf)
            return True
        return False

    def swap_in_pair(self, name: str, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> bool:
        pair = self.buffers.allocate_many(name, 2)  # clean: both freed in the finally
        if pair is None:
            return False
        try:
            for part, buf, dst in zip(("m", "v"), pair, (exp_avg, exp_avg_sq)):
                if not self._read(f"{name}.{part}", buf):
                    return False
                dst.copy_(buf.view(dst.numel()).view_as(dst))
            return True
        finally:
            for buf in pair:
                self.buffers.free(buf)

    def stage_gradients(self, name: str, parts: list[torch.Tensor]) -> bool:
        bufs = self.buffers.allocate_many(name, len(parts))  # leak: flush_gradients frees only the last of the parts
        if bufs is None:
            return False
        for buf, part in zip(bufs, parts):
            buf.view(part.numel()).copy_(part.flatten())
        self.grad_parts[name].extend(bufs)
        return True

    def flush_gradients(self, name: str, numel: int) -> None:
        parts = self.grad_parts.pop(name, [])
        for i, buf in enumerate(parts):
            self._write(f"{name}.g{i}", buf, numel)
        if parts:
            self.buffers.free(parts[-1])

    def iter_shards(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        buf = self.buffers.allocate("iter")  # leak: first_nonfinite leaves the generator early, and the free after the loop never runs
        if buf is None:
            return
        for name in names:
            if self._read(name, buf):
                yield name, buf.data
        self.buffers.free(buf)

    def first_nonfinite(self, names: list[str]) -> str | None:
        for name, data in self.iter_shards(names):
            if not torch.isfinite(data).all():
                return name
        return None

    def iter_sizes(self, names: list[str]) -> Iterator[int]:
        buf = self.buffers.allocate("sizes")  # clean: near miss, the finally also runs when the consumer stops early
        if buf is None:
            return
        try:
            for name in names:
                self._read(name, buf)
                yield os.path.getsize(self._path(name))
        finally:
            self.buffers.free(buf)

    def get_bounce(self) -> PinnedBuffer | None:
        if self.bounce is None:
            self.bounce = self.buffers.allocate("bounce")  # clean: near miss, taken once and freed in shutdown
        return self.bounce

    def shutdown(self) -> None:
        for buf in self.pending_writes.values():
            self.buffers.free(buf)
        for buf in self.prefetched.values():
            self.buffers.free(buf)
        if self.bounce is not None:
            self.buffers.free(self.bounce)
        self.bounce = None
        self.pending_writes.clear()
        self.prefetched.clear()
