"""Swaps parameters and optimizer states between host buffers and NVMe."""
from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Callable, Dict, FrozenSet, List, Optional

from .aio import FdTable
from .buffers import SwapBuffer, SwapBufferManager

log = logging.getLogger(__name__)


@dataclass
class SwapRecord:
    path: str
    nbytes: int
    buffer: Optional[SwapBuffer] = None
    dirty: bool = False


class ParamSwapper:
    def __init__(self, root: str, manager: SwapBufferManager, fds: FdTable) -> None:
        self.root = root
        self.manager = manager
        self.fds = fds
        self.records: Dict[str, SwapRecord] = {}

    def register(self, name: str, payload: bytes) -> None:
        if name in self.records:
            self.evict(name)
        path = os.path.join(self.root, name + ".swp")
        os.pwrite(self.fds.fd(path), payload, 0)
        self.records[name] = SwapRecord(path, len(payload))

    def swap_in(self, name: str) -> Optional[SwapBuffer]:
        rec = self.records[name]
        if rec.buffer is not None:
            return rec.buffer
        buf = self.manager.allocate(rec.nbytes)  # clean: moves into the record, swap_out deallocates it
        if buf is None:
            return None
        buf.load(os.pread(self.fds.fd(rec.path), rec.nbytes, 0))
        rec.buffer = buf
        return buf

    def swap_out(self, name: str) -> None:
        rec = self.records[name]
        buf, rec.buffer = rec.buffer, None
        if buf is None:
            return
        if rec.dirty:
            os.pwrite(self.fds.fd(rec.path), buf.payload(), 0)
            rec.dirty = False
        self.manager.deallocate(buf)

    def swap_in_many(self, names: List[str]) -> bool:
        bufs = self.manager.allocate_all([self.records[n].nbytes for n in names])  # clean: each moves into its record
        if bufs is None:
            return False
        for name, buf in zip(names, bufs):
            rec = self.records[name]
            buf.load(os.pread(self.fds.fd(rec.path), rec.nbytes, 0))
            if rec.buffer is not None:
                self.manager.deallocate(rec.buffer)
            rec.buffer = buf
        return True

    def verify(self, name: str, check: Callable[[bytes], bool]) -> bool:
        rec = self.records[name]
        with self.manager.scratch(rec.nbytes) as buf:  # clean: context manager deallocates
            if buf is None:
                return False
            buf.load(os.pread(self.fds.fd(rec.path), rec.nbytes, 0))
            return check(buf.payload())

    def overwrite(self, name: str, payload: bytes) -> bool:
        """Write through a staging buffer, which becomes the record's when it is resident."""
        rec = self.records[name]
        buf = self.manager.allocate(len(payload))  # leak: a dirty record returns False before the buffer is freed or adopted
        if buf is None:
            return False
        buf.load(payload)
        if rec.dirty:
            log.info("%s has unsaved changes", name)
            return False
        os.pwrite(self.fds.fd(rec.path), buf.payload(), 0)
        if rec.buffer is None:
            self.manager.deallocate(buf)
        else:
            self.manager.deallocate(rec.buffer)
            rec.buffer = buf
        return True

    def evict(self, name: str) -> None:
        self.swap_out(name)
        rec = self.records.pop(name)
        self.fds.forget(rec.path)


class OptimizerSwapper:
    """Double-buffered: the next state is read while the current one is updated."""

    def __init__(self, params: ParamSwapper, frozen: FrozenSet[str] = frozenset()) -> None:
        self.params = params
        self.frozen = frozen
        self._next: Optional[SwapBuffer] = None
        self._next_name = ""

    def _read(self, name: str) -> Optional[SwapBuffer]:
        rec = self.params.records[name]
        buf = self.params.manager.allocate(rec.nbytes)  # clean: returned to the caller
        if buf is not None:
            buf.load(os.pread(self.params.fds.fd(rec.path), rec.nbytes, 0))
        return buf

    def prefetch(self, name: str) -> None:
        self._next = self._read(name)  # leak: a frozen state that was prefetched is not taken, and the next prefetch overwrites it
        self._next_name = name

    def take(self, name: str) -> Optional[SwapBuffer]:
        if self._next is not None and self._next_name == name:
            buf, self._next = self._next, None
            return buf
        return self._read(name)  # clean: returned to the caller

    def step(self, names: List[str], update: Callable[[bytes], bytes]) -> int:
        done = 0
        for i, name in enumerate(names):
            if name in self.frozen:
                continue
            buf = self.take(name)  # clean: deallocated in the finally of the turn
            if buf is None:
                break
            try:
                if i + 1 < len(names):
                    self.prefetch(names[i + 1])
                buf.load(update(buf.payload()))
                rec = self.params.records[name]
                os.pwrite(self.params.fds.fd(rec.path), buf.payload(), 0)
                done += 1
            finally:
                self.params.manager.deallocate(buf)
        return done

    def read_state(self, name: str) -> bytes:
        buf = self.take(name)  # leak: the payload is a copy, the buffer itself is dropped
        if buf is None:
            return b""
        return buf.payload()

    def flush(self) -> None:
        if self._next is not None:
            self.params.manager.deallocate(self._next)
            self._next = None
