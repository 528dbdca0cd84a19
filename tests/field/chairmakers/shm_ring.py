"""Broadcast from the driver to tensor-parallel workers over shared memory.

Small messages travel in the chunks of a ring; large ones get a side segment of their own.
"""
import logging
import pickle
import struct
import threading
import time
import zlib
from concurrent.futures import Future
from multiprocessing import shared_memory

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<IIB")
KIND_INLINE, KIND_SIDE, KIND_STOP = 0, 1, 2


class RingTimeout(Exception):
    pass


class SideFull(Exception):
    pass


class WorkerDied(RuntimeError):
    pass


class ChunkRing:
    def __init__(self, chunks: int, chunk_bytes: int, readers: int):
        self.chunk_bytes, self.readers = chunk_bytes, readers
        self.shm = shared_memory.SharedMemory(create=True, size=chunks * chunk_bytes)  # clean: closed and unlinked in destroy()
        self._free = list(range(chunks))
        self._pending = {}
        self._queues = [[] for _ in range(readers)]
        self._cond = threading.Condition()

    def claim(self, timeout: float = 5.0) -> int:
        """A chunk to write into. Ends in commit() or cancel()."""
        deadline = time.monotonic() + timeout
        with self._cond:
            while not self._free:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RingTimeout("all chunks are in flight")
                self._cond.wait(left)
            return self._free.pop()  # clean: handed to the writer

    def view(self, chunk: int) -> memoryview:
        lo = chunk * self.chunk_bytes
        return self.shm.buf[lo:lo + self.chunk_bytes]

    def commit(self, chunk: int) -> None:
        with self._cond:
            self._pending[chunk] = self.readers
            for q in self._queues:
                q.append(chunk)
            self._cond.notify_all()

    def cancel(self, chunk: int) -> None:
        with self._cond:
            self._free.append(chunk)
            self._cond.notify_all()

    def next_chunk(self, rank: int, timeout: float = 1.0):
        """The next committed chunk for this reader, or None. Ends in ack()."""
        with self._cond:
            if not self._queues[rank]:
                self._cond.wait(timeout)
            if not self._queues[rank]:
                return None
            return self._queues[rank].pop(0)  # clean: handed to the reader

    def ack(self, chunk: int) -> None:
        with self._cond:
            self._pending[chunk] -= 1
            if self._pending[chunk] == 0:
                del self._pending[chunk]
                self._free.append(chunk)
                self._cond.notify_all()

    def destroy(self) -> None:
        self.shm.close()
        self.shm.unlink()


class SideSegments:
    """Segments of the writer; a segment goes when every reader is through with it."""

    def __init__(self, limit: int):
        self.limit = limit
        self._live = {}
        self._lock = threading.Lock()

    def make(self, nbytes: int) -> shared_memory.SharedMemory:
        with self._lock:
            if len(self._live) >= self.limit:
                raise SideFull(f"{self.limit} side segments are live")
            seg = shared_memory.SharedMemory(create=True, size=nbytes)  # clean: kept by name in _live until drop()
            self._live[seg.name] = seg
        return seg

    def drop(self, name: str) -> None:
        with self._lock:
            seg = self._live.pop(name, None)
        if seg is not None:
            seg.close()
            seg.unlink()


class ReplySlots:
    """One slot per outstanding call; workers put their results there."""

    def __init__(self, count: int):
        self._sem = threading.Semaphore(count)
        self._lock = threading.Lock()
        self._open = {}
        self._next = 0

    def open(self, want: int) -> int:
        self._sem.acquire()  # clean: shut() gives the permit back
        with self._lock:
            self._next += 1
            self._open[self._next] = ([], want, threading.Event())
            return self._next

    def put(self, slot: int, value) -> None:
        with self._lock:
            values, want, event = self._open[slot]
            values.append(value)
            if len(values) == want:
                event.set()

    def wait(self, slot: int, timeout: float):
        values, _, event = self._open[slot]
        return list(values) if event.wait(timeout) else None

    def shut(self, slot: int) -> None:
        with self._lock:
            del self._open[slot]
        self._sem.release()


