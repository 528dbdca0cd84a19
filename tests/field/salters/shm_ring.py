"""Broadcast ring between the scheduler process and the tensor-parallel ranks."""
from __future__ import annotations

import pickle
import struct
import threading
import time
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Any, List, Optional, Protocol

HEADER = struct.Struct("<QI")


class Releasable(Protocol):
    def release(self) -> None: ...


class SlotRing:
    """A ring of fixed chunks; a writer reserves a chunk and commits or cancels it."""

    def __init__(self, name: str, chunks: int, chunk_bytes: int, create: bool = True) -> None:
        self.chunks = chunks
        self.chunk_bytes = chunk_bytes
        size = chunks * chunk_bytes
        self._shm = shared_memory.SharedMemory(name=name, create=create, size=size)  # clean: close() ends it
        self._state = ["free"] * chunks
        self._readers = [0] * chunks
        self._reading = [0] * chunks
        self._head = 0

    def reserve(self) -> Optional[int]:
        for step in range(self.chunks):
            i = (self._head + step) % self.chunks
            if self._state[i] == "free":
                self._state[i] = "writing"
                self._head = i + 1
                return i
        return None

    def view(self, i: int) -> memoryview:
        return self._shm.buf[i * self.chunk_bytes:(i + 1) * self.chunk_bytes]

    def commit(self, i: int, readers: int) -> None:
        """Hands the chunk to the readers; it is free when the last of them has read it."""
        self._readers[i] = readers
        self._state[i] = "ready"

    def cancel(self, i: int) -> None:
        self._state[i] = "free"

    def read_begin(self, i: int) -> bool:
        if self._state[i] != "ready":
            return False
        self._reading[i] += 1
        return True

    def read_end(self, i: int) -> None:
        self._reading[i] -= 1
        self._readers[i] -= 1
        if self._readers[i] == 0:
            self._state[i] = "free"

    def close(self) -> None:
        self._shm.close()


class Spinlock:
    def __init__(self) -> None:
        self._inner = threading.Lock()
        self.contended = 0

    def enter(self, spins: int = 1000) -> bool:
        for _ in range(spins):
            if self._inner.acquire(blocking=False):  # clean: leave() releases it
                return True
            self.contended += 1
        return False

    def leave(self) -> None:
        self._inner.release()


@dataclass
class Ticket:
    ring: SlotRing
    index: int
    size: int = 0

    def release(self) -> None:
        self.ring.cancel(self.index)


