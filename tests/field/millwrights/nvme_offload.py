"""Optimizer and parameter states swapped to NVMe: aligned buffers, open swap files, in-flight reads."""
from __future__ import annotations

import enum
import os
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Callable, Optional

import torch


class State(enum.Enum):
    ON_DEVICE = 0
    IN_FLIGHT = 1
    ON_DISK = 2


class AlignedPool:
    def __init__(self, count: int, numel: int) -> None:
        self.numel = numel
        self._bufs = deque(torch.empty(numel, pin_memory=True) for _ in range(count))
        self._mutex = threading.Lock()

    def alloc_buffer(self) -> Optional[torch.Tensor]:
        with self._mutex:
            return self._bufs.popleft() if self._bufs else None

    def free_buffer(self, buf: torch.Tensor) -> None:
        with self._mutex:
            self._bufs.append(buf)

    def alloc_buffers(self, n: int) -> list[torch.Tensor]:
        with self._mutex:
            if len(self._bufs) < n:
                return []
            return [self._bufs.popleft() for _ in range(n)]


class TieredPool:
    """A small fast pool in front of a large one. Buffers go back to the pool they came from."""

    def __init__(self, fast: AlignedPool, slow: AlignedPool) -> None:
        self.fast = fast
        self.slow = slow
        self._origin: dict[int, AlignedPool] = {}

    def alloc_buffer(self, numel: int) -> Optional[torch.Tensor]:
        buf = self.fast.alloc_buffer()  # leak: a fast buffer that is too small is replaced by a slow one
        if buf is not None:
            self._origin[buf.data_ptr()] = self.fast
        if buf is None or buf.numel() < numel:
            buf = self.slow.alloc_buffer()  # clean: handed to the caller, free_buffer knows its origin
            if buf is not None:
                self._origin[buf.data_ptr()] = self.slow
        return buf

    def free_buffer(self, buf: torch.Tensor) -> None:
        self._origin.pop(buf.data_ptr()).free_buffer(buf)


@dataclass
class SwappedParam:
    name: str
    param: torch.nn.Parameter
    state: State = State.ON_DEVICE
    buf: Optional[torch.Tensor] = None
    momentum: Optional[torch.Tensor] = None


class SwapFiles:
    def __init__(self, root: Path, limit: int) -> None:
        self.root = root
        self.limit = limit
        self._open: dict[str, BinaryIO] = {}

    def handle(self, name: str) -> BinaryIO:
        f = self._open.pop(name, None)
        if f is None:
            if len(self._open) >= self.limit:
                oldest = next(iter(self._open))
                self._open.pop(oldest).close()
            f = open(self.root / name, "r+b")  # clean: near miss, in the table, closed by the limit or by close
        self._open[name] = f
        return f

    def pull(self, name: str, into: torch.Tensor) -> int:
        f = self.handle(name)  # clean: the table of files keeps it
        f.seek(0)
        return f.readinto(into.numpy())

    def push(self, name: str, data: torch.Tensor) -> None:
        f = self.handle(name)  # clean: the table of files keeps it
        f.seek(0)
        f.write(data.numpy().tobytes())

    def close(self) -> None:
        for f in self._open.values():
            f.close()
        self._open.clear()

    def size(self, name: str) -> int:
        return os.fstat(open(self.root / name, "rb").fileno()).st_size  # leak: the handle is never closed

    def truncate(self, name: str, nbytes: int) -> bool:
        f = open(self.root / name, "r+b")  # clean: closed on both ways
        if f.seek(0, os.SEEK_END) <= nbytes:
            f.close()
            return False
        f.truncate(nbytes)
        f.close()
        return True


