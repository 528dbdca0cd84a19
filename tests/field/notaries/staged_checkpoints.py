"""Host staging buffers for asynchronous checkpoint writes."""
from __future__ import annotations

import hashlib
import threading
from collections import deque
from dataclasses import dataclass, field

import torch


class StagingPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free = deque(torch.empty(nbytes, dtype=torch.uint8) for _ in range(count))
        self._cond = threading.Condition()

    def checkout(self) -> torch.Tensor:
        with self._cond:
            while not self._free:
                self._cond.wait()
            return self._free.popleft()

    def checkin(self, buf: torch.Tensor) -> None:
        with self._cond:
            self._free.append(buf)
            self._cond.notify()


class StagedTensor:
    """A window on a staging buffer. `owns` says whether close() returns the buffer."""

    def __init__(self, pool: StagingPool, buf: torch.Tensor, length: int, owns: bool = True) -> None:
        self.pool = pool
        self.buf = buf
        self.length = length
        self.owns = owns

    def bytes(self) -> torch.Tensor:
        return self.buf[: self.length]

    def detach(self) -> torch.Tensor:
        """Hands the buffer to the caller; close() is a no-op from here on."""
        self.owns = False
        return self.buf

    def close(self) -> None:
        if not self.owns:
            return
        self.owns = False
        self.pool.checkin(self.buf)


def stage(pool: StagingPool, tensor: torch.Tensor) -> StagedTensor:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.numel() > pool.nbytes:
        raise ValueError(f"tensor of {flat.numel()} bytes does not fit a staging buffer")
    buf = pool.checkout()  # clean: moved into the returned StagedTensor, which owns it
    buf[: flat.numel()].copy_(flat)
    return StagedTensor(pool, buf, flat.numel())


def checksum_all(pool: StagingPool, named: dict[str, torch.Tensor]) -> dict[str, str]:
    sums: dict[str, str] = {}
    for name, tensor in named.items():
        view = stage(pool, tensor)  # clean: the view owns its buffer and is closed each round
        try:
            sums[name] = hashlib.blake2b(view.bytes().numpy().tobytes()).hexdigest()
        finally:
            view.close()
    return sums


def checksum_packed(pool: StagingPool, parts: list[torch.Tensor]) -> str:
    buf = pool.checkout()  # leak: the only view does not own, so its close() returns nothing
    offset = 0
    for part in parts:
        flat = part.reshape(-1).view(torch.uint8)
        buf[offset: offset + flat.numel()].copy_(flat)
        offset += flat.numel()
    view = StagedTensor(pool, buf, offset, owns=False)
    digest = hashlib.blake2b(view.bytes().numpy().tobytes()).hexdigest()
    view.close()
    return digest


def count_nonzero(pool: StagingPool, tensor: torch.Tensor, step: int) -> int:
    buf = pool.checkout()  # clean: near miss, the windows borrow and the buffer is checked in below
    flat = tensor.reshape(-1).view(torch.uint8)
    total = 0
    for start in range(0, flat.numel(), step):
        piece = flat[start: start + step]
        buf[: piece.numel()].copy_(piece)
        window = StagedTensor(pool, buf, piece.numel(), owns=False)
        total += int(window.bytes().count_nonzero())
        window.close()
    pool.checkin(buf)
    return total


@dataclass
class AsyncWriter:
    pool: StagingPool
    sink: object
    pending: deque = field(default_factory=deque)

    def enqueue(self, name: str, tensor: torch.Tensor) -> None:
        view = stage(self.pool, tensor)  # clean: near miss, detached into pending, drain() checks in
        self.pending.append((name, view.detach(), view.length))
        view.close()

    def drain(self) -> int:
        written = 0
        while self.pending:
            name, buf, length = self.pending.popleft()
            self.sink.write(name, buf[:length])
            self.pool.checkin(buf)
            written += length
        return written

    def write_through(self, name: str, tensor: torch.Tensor) -> int:
        view = stage(self.pool, tensor)  # leak: detach() took ownership from the view, close() is a no-op
        raw = view.detach()
        self.sink.write(name, raw[: view.length])
        view.close()
        return view.length


class ShardFile:
    """One shard: a header buffer and a body buffer until the shard is sealed."""

    def __init__(self, pool: StagingPool, path: str) -> None:
        self.pool = pool
        self.path = path
        self.sealed = False
        self.header = pool.checkout()  # leak: after seal() close() returns early and header stays out
        self.body = pool.checkout()  # clean: near miss, seal() returns it, close() does if not sealed
        self.used = 0

    def append(self, tensor: torch.Tensor) -> int:
        flat = tensor.reshape(-1).view(torch.uint8)
        self.body[self.used: self.used + flat.numel()].copy_(flat)
        self.used += flat.numel()
        return self.used

    def seal(self, sink) -> None:
        if self.sealed:
            return
        sink.write(self.path, self.body[: self.used])
        self.pool.checkin(self.body)
        self.sealed = True

    def close(self) -> None:
        if self.sealed:
            return
        self.pool.checkin(self.header)
        self.pool.checkin(self.body)
        self.sealed = True
