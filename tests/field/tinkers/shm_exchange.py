"""Shared memory between the tokenizer processes and the engine at Pontoon."""
from __future__ import annotations

import os
import threading
from collections import deque
from multiprocessing import shared_memory
from typing import Dict, List, NamedTuple, Optional, Tuple


class SegmentStore:
    """Named segments that this process created, and so must unlink."""

    def __init__(self, prefix: str, budget: int) -> None:
        self._prefix = prefix
        self._budget = budget
        self._mine: Dict[str, shared_memory.SharedMemory] = {}
        self._serial = 0

    def found(self, size: int) -> str:
        total = sum(s.size for s in self._mine.values())
        if total + size > self._budget:
            raise MemoryError("segment budget is spent")
        self._serial += 1
        name = f"{self._prefix}-{os.getpid()}-{self._serial}"
        self._mine[name] = shared_memory.SharedMemory(name=name, create=True, size=size)
        return name

    def buffer(self, name: str) -> memoryview:
        return self._mine[name].buf

    def dissolve(self, name: str) -> None:
        segment = self._mine.pop(name)
        segment.close()
        segment.unlink()

    def dissolve_all(self) -> None:
        for name in list(self._mine):
            self.dissolve(name)


def ship_image(store: SegmentStore, pixels: bytes, engine) -> Optional[str]:
    name = store.found(len(pixels))  # leak: the engine's refusal is caught and the segment stays
    store.buffer(name)[:len(pixels)] = pixels
    try:
        ack = engine.submit(name, len(pixels))
    except ConnectionResetError:
        return None
    engine.wait(ack)
    store.dissolve(name)
    return ack


def ship_many(store: SegmentStore, images: List[bytes], engine) -> int:
    names = []
    for pixels in images:
        name = store.found(len(pixels))  # clean: near miss, skipped or sent every name is in the list that is dissolved
        names.append(name)
        if not engine.wants(len(pixels)):
            continue
        store.buffer(name)[:len(pixels)] = pixels
        engine.submit(name, len(pixels))
    engine.barrier()
    for name in names:
        store.dissolve(name)
    return len(names)


class RingCell(NamedTuple):
    index: int
    lap: int


class ClaimRing:
    """Many writers claim cells; a cell becomes visible when published, or is skipped when abandoned."""

    WRITING, READY, SKIP, EMPTY = range(4)

    def __init__(self, size: int) -> None:
        self._state = bytearray([self.EMPTY]) * size
        self._size = size
        self._head = 0
        self._tail = 0
        self._lock = threading.Lock()

    def claim_cell(self) -> Optional[RingCell]:
        with self._lock:
            if self._head - self._tail >= self._size:
                return None
            lap, index = divmod(self._head, self._size)
            self._head += 1
            self._state[index] = self.WRITING
            return RingCell(index, lap)

    def publish(self, cell: RingCell) -> None:
        self._state[cell.index] = self.READY

    def abandon(self, cell: RingCell) -> None:
        self._state[cell.index] = self.SKIP

    def read(self) -> Optional[int]:
        with self._lock:
            while self._tail < self._head:
                index = self._tail % self._size
                state = self._state[index]
                if state == self.WRITING:
                    return None
                self._state[index] = self.EMPTY
                self._tail += 1
                if state == self.READY:
                    return index
            return None


def write_record(ring: ClaimRing, table, record) -> bool:
    cell = ring.claim_cell()  # leak: a record too large is refused and its cell blocks the ring
    if cell is None:
        return False
    data = record.encode()
    if len(data) > table.width:
        return False
    table.put(cell.index, data)
    ring.publish(cell)
    return True


def write_checked(ring: ClaimRing, table, record) -> bool:
    cell = ring.claim_cell()  # clean: abandoned on the error, published else
    if cell is None:
        return False
    try:
        table.put(cell.index, record.encode())
    except ValueError:
        ring.abandon(cell)
        return False
    ring.publish(cell)
    return True