class Broadcaster:
    def __init__(self, ring: SlotRing, ranks: int) -> None:
        self.ring = ring
        self.ranks = ranks
        self.lock = Spinlock()
        self.seq = 0
        self.dropped = 0
        self._held: List[Ticket] = []

    def _encode(self, obj: Any) -> bytes:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)

    def send(self, obj: Any) -> bool:
        data = self._encode(obj)
        i = self.ring.reserve()  # leak: an object too large for a chunk leaves it in the writing state
        if i is None:
            self.dropped += 1
            return False
        if len(data) + HEADER.size > self.ring.chunk_bytes:
            self.dropped += 1
            return False
        view = self.ring.view(i)
        HEADER.pack_into(view, 0, self.seq, len(data))
        view[HEADER.size:HEADER.size + len(data)] = data
        self.seq += 1
        self.ring.commit(i, self.ranks)
        return True

    def send_checked(self, obj: Any) -> bool:
        data = self._encode(obj)
        i = self.ring.reserve()  # clean: committed, or cancelled when it does not fit
        if i is None:
            return False
        fits = len(data) + HEADER.size <= self.ring.chunk_bytes
        if fits:
            view = self.ring.view(i)
            HEADER.pack_into(view, 0, self.seq, len(data))
            view[HEADER.size:HEADER.size + len(data)] = data
            self.seq += 1
        if not fits:
            self.ring.cancel(i)
            return False
        self.ring.commit(i, self.ranks)
        return True

    def send_locked(self, obj: Any) -> bool:
        if not self.lock.enter():  # leak: a full ring returns without leave()
            return False
        data = self._encode(obj)
        i = self.ring.reserve()  # clean: committed, possibly as a truncated message
        if i is None:
            self.dropped += 1
            return False
        view = self.ring.view(i)
        room = self.ring.chunk_bytes - HEADER.size
        HEADER.pack_into(view, 0, self.seq, min(len(data), room))
        view[HEADER.size:HEADER.size + min(len(data), room)] = data[:room]
        self.ring.commit(i, self.ranks)
        self.lock.leave()
        return True

    def gather_chunks(self, count: int) -> Optional[List[int]]:
        """Chunks for a message in several parts, all or nothing."""
        got: List[int] = []
        while len(got) < count:
            i = self.ring.reserve()  # clean: near miss, what was got is cancelled when there are too few
            if i is None:
                for held in got:
                    self.ring.cancel(held)
                return None
            got.append(i)
        return got

    def send_large(self, obj: Any) -> bool:
        data = self._encode(obj)
        room = self.ring.chunk_bytes - HEADER.size
        count = -(-len(data) // room)
        chunks = self.gather_chunks(count)  # clean: every chunk is committed
        if chunks is None:
            return False
        for part, i in enumerate(chunks):
            piece = data[part * room:(part + 1) * room]
            view = self.ring.view(i)
            HEADER.pack_into(view, 0, self.seq, len(piece))
            view[HEADER.size:HEADER.size + len(piece)] = piece
            self.ring.commit(i, self.ranks)
        self.seq += 1
        return True

    def send_large_until(self, obj: Any, deadline: float) -> bool:
        data = self._encode(obj)
        room = self.ring.chunk_bytes - HEADER.size
        chunks = self.gather_chunks(-(-len(data) // room))  # leak: the rest stays reserved at the deadline
        if chunks is None:
            return False
        for part, i in enumerate(chunks):
            if time.monotonic() > deadline:
                self.dropped += 1
                return False
            piece = data[part * room:(part + 1) * room]
            self.ring.view(i)[HEADER.size:HEADER.size + len(piece)] = piece
            self.ring.commit(i, self.ranks)
        return True

    def ticket(self) -> Optional[Ticket]:
        i = self.ring.reserve()  # clean: wrapped in the ticket that is returned
        if i is None:
            return None
        return Ticket(self.ring, i)

    def hold_back(self, n: int) -> int:
        """Keeps chunks away from ordinary messages while weights are updated."""
        for _ in range(n):
            t = self.ticket()  # clean: unhold() releases all that are held
            if t is None:
                break
            self._held.append(t)
        return len(self._held)

    def unhold(self) -> None:
        release_all(self._held)
        self._held.clear()

    def trim_held(self, keep: int) -> int:
        """Tops up by one for the control message, then keeps only the newest."""
        t = self.ticket()  # clean: near miss, held or released with the surplus
        if t is not None:
            self._held.append(t)
        surplus, self._held = self._held[:-keep], self._held[-keep:]
        release_all(surplus)
        return len(self._held)

    def free_now(self) -> int:
        tickets = []
        while (t := self.ticket()) is not None:  # leak: counted and never released
            tickets.append(t)
        return len(tickets)


def release_all(items: List[Releasable]) -> None:
    for item in items:
        item.release()


class RankReader:
    def __init__(self, ring: SlotRing, rank: int) -> None:
        self.ring = ring
        self.rank = rank
        self.cursor = 0
        self.expected = 0

    def recv(self) -> Optional[Any]:
        i = self.cursor % self.ring.chunks
        if not self.ring.read_begin(i):  # leak: a message out of sequence returns before read_end()
            return None
        seq, size = HEADER.unpack_from(self.ring.view(i), 0)
        self.cursor += 1
        if seq != self.expected:
            self.expected = seq + 1
            return None
        obj = pickle.loads(self.ring.view(i)[HEADER.size:HEADER.size + size])
        self.expected += 1
        self.ring.read_end(i)
        return obj

    def recv_wait(self, timeout: float) -> Optional[Any]:
        until = time.monotonic() + timeout
        i = self.cursor % self.ring.chunks
        while not self.ring.read_begin(i):  # clean: near miss, a refused read holds nothing
            if time.monotonic() > until:
                return None
            time.sleep(0)
        _, size = HEADER.unpack_from(self.ring.view(i), 0)
        data = bytes(self.ring.view(i)[HEADER.size:HEADER.size + size])
        self.ring.read_end(i)
        self.cursor += 1
        return pickle.loads(data) if data else None
