"""Write-ahead log: segment files, a fixed set of staging blocks and group commit."""
import os
import struct
import threading
import zlib
from typing import BinaryIO, Dict, Iterator, List, Optional, Tuple

HEADER = struct.Struct("<IIQ")
BLOCK = 32 * 1024


class StagingBlock:
    def __init__(self, index: int) -> None:
        self.index = index
        self.data = bytearray(BLOCK)
        self.used = 0

    def room(self) -> int:
        return BLOCK - self.used

    def add(self, payload: bytes, lsn: int) -> None:
        head = HEADER.pack(len(payload), zlib.crc32(payload), lsn)
        for part in (head, payload):
            self.data[self.used:self.used + len(part)] = part
            self.used += len(part)


class StagingArea:
    def __init__(self, blocks: int) -> None:
        self._idle = [StagingBlock(i) for i in range(blocks)]
        self._cv = threading.Condition()

    def checkout(self) -> StagingBlock:
        with self._cv:
            while not self._idle:
                self._cv.wait()
            return self._idle.pop()

    def checkout_nowait(self) -> Optional[StagingBlock]:
        with self._cv:
            return self._idle.pop() if self._idle else None

    def checkin(self, block: StagingBlock) -> None:
        block.used = 0
        with self._cv:
            self._idle.append(block)
            self._cv.notify()


class SegmentFile:
    def __init__(self, directory: str, number: int) -> None:
        self.path = os.path.join(directory, "%016x.wal" % number)
        self.number = number
        self.fh: BinaryIO = open(self.path, "ab")  # clean: near miss, close() closes it
        self.size = os.path.getsize(self.path)

    def write(self, view: memoryview) -> None:
        self.fh.write(view)
        self.size += len(view)

    def sync(self) -> None:
        self.fh.flush()
        os.fsync(self.fh.fileno())

    def close(self) -> None:
        self.sync()
        self.fh.close()


class WalWriter:
    def __init__(self, directory: str, area: StagingArea, limit: int = 64 << 20) -> None:
        self.directory = directory
        self.area = area
        self.limit = limit
        self.lsn = 0
        self.segment = SegmentFile(directory, 0)  # clean: closed by roll() or close()
        self.current: Optional[StagingBlock] = None
        self.sealed: List[StagingBlock] = []
        self._mutex = threading.Lock()

    def append(self, payload: bytes) -> int:
        with self._mutex:
            need = HEADER.size + len(payload)
            if self.current is not None and self.current.room() < need:
                self.sealed.append(self.current)
                self.current = None
            if self.current is None:
                self.current = self.area.checkout()  # clean: near miss, sealed and given back by commit()
            self.lsn += 1
            self.current.add(payload, self.lsn)
            return self.lsn

    def commit(self) -> int:
        with self._mutex:
            if self.current is not None:
                self.sealed.append(self.current)
                self.current = None
            blocks, self.sealed = self.sealed, []
        for block in blocks:
            self.segment.write(memoryview(block.data)[:block.used])
            self.area.checkin(block)
        self.segment.sync()
        if self.segment.size >= self.limit:
            self.roll()
        return len(blocks)

    def roll(self) -> None:
        old = self.segment
        self.segment = SegmentFile(self.directory, old.number + 1)  # clean: the old one is closed here
        old.close()

    def truncate_to(self, number: int) -> None:
        """Restart after a rewind of the log."""
        self.lsn = 0
        self.segment.close()
        self.segment = SegmentFile(self.directory, number)  # clean: the old one was closed before

    def write_marker(self, kind: int) -> bool:
        block = self.area.checkout_nowait()  # leak: the return for a nearly full segment keeps the block
        if block is None:
            return False
        block.add(struct.pack("<B", kind), self.lsn)
        if self.segment.size + block.used > self.limit:
            return False
        self.segment.write(memoryview(block.data)[:block.used])
        self.area.checkin(block)
        return True

    def write_large(self, payload: bytes) -> int:
        """A payload of many blocks goes straight to the segment."""
        written = 0
        block = self.area.checkout()  # clean: one block serves all pieces
        for start in range(0, len(payload), BLOCK - HEADER.size):
            piece = payload[start:start + BLOCK - HEADER.size]
            block.used = 0
            block.add(piece, self.lsn)
            self.segment.write(memoryview(block.data)[:block.used])
            written += block.used
        self.area.checkin(block)
        return written

    def write_framed(self, pieces: List[bytes]) -> int:
        written = 0
        block = self.area.checkout()  # leak: lost when the first full block is replaced
        for piece in pieces:
            if block.room() < HEADER.size + len(piece):
                self.segment.write(memoryview(block.data)[:block.used])
                written += block.used
                block = self.area.checkout()  # leak: lost when the next one replaces it
            block.add(piece, self.lsn)
        self.segment.write(memoryview(block.data)[:block.used])
        written += block.used
        self.area.checkin(block)
        return written

    def close(self) -> None:
        self.commit()
        self.segment.close()


def read_segment(path: str) -> Iterator[Tuple[int, bytes]]:
    fh = open(path, "rb")  # leak: a torn tail ends the generator without the close
    while True:
        head = fh.read(HEADER.size)
        if not head:
            break
        size, crc, lsn = HEADER.unpack(head)
        payload = fh.read(size)
        if zlib.crc32(payload) != crc:
            return
        yield lsn, payload
    fh.close()


class Archiver:
    """Copies closed segments aside and keeps the copies open until they are acknowledged."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.open_copies: Dict[int, BinaryIO] = {}
        self.skipped = 0

    def start(self, seg: SegmentFile) -> None:
        if seg.number in self.open_copies:
            return
        fh = open(os.path.join(self.target, os.path.basename(seg.path)), "wb")  # clean: ack() closes
        self.open_copies[seg.number] = fh
        source = open(seg.path, "rb")  # clean: closed after the copy
        while True:
            chunk = source.read(1 << 20)
            if not chunk:
                break
            fh.write(chunk)
        source.close()

    def ack(self, number: int) -> bool:
        fh = self.open_copies.pop(number, None)
        if fh is None:
            return False
        fh.close()
        return True

    def stop(self) -> None:
        for fh in self.open_copies.values():
            fh.close()
        self.open_copies = {}

    def checksum(self, path: str, expected: int) -> bool:
        fh = open(path, "rb")  # clean: closed on both ways
        crc = 0
        for chunk in iter(lambda: fh.read(65536), b""):
            crc = zlib.crc32(chunk, crc)
        if crc != expected:
            fh.close()
            self.skipped += 1
            return False
        fh.close()
        return True

    def magic(self, path: str) -> bytes:
        if not os.path.exists(path):
            return b""
        return open(path, "rb").read(8)  # leak: the file object is dropped unclosed


class StandbyTail:
    """Follows the primary; one block is kept over the whole life."""

    def __init__(self, area: StagingArea) -> None:
        self.area = area
        self.scratch = area.checkout()  # leak: stop() drops the reference without the checkin
        self.applied = 0
        self.running = True

    def feed(self, lsn: int, payload: bytes) -> None:
        if not self.running or lsn <= self.applied:
            return
        self.scratch.used = 0
        self.scratch.add(payload, lsn)
        self.applied = lsn

    def stop(self) -> int:
        self.running = False
        self.scratch = None
        return self.applied