class FdTable:
    """File descriptors of the vocabulary files; a small table with a hard limit."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._fds: Dict[int, str] = {}

    def adopt(self, path: str) -> int:
        if len(self._fds) >= self._limit:
            raise OSError(24, "fd table is full")
        fd = os.open(path, os.O_RDONLY)
        self._fds[fd] = path
        return fd

    def disown(self, fd: int) -> None:
        del self._fds[fd]
        os.close(fd)

    def path_of(self, fd: int) -> str:
        return self._fds[fd]


def first_with_magic(table: FdTable, paths: List[str], magic: bytes) -> Optional[int]:
    for path in paths:
        fd = table.adopt(path)  # leak: a file with another magic is passed over with its fd in the table
        if os.pread(fd, len(magic), 0) == magic:
            return fd
    return None


def sizes(table: FdTable, paths: List[str]) -> Dict[str, int]:
    found = {}
    for path in paths:
        try:
            fd = table.adopt(path)  # clean: a caught OSError of adopt holds nothing, else disowned
        except OSError:
            found[path] = -1
            continue
        found[path] = os.fstat(fd).st_size
        table.disown(fd)
    return found


class NameLatches:
    """One latch by name, made when first wanted, counted by those who want it."""

    def __init__(self) -> None:
        self._latches: Dict[str, List] = {}
        self._mu = threading.Lock()

    def latch(self, name: str, timeout: float = -1) -> bool:
        with self._mu:
            entry = self._latches.setdefault(name, [threading.Lock(), 0])
            entry[1] += 1
        got = entry[0].acquire(timeout=timeout)
        if not got:
            self._forget(name)
        return got

    def unlatch(self, name: str) -> None:
        self._latches[name][0].release()
        self._forget(name)

    def _forget(self, name: str) -> None:
        with self._mu:
            entry = self._latches[name]
            entry[1] -= 1
            if entry[1] == 0:
                del self._latches[name]


def load_once(latches: NameLatches, name: str, cache: dict, loader):
    latches.latch(name)  # leak: a value found in the cache is returned under the latch
    if name in cache:
        return cache[name]
    cache[name] = loader(name)
    latches.unlatch(name)
    return cache[name]


def load_soon(latches: NameLatches, name: str, cache: dict, loader):
    if not latches.latch(name, 0.2):  # clean: timed out holds nothing, else unlatched in finally
        return None
    try:
        if name in cache:
            return cache[name]
        cache[name] = loader(name)
        return cache[name]
    finally:
        latches.unlatch(name)


class Mailbox:
    def __init__(self, number: int) -> None:
        self.number = number
        self.letters: deque = deque()
        self.ready = threading.Event()

    def put(self, letter) -> None:
        self.letters.append(letter)
        self.ready.set()


class MailRoom:
    """A fixed wall of mailboxes, rented for one request and given up by box number."""

    def __init__(self, boxes: int) -> None:
        self._wall: List[Optional[Mailbox]] = [None] * boxes
        self.rented_ever = 0

    def rent(self) -> Mailbox:
        for number, box in enumerate(self._wall):
            if box is None:
                box = Mailbox(number)
                self._wall[number] = box
                self.rented_ever += 1
                return box
        raise BlockingIOError("all boxes are rented")

    def deliver(self, number: int, letter) -> None:
        box = self._wall[number]
        if box is not None:
            box.put(letter)

    def give_up(self, number: int) -> None:
        if self._wall[number] is None:
            raise KeyError(number)
        self._wall[number] = None


def ask(room: MailRoom, engine, question, timeout: float) -> Optional[object]:
    box = room.rent()  # leak: no answer in time, then None is returned with the box rented
    engine.send(question, reply_to=box.number)
    if not box.ready.wait(timeout):
        return None
    answer = box.letters.popleft()
    room.give_up(box.number)
    return answer


class Caller:
    def __init__(self, room: MailRoom, engine) -> None:
        self.box = room.rent()  # clean: one box for the caller's life, given up in close
        self.room = room
        self.engine = engine

    def call(self, question) -> object:
        self.engine.send(question, reply_to=self.box.number)
        self.box.ready.wait()
        self.box.ready.clear()
        return self.box.letters.popleft()

    def close(self) -> None:
        self.room.give_up(self.box.number)


def ask_two(room: MailRoom, engine, a, b) -> Tuple[object, object]:
    first = room.rent()  # leak: only the second box is given up
    second = room.rent()  # clean: given up at the end
    engine.send(a, reply_to=first.number)
    engine.send(b, reply_to=second.number)
    first.ready.wait()
    second.ready.wait()
    answers = first.letters.popleft(), second.letters.popleft()
    room.give_up(second.number)
    return answers


class FrameSplitter:
    """Cuts length-prefixed frames from a byte stream."""

    def __init__(self) -> None:
        self._buf = bytearray()

    def feed(self, data: bytes) -> None:
        self._buf += data

    def take(self) -> Optional[bytes]:
        if len(self._buf) < 4:
            return None
        n = int.from_bytes(self._buf[:4], "little")
        if len(self._buf) < 4 + n:
            return None
        frame = bytes(self._buf[4:4 + n])
        del self._buf[:4 + n]
        return frame


def count_frames(splitter: FrameSplitter, chunks) -> int:
    frames = 0
    for chunk in chunks:
        splitter.feed(chunk)
        while True:
            frame = splitter.take()  # clean: a parser, frames are consumed
            if frame is None:
                break
            if not frame:
                continue
            frames += 1
    return frames