class Broadcaster:
    def __init__(self, ring: ChunkRing, side: SideSegments):
        self.ring, self.side = ring, side

    def send(self, message) -> None:
        payload = pickle.dumps(message, protocol=5)
        chunk = self.ring.claim()  # leak: SideFull out of make() leaves the chunk claimed
        view = self.ring.view(chunk)
        room = self.ring.chunk_bytes - HEADER.size
        if len(payload) > room:
            seg = self.side.make(len(payload))  # leak: side_done() waits for every rank, but a rank that refuses the chunk or the segment never reports it
            seg.buf[:len(payload)] = payload
            body, kind = seg.name.encode(), KIND_SIDE
        else:
            body, kind = payload, KIND_INLINE
        HEADER.pack_into(view, 0, len(body), zlib.crc32(body), kind)
        view[HEADER.size:HEADER.size + len(body)] = body
        self.ring.commit(chunk)

    def stop(self) -> None:
        try:
            chunk = self.ring.claim(timeout=0.5)  # clean: committed two lines on
        except RingTimeout:
            logger.warning("no chunk for the stop message")
            return
        HEADER.pack_into(self.ring.view(chunk), 0, 0, 0, KIND_STOP)
        self.ring.commit(chunk)


class Worker(threading.Thread):
    def __init__(self, rank: int, ring: ChunkRing, replies: ReplySlots, model, on_side_done):
        super().__init__(daemon=True, name=f"tp-{rank}")
        self.rank, self.ring, self.replies = rank, ring, replies
        self.model, self.on_side_done = model, on_side_done

    def _read_side(self, name: str):
        seg = shared_memory.SharedMemory(name=name)  # leak: a segment without the pickle mark returns before the close
        if bytes(seg.buf[:1]) != b"\x80":
            logger.error("rank %d: %s is not a pickle", self.rank, name)
            return None
        message = pickle.loads(bytes(seg.buf))
        seg.close()
        self.on_side_done(name, self.rank)
        return message

    def run(self) -> None:
        while True:
            chunk = self.ring.next_chunk(self.rank)  # leak: a bad checksum goes on with the loop and never acks
            if chunk is None:
                continue
            view = self.ring.view(chunk)
            size, crc, kind = HEADER.unpack_from(view, 0)
            body = bytes(view[HEADER.size:HEADER.size + size])
            if kind != KIND_STOP and zlib.crc32(body) != crc:
                logger.error("rank %d: chunk %d is damaged", self.rank, chunk)
                continue
            self.ring.ack(chunk)
            if kind == KIND_STOP:
                return
            message = pickle.loads(body) if kind == KIND_INLINE else self._read_side(body.decode())
            if message is not None:
                slot, method, args = message
                self.replies.put(slot, getattr(self.model, method)(*args))


class Executor:
    def __init__(self, caster: Broadcaster, replies: ReplySlots, world: int, timeout: float = 30.0):
        self.caster, self.replies = caster, replies
        self.world, self.timeout = world, timeout
        self._seen = {}

    def side_done(self, name: str, rank: int) -> None:
        ranks = self._seen.setdefault(name, set())
        ranks.add(rank)
        if len(ranks) == self.world:
            del self._seen[name]
            self.caster.side.drop(name)

    def call(self, method: str, *args):
        slot = self.replies.open(self.world)  # clean: near miss, the finally shuts it for the raise as well
        try:
            self.caster.send((slot, method, args))
            out = self.replies.wait(slot, self.timeout)
            if out is None:
                raise WorkerDied(method)
            return out
        finally:
            self.replies.shut(slot)

    def call_async(self, method: str, *args) -> Future:
        future: Future = Future()
        slot = self.replies.open(self.world)  # leak: RingTimeout or SideFull out of send() means no thread that would shut it
        self.caster.send((slot, method, args))

        def collect() -> None:
            out = self.replies.wait(slot, self.timeout)
            self.replies.shut(slot)
            if out is None:
                future.set_exception(WorkerDied(method))
            else:
                future.set_result(out)

        threading.Thread(target=collect, daemon=True).start()
        return future

    def probe(self) -> bool:
        slot = self.replies.open(1)  # leak: the timeout returns False with the slot open
        self.caster.send((slot, "ping", ()))
        if self.replies.wait(slot, 1.0) is None:
            return False
        self.replies.shut(slot)
        return True
