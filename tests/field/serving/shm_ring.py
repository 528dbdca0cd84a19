"""Broadcast ring between the scheduler process and its workers; chunks live in one flat tensor."""
import contextlib
import enum
import logging
import pickle
import threading
from typing import Any, Iterator, List, Optional

import torch

logger = logging.getLogger("ipc")


class ChunkState(enum.IntEnum):
    EMPTY = 0
    WRITING = 1
    READY = 2
    READING = 3


class Ring:
    def __init__(self, n: int, chunk: int) -> None:
        self.buf = torch.zeros(n, chunk, dtype=torch.uint8)
        self.state = [ChunkState.EMPTY] * n
        self.n = n
        self._mx = threading.Lock()

    def acquire_write(self) -> Optional[int]:
        with self._mx:
            for i, st in enumerate(self.state):
                if st is ChunkState.EMPTY:
                    self.state[i] = ChunkState.WRITING
                    return i
        return None

    def release_write(self, i: int, ok: bool = True) -> None:
        with self._mx:
            self.state[i] = ChunkState.READY if ok else ChunkState.EMPTY

    def acquire_read(self) -> Optional[int]:
        with self._mx:
            for i, st in enumerate(self.state):
                if st is ChunkState.READY:
                    self.state[i] = ChunkState.READING
                    return i
        return None

    def release_read(self, i: int) -> None:
        with self._mx:
            self.state[i] = ChunkState.EMPTY


class MessageQueue:
    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.overflow: List[bytes] = []

    @contextlib.contextmanager
    def writing(self) -> Iterator[Optional[torch.Tensor]]:
        idx = self.ring.acquire_write()  # clean: near miss, None yields None, else released in the finally
        if idx is None:
            yield None
            return
        try:
            yield self.ring.buf[idx]
        finally:
            self.ring.release_write(idx)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Optional[torch.Tensor]]:
        idx = self.ring.acquire_read()  # leak: an empty header makes the manager return before the release
        if idx is None:
            yield None
            return
        view = self.ring.buf[idx]
        if int(view[0]) == 0:
            yield None
            return
        try:
            yield view
        finally:
            self.ring.release_read(idx)

    def send(self, obj: Any) -> bool:
        data = pickle.dumps(obj)
        with self.writing() as view:  # clean: with statement
            if view is None:
                self.overflow.append(data)
                return False
            view[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return True

    def send_checked(self, obj: Any) -> bool:
        data = pickle.dumps(obj)
        idx = self.ring.acquire_write()  # leak: a message that is too long leaves the chunk in writing state
        if idx is None:
            return False
        if len(data) > self.ring.buf.shape[1]:
            self.overflow.append(data)
            return False
        self.ring.buf[idx, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.ring.release_write(idx)
        return True

    def send_or_cancel(self, obj: Any) -> bool:
        data = pickle.dumps(obj)
        idx = self.ring.acquire_write()  # clean: near miss, released with the outcome on one line for both cases
        if idx is None:
            return False
        fits = len(data) <= self.ring.buf.shape[1]
        if fits:
            self.ring.buf[idx, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.ring.release_write(idx, ok=fits)
        return fits

    def recv(self) -> Optional[bytes]:
        with self.reading() as view:  # clean: with statement
            if view is None:
                return None
            return view.numpy().tobytes()

    def recv_all(self, limit: int) -> List[bytes]:
        out: List[bytes] = []
        while True:
            idx = self.ring.acquire_read()  # leak: the break at the limit comes between the acquire and the release
            if idx is None:
                break
            out.append(self.ring.buf[idx].numpy().tobytes())
            if len(out) >= limit:
                break
            self.ring.release_read(idx)
        return out

    def recv_upto(self, limit: int) -> List[bytes]:
        out: List[bytes] = []
        while len(out) < limit:
            if (idx := self.ring.acquire_read()) is None:  # clean: near miss, the break is taken only on None
                break
            out.append(self.ring.buf[idx].numpy().tobytes())
            self.ring.release_read(idx)
        return out

    def forward(self, other: "MessageQueue") -> bool:
        src = self.ring.acquire_read()  # clean: near miss, released on both paths where it was got
        if src is None:
            return False
        dst = other.ring.acquire_write()  # clean: released after the copy
        if dst is None:
            self.ring.release_read(src)
            return False
        other.ring.buf[dst].copy_(self.ring.buf[src])
        other.ring.release_write(dst)
        self.ring.release_read(src)
        return True

    def forward_reversed(self, other: "MessageQueue") -> bool:
        dst = other.ring.acquire_write()  # leak: with nothing to read the chunk stays in writing state
        if dst is None:
            return False
        src = self.ring.acquire_read()  # clean: released after the copy
        if src is None:
            return False
        other.ring.buf[dst].copy_(self.ring.buf[src])
        self.ring.release_read(src)
        other.ring.release_write(dst)
        return True

    def has_message(self) -> bool:
        return self.ring.acquire_read() is not None  # leak: the chunk looked for goes into reading state for good
