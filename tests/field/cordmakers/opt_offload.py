"""Optimizer state offload to NVMe.

States are swapped in one parameter group ahead of the step and swapped out
behind it.  Pinned staging memory and asynchronous I/O handles are scarce, so
both are pooled here.
"""
from __future__ import annotations

import heapq
import logging
import os
import threading
from typing import Callable, Optional

import torch

log = logging.getLogger("offload")


class PinnedStage:
    __slots__ = ("ident", "tensor", "nbytes")

    def __init__(self, ident: int, nbytes: int):
        self.ident = ident
        self.nbytes = nbytes
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class PinnedDepot:
    """A fixed number of equal pinned stages; lowest id is handed out first."""

    def __init__(self, count: int, nbytes: int):
        self.stages = [PinnedStage(i, nbytes) for i in range(count)]
        self._heap = list(range(count))
        heapq.heapify(self._heap)
        self._cond = threading.Condition()

    def draw(self, timeout: Optional[float] = None) -> Optional[PinnedStage]:
        with self._cond:
            if not self._cond.wait_for(lambda: self._heap, timeout):
                return None
            ident = heapq.heappop(self._heap)  # clean: the stage of this id goes to the caller
            return self.stages[ident]

    def try_draw(self) -> Optional[PinnedStage]:
        return self.draw(timeout=0)  # clean: returned to the caller

    def draw_at_least(self, nbytes: int) -> Optional[PinnedStage]:
        with self._cond:
            if not self._heap:
                return None
            ident = heapq.heappop(self._heap)  # leak: the id is not pushed back when the stage is too small
            stage = self.stages[ident]
            if stage.nbytes < nbytes:
                return None
            return stage

    def stow(self, stage: PinnedStage) -> None:
        with self._cond:
            heapq.heappush(self._heap, stage.ident)
            self._cond.notify()


class AioHandle:
    def __init__(self, ident: int):
        self.ident = ident
        self.inflight = 0

    def pread(self, fd: int, dst: torch.Tensor, offset: int) -> int:
        return os.preadv(fd, [memoryview(dst.numpy())], offset)

    def pwrite(self, fd: int, src: torch.Tensor, offset: int) -> int:
        return os.pwritev(fd, [memoryview(src.numpy())], offset)


class AioHandles:
    def __init__(self, count: int):
        self._bitmap = (1 << count) - 1
        self._all = [AioHandle(i) for i in range(count)]
        self._lock = threading.Lock()

    def grab(self) -> Optional[AioHandle]:
        with self._lock:
            if not self._bitmap:
                return None
            bit = self._bitmap & -self._bitmap
            self._bitmap ^= bit
            return self._all[bit.bit_length() - 1]

    def ungrab(self, handle: AioHandle) -> None:
        with self._lock:
            self._bitmap |= 1 << handle.ident


class StateFile:
    def __init__(self, path: str, extents: dict[str, tuple[int, int]]):
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)  # clean: closed in close()
        self.extents = extents

    def extent(self, name: str) -> Optional[tuple[int, int]]:
        return self.extents.get(name)

    def place(self, name: str, nbytes: int) -> tuple[int, int]:
        if name not in self.extents:
            end = max((off + n for off, n in self.extents.values()), default=0)
            self.extents[name] = (end, nbytes)
        return self.extents[name]

    def close(self) -> None:
        os.close(self.fd)


