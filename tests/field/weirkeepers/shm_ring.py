"""Shared memory ring that broadcasts scheduler output to the tensor parallel ranks."""
from __future__ import annotations

import pickle
import struct
import threading
import time
from typing import Any, Callable, List, Optional, Tuple

HEADER = struct.Struct("<IQ")


class Chunk:
    __slots__ = ("index", "memory", "length", "seq")

    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.memory = memoryview(bytearray(nbytes))
        self.length = 0
        self.seq = 0


class BroadcastRing:
    def __init__(self, chunks: int, nbytes: int, readers: int) -> None:
        self.nbytes = nbytes
        self.readers = readers
        self._chunks = [Chunk(i, nbytes) for i in range(chunks)]
        self._pending = [0] * chunks
        self._writing = [False] * chunks
        self._cond = threading.Condition()
        self._head = 0

    def acquire_write(self, timeout: Optional[float] = None) -> Optional[Chunk]:
        """The next chunk for writing; commit() or revoke() ends it."""
        with self._cond:
            index = self._head % len(self._chunks)
            ok = self._cond.wait_for(lambda: self._pending[index] == 0 and not self._writing[index], timeout)
            if not ok:
                return None
            self._writing[index] = True
            return self._chunks[index]

    def commit(self, chunk: Chunk, length: int) -> None:
        with self._cond:
            chunk.length = length
            chunk.seq = self._head
            self._writing[chunk.index] = False
            self._pending[chunk.index] = self.readers
            self._head += 1
            self._cond.notify_all()

    def revoke(self, chunk: Chunk) -> None:
        with self._cond:
            self._writing[chunk.index] = False
            self._cond.notify_all()

    def acquire_read(self, seq: int, timeout: Optional[float] = None) -> Optional[Chunk]:
        with self._cond:
            if not self._cond.wait_for(lambda: self._head > seq, timeout):
                return None
            return self._chunks[seq % len(self._chunks)]

    def release_read(self, chunk: Chunk) -> None:
        with self._cond:
            self._pending[chunk.index] -= 1
            self._cond.notify_all()


class WriteScope:
    def __init__(self, ring: BroadcastRing) -> None:
        self.ring = ring
        self.length = 0

    def __enter__(self) -> "WriteScope":
        self.chunk = self.ring.acquire_write()  # clean: __exit__ commits or revokes it
        return self

    def write(self, payload: bytes) -> None:
        self.chunk.memory[self.length:self.length + len(payload)] = payload
        self.length += len(payload)

    def __exit__(self, exc_type, exc, tb) -> None:
        if exc_type is None and self.length:
            self.ring.commit(self.chunk, self.length)
        else:
            self.ring.revoke(self.chunk)


class ReadScope:
    def __init__(self, ring: BroadcastRing, seq: int) -> None:
        self.ring = ring
        self.seq = seq
        self.chunk: Optional[Chunk] = None

    def __enter__(self) -> Optional[Chunk]:
        self.chunk = self.ring.acquire_read(self.seq, 1.0)  # leak: __exit__ skips an empty message
        return self.chunk

    def __exit__(self, *exc) -> None:
        if self.chunk is None or self.chunk.length == 0:
            return
        self.ring.release_read(self.chunk)


class Broadcaster:
    def __init__(self, ring: BroadcastRing) -> None:
        self.ring = ring
        self.sent = 0
        self.overflow: List[bytes] = []

    def send(self, obj: Any) -> bool:
        payload = pickle.dumps(obj, protocol=5)
        chunk = self.ring.acquire_write(timeout=5.0)  # leak: an oversized payload returns without revoke
        if chunk is None:
            return False
        if len(payload) + HEADER.size > self.ring.nbytes:
            self.overflow.append(payload)
            return False
        HEADER.pack_into(chunk.memory, 0, len(payload), self.sent)
        chunk.memory[HEADER.size:HEADER.size + len(payload)] = payload
        self.ring.commit(chunk, HEADER.size + len(payload))
        self.sent += 1
        return True

    def send_raw(self, payload: bytes) -> bool:
        if len(payload) > self.ring.nbytes:
            self.overflow.append(payload)
            return False
        chunk = self.ring.acquire_write()  # clean: near miss, the size was looked at before; committed
        chunk.memory[: len(payload)] = payload
        self.ring.commit(chunk, len(payload))
        return True

    def send_parts(self, parts: List[bytes]) -> int:
        with WriteScope(self.ring) as scope:  # clean: with
            for part in parts:
                if not part:
                    continue
                scope.write(part)
            return scope.length

    def _open_chunk(self, need: int) -> Optional[Chunk]:
        chunk = self.ring.acquire_write(0.5)  # clean: revoked when too small, else handed on
        if chunk is not None and len(chunk.memory) < need:
            self.ring.revoke(chunk)
            return None
        return chunk

    def send_stop(self) -> bool:
        chunk = self._open_chunk(4)  # clean: committed
        if chunk is None:
            return False
        chunk.memory[:4] = b"STOP"
        self.ring.commit(chunk, 4)
        return True

    def send_if_changed(self, state: bytes, last: bytes) -> bool:
        chunk = self._open_chunk(len(state))  # leak: unchanged state returns without commit or revoke
        if chunk is None:
            return False
        if state == last:
            return False
        chunk.memory[: len(state)] = state
        self.ring.commit(chunk, len(state))
        return True


class Listener:
    def __init__(self, ring: BroadcastRing, rank: int) -> None:
        self.ring = ring
        self.rank = rank
        self.seq = 0
        self._handlers: List[Callable[[Any], bool]] = []
        self._held: Optional[Chunk] = None

    def recv(self) -> Any:
        chunk = self.ring.acquire_read(self.seq)  # clean: released before unpickling
        size, _ = HEADER.unpack_from(chunk.memory, 0)
        blob = bytes(chunk.memory[HEADER.size:HEADER.size + size])
        self.ring.release_read(chunk)
        self.seq += 1
        return pickle.loads(blob)

    def poll(self, deadline: float) -> Tuple[bool, Any]:
        while time.monotonic() < deadline:
            chunk = self.ring.acquire_read(self.seq, 0.05)  # leak: a stale chunk is skipped by continue
            if chunk is None:
                continue
            self.seq += 1
            if chunk.seq + 1 != self.seq:
                continue
            blob = bytes(chunk.memory[HEADER.size:chunk.length])
            self.ring.release_read(chunk)
            return True, pickle.loads(blob)
        return False, None

    def view_next(self) -> Optional[memoryview]:
        """Zero copy: the chunk stays held until the following call or stop()."""
        if self._held is not None:
            self.ring.release_read(self._held)
            self._held = None
        self._held = self.ring.acquire_read(self.seq, 0.1)  # clean: near miss, next call or stop releases
        if self._held is None:
            return None
        self.seq += 1
        return self._held.memory[: self._held.length]

    def stop(self) -> None:
        if self._held is not None:
            self.ring.release_read(self._held)
            self._held = None

    def dispatch(self) -> int:
        handled = 0
        with ReadScope(self.ring, self.seq) as chunk:  # clean: the with is right, the loss is in __exit__
            if chunk is None:
                return 0
            obj = bytes(chunk.memory[: chunk.length])
            for handler in self._handlers:
                handled += bool(handler(obj))
        self.seq += 1
        return handled

    def wait_for_stop(self) -> int:
        seen = 0
        while True:
            chunk = self.ring.acquire_read(self.seq)  # leak: break at STOP without release_read
            self.seq += 1
            if bytes(chunk.memory[:4]) == b"STOP":
                break
            seen += chunk.length
            self.ring.release_read(chunk)
        return seen
