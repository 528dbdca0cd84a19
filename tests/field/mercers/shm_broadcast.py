"""Shared memory broadcast from the scheduler to the tensor parallel workers."""
from __future__ import annotations

import pickle
import threading
import time
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Tuple


class Chunk:
    __slots__ = ("index", "buf", "size", "pending")

    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.buf = bytearray(nbytes)
        self.size = 0
        self.pending = 0


class ChunkRing:
    """Writers claim chunks, readers get a view on them; a chunk is reused when nobody has it."""

    def __init__(self, chunks: int, nbytes: int, readers: int) -> None:
        self.nbytes = nbytes
        self.readers = readers
        self._chunks = [Chunk(i, nbytes) for i in range(chunks)]
        self._vacant = list(range(chunks))
        self._mu = threading.Lock()

    def begin_write(self) -> Optional[Chunk]:
        with self._mu:
            if not self._vacant:
                return None
            chunk = self._chunks[self._vacant.pop(0)]
            chunk.size = 0
            return chunk

    def publish(self, chunk: Chunk, size: int) -> None:
        """Ends the write. From now on the chunk belongs to its readers."""
        with self._mu:
            chunk.size = size
            chunk.pending = self.readers

    def abandon(self, chunk: Chunk) -> None:
        """Ends the write, nothing is published."""
        with self._mu:
            chunk.size = 0
            self._vacant.append(chunk.index)

    def begin_read(self, index: int) -> Optional[Chunk]:
        chunk = self._chunks[index]
        return chunk if chunk.pending > 0 else None

    def end_read(self, chunk: Chunk) -> None:
        with self._mu:
            chunk.pending -= 1
            if chunk.pending == 0:
                self._vacant.append(chunk.index)


class OverflowSockets:
    """Messages too large for a chunk go through one of a few sockets."""

    def __init__(self, n: int) -> None:
        self._spare: List[int] = list(range(n))
        self.sent = 0

    def take_socket(self) -> Optional[int]:
        return self._spare.pop() if self._spare else None

    def return_socket(self, fd: int) -> None:
        self._spare.append(fd)

    def send(self, fd: int, data: bytes) -> bool:
        self.sent += len(data)
        return fd >= 0 and bool(data)


class Broadcaster:
    def __init__(self, ring: ChunkRing, overflow: OverflowSockets) -> None:
        self.ring = ring
        self.overflow = overflow
        self.dropped = 0
        self.scheduled: Dict[str, Tuple[Chunk, int]] = {}
        self._standing: Optional[int] = None

    def _wait_write(self, timeout: float) -> Optional[Chunk]:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            chunk = self.ring.begin_write()  # clean: near miss, only None loops, others returned
            if chunk is not None:
                return chunk
            time.sleep(0.0001)
        return None

    def send(self, msg: Any, timeout: float = 1.0) -> bool:
        data = pickle.dumps(msg)
        if len(data) > self.ring.nbytes:
            return self._send_large(data)
        chunk = self._wait_write(timeout)  # clean: published
        if chunk is None:
            self.dropped += 1
            return False
        chunk.buf[:len(data)] = data
        self.ring.publish(chunk, len(data))
        return True

    def send_once(self, msg: Any, timeout: float = 1.0) -> bool:
        chunk = self._wait_write(timeout)  # leak: an oversized message returns without the chunk
        if chunk is None:
            return False
        data = pickle.dumps(msg)
        if len(data) > self.ring.nbytes:
            return self._send_large(data)
        chunk.buf[:len(data)] = data
        self.ring.publish(chunk, len(data))
        return True

    def _send_large(self, data: bytes) -> bool:
        fd = self.overflow.take_socket()  # clean: returned after the send
        if fd is None:
            return False
        ok = self.overflow.send(fd, data)
        self.overflow.return_socket(fd)
        return ok

    def send_pair(self, data: bytes) -> bool:
        """Header and body over two sockets."""
        head = self.overflow.take_socket()  # leak: stays out when there is no second socket
        body = self.overflow.take_socket()  # clean: near miss, None whenever that return is taken
        if head is None or body is None:
            return False
        ok = self.overflow.send(head, data[:64]) and self.overflow.send(body, data[64:])
        self.overflow.return_socket(body)
        self.overflow.return_socket(head)
        return ok

    def standing_socket(self) -> Optional[int]:
        if self._standing is None:
            self._standing = self.overflow.take_socket()  # clean: near miss, taken once, returned by close
        return self._standing

    def close(self) -> None:
        if self._standing is not None:
            self.overflow.return_socket(self._standing)
            self._standing = None

    @contextmanager
    def write_slot(self) -> Iterator[Optional[Chunk]]:
        chunk = self.ring.begin_write()  # leak: a chunk the body left empty is not abandoned
        yield chunk
        if chunk is not None and chunk.size > 0:
            self.ring.publish(chunk, chunk.size)

    def schedule(self, name: str, data: bytes) -> bool:
        if name in self.scheduled:
            return False
        chunk = self.ring.begin_write()  # clean: near miss, in scheduled, ended by flush or revoke
        if chunk is None:
            return False
        chunk.buf[:len(data)] = data
        self.scheduled[name] = (chunk, len(data))
        return True

    def flush(self) -> int:
        n = 0
        for chunk, size in self.scheduled.values():
            self.ring.publish(chunk, size)
            n += 1
        self.scheduled.clear()
        return n

    def revoke(self, name: str) -> None:
        entry = self.scheduled.pop(name, None)
        if entry is not None:
            self.ring.abandon(entry[0])


class Reader:
    def __init__(self, ring: ChunkRing, rank: int) -> None:
        self.ring = ring
        self.rank = rank
        self.cursor = 0
        self.skipped = 0

    def recv(self) -> Optional[Any]:
        chunk = self.ring.begin_read(self.cursor)  # clean: None on the early return, else ended below
        if chunk is None:
            return None
        data = bytes(chunk.buf[:chunk.size])
        self.ring.end_read(chunk)
        self.cursor = (self.cursor + 1) % len(self.ring._chunks)
        return pickle.loads(data)

    def recv_kind(self, kind: str) -> Optional[Dict[str, Any]]:
        """The next message if it is of a kind."""
        chunk = self.ring.begin_read(self.cursor)  # leak: a message of another kind is not ended
        if chunk is None:
            return None
        self.cursor = (self.cursor + 1) % len(self.ring._chunks)
        msg = pickle.loads(bytes(chunk.buf[:chunk.size]))
        if msg.get("kind") != kind:
            self.skipped += 1
            return None
        self.ring.end_read(chunk)
        return msg
