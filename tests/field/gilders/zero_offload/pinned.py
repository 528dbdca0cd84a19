"""Page-locked host buffers shared by the swapper and the CPU optimizer."""
from __future__ import annotations

import contextlib
import threading
from typing import Iterator, List, Optional, Tuple

import numpy as np


class PinnedBuffer:
    __slots__ = ("index", "view")

    def __init__(self, index: int, numel: int):
        self.index = index
        self.view = np.zeros(numel, dtype=np.float32)


class PinnedPool:
    def __init__(self, numel: int, count: int):
        self.numel = numel
        self._buffers = [PinnedBuffer(i, numel) for i in range(count)]
        self._free: List[PinnedBuffer] = list(self._buffers)
        self._cond = threading.Condition()

    def available(self) -> int:
        with self._cond:
            return len(self._free)

    def checkout(self, timeout: float = 0.0) -> Optional[PinnedBuffer]:
        """A free buffer, or None when none came back within `timeout` seconds."""
        with self._cond:
            if not self._free and timeout:
                self._cond.wait_for(lambda: bool(self._free), timeout)
            return self._free.pop() if self._free else None

    def checkin(self, buf: PinnedBuffer) -> None:
        with self._cond:
            self._free.append(buf)
            self._cond.notify()

    def checkout_pair(self, timeout: float = 0.0) -> Optional[Tuple[PinnedBuffer, PinnedBuffer]]:
        first = self.checkout(timeout)  # leak: not checked in when the second is None
        if first is None:
            return None
        second = self.checkout(timeout)  # clean: None or returned with the first
        if second is None:
            return None
        return first, second

    def checkout_group(self, count: int) -> Optional[List[PinnedBuffer]]:
        group: List[PinnedBuffer] = []
        while len(group) < count:
            buf = self.checkout()  # clean: in the group, which is rolled back or returned whole
            if buf is None:
                while group:
                    self.checkin(group.pop())
                return None
            group.append(buf)
        return group

    @contextlib.contextmanager
    def borrowed(self, timeout: float = 1.0) -> Iterator[PinnedBuffer]:
        buf = self.checkout(timeout)  # clean: near miss, None raises before anything is held, otherwise the finally checks it in
        if buf is None:
            raise TimeoutError("no pinned buffer")
        try:
            yield buf
        finally:
            self.checkin(buf)