class Swapper:
    def __init__(self, pool: AlignedPool, files: SwapFiles, submit: Callable[[Callable[[], None]], None]) -> None:
        self.pool = pool
        self.files = files
        self.submit = submit
        self.params: dict[str, SwappedParam] = {}
        self.ready: "deque[SwappedParam]" = deque()
        self.side: dict[str, torch.Tensor] = {}

    def swap_out(self, sp: SwappedParam) -> bool:
        buf = self.pool.alloc_buffer()  # clean: near miss, the submitted write frees it
        if buf is None:
            return False
        n = sp.param.numel()
        buf[:n].copy_(sp.param.data.view(-1))
        sp.state = State.IN_FLIGHT

        def write() -> None:
            self.files.push(sp.name, buf[:n])
            self.pool.free_buffer(buf)
            sp.state = State.ON_DISK

        self.submit(write)
        return True

    def swap_in(self, sp: SwappedParam) -> bool:
        if sp.state is not State.ON_DISK:
            return sp.state is State.ON_DEVICE
        sp.buf = self.pool.alloc_buffer()  # clean: near miss, install frees the buffer of a ready parameter
        if sp.buf is None:
            return False
        sp.state = State.IN_FLIGHT
        self.submit(lambda: self._read(sp))
        return True

    def _read(self, sp: SwappedParam) -> None:
        self.files.pull(sp.name, sp.buf)
        self.ready.append(sp)

    def install(self) -> int:
        count = 0
        while self.ready:
            sp = self.ready.popleft()
            sp.param.data = sp.buf[: sp.param.numel()].cuda().view_as(sp.param)
            self.pool.free_buffer(sp.buf)
            sp.buf = None
            sp.state = State.ON_DEVICE
            count += 1
        return count

    def load_momentum(self, sp: SwappedParam) -> bool:
        if sp.momentum is not None:
            return True
        sp.momentum = self.pool.alloc_buffer()  # leak: step sets the momentum to None without freeing it
        if sp.momentum is None:
            return False
        self.files.pull(sp.name + ".m", sp.momentum)
        return True

    def step(self, lr: float) -> None:
        for sp in self.params.values():
            if sp.momentum is None or sp.param.grad is None:
                continue
            n = sp.param.numel()
            sp.momentum[:n].mul_(0.9).add_(sp.param.grad.view(-1).cpu())
            sp.param.data.add_(sp.momentum[:n].view_as(sp.param).cuda(), alpha=-lr)
            self.files.push(sp.name + ".m", sp.momentum[:n])
            sp.momentum = None

    def checksum(self, names: list[str]) -> float:
        total = 0.0
        buf = self.pool.alloc_buffer()  # clean: one buffer for all, freed after the loop
        if buf is None:
            return total
        for name in names:
            if name not in self.params:
                continue
            self.files.pull(name, buf)
            total += float(buf.sum())
        self.pool.free_buffer(buf)
        return total

    def double_buffered(self, names: list[str], consume: Callable[[torch.Tensor], None]) -> int:
        bufs = self.pool.alloc_buffers(2)  # clean: near miss, both names are freed after the swaps
        if not bufs:
            return 0
        front, back = bufs
        for name in names:
            self.files.pull(name, back)
            front, back = back, front
            consume(front)
        self.pool.free_buffer(front)
        self.pool.free_buffer(back)
        return len(names)

    def compare(self, a: str, b: str) -> bool:
        bufs = self.pool.alloc_buffers(2)  # leak: only the second of the two is freed
        if len(bufs) != 2:
            return False
        left, right = bufs
        self.files.pull(a, left)
        self.files.pull(b, right)
        same = bool(torch.equal(left, right))
        self.pool.free_buffer(right)
        return same

    def stash(self, name: str, t: torch.Tensor) -> None:
        buf = self.side.get(name)
        if buf is None:
            buf = self.pool.alloc_buffer()  # clean: near miss, in side under its name, clear_side frees it
            if buf is None:
                return
            self.side[name] = buf
        buf[: t.numel()].copy_(t.view(-1))

    def clear_side(self) -> None:
        for buf in self.side.values():
            self.pool.free_buffer(buf)
        self.side.clear()
