import collections
import logging
from multiprocessing import shared_memory
from typing import Callable, Deque, Dict, Optional

import numpy as np

log = logging.getLogger(__name__)


class Attachments:
    """Attached segments by name, with a use count."""

    def __init__(self):
        self._open: Dict[str, shared_memory.SharedMemory] = {}
        self._uses: Dict[str, int] = collections.Counter()

    def attach(self, name: str) -> shared_memory.SharedMemory:
        shm = self._open.get(name)
        if shm is None:
            shm = shared_memory.SharedMemory(name=name)  # clean: kept in self._open, closed by detach()
            self._open[name] = shm
        self._uses[name] += 1
        return shm

    def detach(self, name: str) -> None:
        self._uses[name] -= 1
        if self._uses[name] == 0:
            self._open.pop(name).close()


class Consumer:
    def __init__(self, att: Attachments, chunk: int, ack: Callable[[int], None]):
        self.att, self.chunk, self.ack = att, chunk, ack
        self.held: Deque[tuple] = collections.deque()

    def _window(self, shm, msg) -> np.ndarray:
        dt = np.dtype(msg["dtype"])
        n = int(np.prod(msg["shape"]))
        return np.frombuffer(shm.buf, dt, n, msg["chunk"] * self.chunk).reshape(msg["shape"])

    def copy_out(self, msg) -> Optional[np.ndarray]:
        shm = self.att.attach(msg["segment"])  # clean: detached in finally
        try:
            if msg["chunk"] < 0:
                return None
            return self._window(shm, msg).copy()
        finally:
            self.att.detach(msg["segment"])
            self.ack(msg["seq"])

    def borrow(self, msg) -> Optional[np.ndarray]:
        shm = self.att.attach(msg["segment"])  # leak: an expired message returns without detach
        if msg.get("expired"):
            self.ack(msg["seq"])
            return None
        self.held.append((msg["segment"], msg["seq"]))
        return self._window(shm, msg)

    def finish_oldest(self) -> None:
        name, seq = self.held.popleft()
        self.att.detach(name)
        self.ack(seq)

    def peek_shape_ok(self, msg, max_elems: int) -> bool:
        shm = self.att.attach(msg["segment"])  # leak: the refusal of an oversized tensor skips detach
        if np.prod(msg["shape"]) > max_elems:
            log.warning("tensor %s is too large", msg["shape"])
            return False
        ok = bool(np.isfinite(self._window(shm, msg)).all())
        self.att.detach(msg["segment"])
        return ok

    def close(self) -> None:
        while self.held:
            self.finish_oldest()
