"""Registered buffers for prefill -> decode KV transfer."""
from __future__ import annotations

import threading
from typing import List, Optional


class TransferBuffer:
    __slots__ = ("key", "data", "registered")

    def __init__(self, key: int, nbytes: int) -> None:
        self.key = key
        self.data = bytearray(nbytes)
        self.registered = True


class TransferBufferPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._idle: List[TransferBuffer] = [TransferBuffer(i, nbytes) for i in range(count)]
        self._broken: List[TransferBuffer] = []
        self._lock = threading.Lock()

    def lease(self) -> Optional[TransferBuffer]:
        """Next usable buffer. Buffers that lost their registration are set aside."""
        with self._lock:
            while self._idle:
                buf = self._idle.pop()  # clean: near miss, a broken one is kept for repair(), else handed out
                if not buf.registered:
                    self._broken.append(buf)
                    continue
                return buf
        return None

    def lease_for(self, payload: bytes) -> Optional[TransferBuffer]:
        with self._lock:
            if not self._idle:
                return None
            buf = self._idle.pop()  # leak: a payload that is too long returns None after the pop
            if len(payload) > len(buf.data):
                return None
            buf.data[: len(payload)] = payload
            return buf

    def repair(self) -> int:
        with self._lock:
            fixed, self._broken = self._broken, []
            for buf in fixed:
                buf.registered = True
                self._idle.append(buf)
        return len(fixed)

    def give_up(self, buf: TransferBuffer) -> None:
        with self._lock:
            self._idle.append(buf)