class OptimizerSwapper:
    def __init__(self, depot: PinnedDepot, aio: AioHandles, file: StateFile):
        self.depot = depot
        self.aio = aio
        self.file = file
        self.resident: dict[str, PinnedStage] = {}
        self.lookahead: Optional[PinnedStage] = None
        self.lookahead_name = ""

    def swap_in(self, name: str) -> Optional[torch.Tensor]:
        if name in self.resident:
            return self.resident[name].tensor
        if name == self.lookahead_name and self.lookahead is not None:
            stage, self.lookahead = self.lookahead, None
            self.lookahead_name = ""
            self.resident[name] = stage
            return stage.tensor
        stage = self.depot.draw()  # clean: moved into self.resident, swap_out() stows it
        self.resident[name] = stage
        self._read(name, stage)
        return stage.tensor

    def _read(self, name: str, stage: PinnedStage) -> int:
        extent = self.file.extent(name)
        handle = self.aio.grab()  # leak: not ungrabbed when the state has no extent yet
        if extent is None:
            stage.tensor.zero_()
            return 0
        offset, length = extent
        if handle is None:
            return os.preadv(self.file.fd, [memoryview(stage.tensor[:length].numpy())], offset)
        try:
            return handle.pread(self.file.fd, stage.tensor[:length], offset)
        finally:
            self.aio.ungrab(handle)

    def prefetch(self, name: str) -> bool:
        if self.lookahead is not None or name in self.resident:
            return False
        stage = self.depot.try_draw()  # clean: near miss, kept in self.lookahead, which swap_in() or drain() takes
        if stage is None:
            return False
        self._read(name, stage)
        self.lookahead = stage
        self.lookahead_name = name
        return True

    def swap_out(self, name: str) -> None:
        stage = self.resident.pop(name)
        offset, length = self.file.place(name, stage.nbytes)
        handle = self.aio.grab()  # clean: ungrabbed in finally
        try:
            if handle is None:
                os.pwritev(self.file.fd, [memoryview(stage.tensor[:length].numpy())], offset)
            else:
                handle.pwrite(self.file.fd, stage.tensor[:length], offset)
        finally:
            if handle is not None:
                self.aio.ungrab(handle)
            self.depot.stow(stage)

    def verify(self, names: list[str]) -> list[str]:
        bad = []
        for name in names:
            stage = self.depot.draw()  # leak: the continue for an unknown extent skips stow()
            extent = self.file.extent(name)
            if extent is None:
                bad.append(name)
                continue
            self._read(name, stage)
            if not torch.isfinite(stage.tensor[:extent[1]].view(torch.float32)).all():
                bad.append(name)
            self.depot.stow(stage)
        return bad

    def copy_state(self, src: str, dst: str, retries: int = 3) -> bool:
        length = self.file.extents[src][1]
        for attempt in range(retries):
            stage = self.depot.draw(timeout=5.0)  # clean: stowed in finally on every attempt
            if stage is None:
                continue
            try:
                got = self._read(src, stage)
                if got == length:
                    self._write(dst, stage, length)
                    return True
                log.warning("short read of %s, attempt %d", src, attempt)
            finally:
                self.depot.stow(stage)
        return False

    def _write(self, name: str, stage: PinnedStage, length: int) -> None:
        handle = self.aio.grab()  # clean: ungrabbed after the write, None-checked
        if handle is None:
            os.pwritev(self.file.fd, [memoryview(stage.tensor[:length].numpy())], self.file.extents[name][0])
            return
        handle.pwrite(self.file.fd, stage.tensor[:length], self.file.extents[name][0])
        self.aio.ungrab(handle)

    def read_retry(self, name: str, check: Callable[[torch.Tensor], bool]) -> Optional[PinnedStage]:
        stage = None
        for _ in range(3):
            stage = self.depot.draw()  # leak: a failed check draws another stage over it
            self._read(name, stage)
            if check(stage.tensor):
                return stage
        return None

    def dump(self, name: str, check: Callable[[torch.Tensor], bool]) -> bytes:
        stage = self.read_retry(name, check)  # clean: stowed after the copy, None-checked
        if stage is None:
            return b""
        data = bytes(stage.tensor.numpy())
        self.depot.stow(stage)
        return data

    def drain(self) -> None:
        for name in list(self.resident):
            self.swap_out(name)
        if self.lookahead is not None:
            self.depot.stow(self.lookahead)
            self.lookahead = None
            self.lookahead_name = ""
