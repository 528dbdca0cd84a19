"""Host<->device transfer engine with pinned staging buffers and registered memory regions."""
from __future__ import annotations

import contextlib
import itertools
import threading
from typing import Iterator, NamedTuple, Sequence

import torch


class Region(NamedTuple):
    key: int
    addr: int
    nbytes: int


class Registrar:
    """Registers memory with the (simulated) NIC."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._live: dict[int, Region] = {}
        self._keys = itertools.count(1)

    def register(self, t: torch.Tensor) -> Region:
        if len(self._live) >= self._limit:
            raise MemoryError("registration table full")
        r = Region(next(self._keys), t.data_ptr(), t.numel() * t.element_size())
        self._live[r.key] = r
        return r

    def deregister(self, r: Region) -> None:
        self._live.pop(r.key)


class PinnedPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self._lock = threading.Lock()
        self._stack = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(count)]
        self.nbytes = nbytes

    def rent(self) -> torch.Tensor | None:
        with self._lock:  # clean: with statement
            return self._stack.pop() if self._stack else None  # clean: goes to the caller

    def give_back(self, t: torch.Tensor) -> None:
        with self._lock:  # clean: with statement
            self._stack.append(t)


class TransferError(Exception):
    pass


class Engine:
    def __init__(self, pool: PinnedPool, nic: Registrar, *, zero_copy: bool = False) -> None:
        self.pool = pool
        self.nic = nic
        self.zero_copy = zero_copy
        self._persistent: list[Region] = []

    def _post(self, region: Region, dst: int) -> int:
        return region.nbytes if dst >= 0 else -1

    def send(self, src: torch.Tensor, dst: int) -> int:
        region = self.nic.register(src)  # clean: deregistered in finally
        try:
            return self._post(region, dst)
        finally:
            self.nic.deregister(region)

    def send_checked(self, src: torch.Tensor, dst: int) -> int:
        region = self.nic.register(src)  # leak: explicit raise on a failed post skips deregister
        n = self._post(region, dst)
        if n < 0:
            raise TransferError(f"post to {dst} failed")
        self.nic.deregister(region)
        return n

    def send_staged(self, src: torch.Tensor, dst: int) -> int:
        stage = self.pool.rent()  # clean: None-checked, given back in finally
        if stage is None:
            return 0
        try:
            flat = src.view(torch.uint8).flatten()
            stage[: flat.numel()].copy_(flat)
            region = self.nic.register(stage)  # leak: not deregistered when dst is the local rank
            if dst == 0:
                return flat.numel()
            n = self._post(region, dst)
            self.nic.deregister(region)
            return n
        finally:
            self.pool.give_back(stage)

    def send_auto(self, src: torch.Tensor, dst: int) -> int:
        stage = None
        if not self.zero_copy:
            stage = self.pool.rent()  # clean: near miss, only None when zero_copy or exhausted, tested at the end
            if stage is None:
                raise TransferError("no staging buffer")
            stage[: src.numel()].copy_(src.view(-1).to(torch.uint8))
        region = self.nic.register(stage if stage is not None else src)  # clean: deregistered below
        n = self._post(region, dst)
        self.nic.deregister(region)
        if stage is not None:
            self.pool.give_back(stage)
        return n

    def expose(self, tensors: Sequence[torch.Tensor]) -> None:
        for t in tensors:
            self._persistent.append(self.nic.register(t))  # clean: shutdown deregisters all of them

    def shutdown(self) -> None:
        while self._persistent:
            self.nic.deregister(self._persistent.pop())

    @contextlib.contextmanager
    def staged(self, src: torch.Tensor) -> Iterator[torch.Tensor]:
        buf = self.pool.rent()  # clean: finally gives it back
        if buf is None:
            raise TransferError("pool exhausted")
        try:
            buf[: src.numel()].copy_(src.flatten().to(torch.uint8))
            yield buf
        finally:
            self.pool.give_back(buf)

    def checksum(self, src: torch.Tensor) -> int:
        with self.staged(src) as buf:  # clean: own context manager
            return int(buf[: src.numel()].sum())

    def ping_pong(self, other: PinnedPool) -> bool:
        a = self.pool.rent()  # leak: kept when the second buffer is missing
        b = other.rent()  # leak: kept when only the first buffer is missing
        if a is None or b is None:
            return False
        a.copy_(b)
        self.pool.give_back(a)
        other.give_back(b)
        return True

    def loopback(self) -> bool:
        a = self.pool.rent()  # clean: rolled back when the second is missing
        if a is None:
            return False
        b = self.pool.rent()  # clean: None-checked
        if b is None:
            self.pool.give_back(a)
            return False
        a.copy_(b)
        self.pool.give_back(b)
        self.pool.give_back(a)
        return True
