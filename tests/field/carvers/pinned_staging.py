"""Pinned host staging for weight upload and state snapshots."""
from __future__ import annotations

import threading
from typing import Dict, Iterator, List, Optional, Sequence

try:
    import torch
except ImportError:  # CPU-only CI
    torch = None


class PinnedBuffer:
    __slots__ = ("data", "capacity", "used")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        if torch is not None and torch.cuda.is_available():
            self.data = torch.empty(capacity, dtype=torch.uint8, pin_memory=True).numpy()
        else:
            self.data = bytearray(capacity)

    def write(self, payload: bytes, offset: int = 0) -> None:
        self.data[offset:offset + len(payload)] = payload
        self.used = max(self.used, offset + len(payload))

    def view(self) -> memoryview:
        return memoryview(self.data)[: self.used]


class PinnedPool:
    def __init__(self, count: int, capacity: int) -> None:
        self._cond = threading.Condition()
        self._idle: List[PinnedBuffer] = [PinnedBuffer(capacity) for _ in range(count)]
        self.capacity = capacity

    def checkout(self, timeout: Optional[float] = None) -> PinnedBuffer:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._idle), timeout):
                raise TimeoutError("no pinned buffer")
            buf = self._idle.pop()
            buf.used = 0
            return buf

    def try_checkout(self) -> Optional[PinnedBuffer]:
        with self._cond:
            if not self._idle:
                return None
            buf = self._idle.pop()
            buf.used = 0
            return buf

    def checkin(self, buf: PinnedBuffer) -> None:
        with self._cond:
            self._idle.append(buf)
            self._cond.notify()


class WeightStager:
    def __init__(self, pool: PinnedPool) -> None:
        self.pool = pool
        self._staged: Dict[str, PinnedBuffer] = {}
        self._scratch: Optional[PinnedBuffer] = None
        self._header: Optional[PinnedBuffer] = None

    def stage(self, name: str, payload: bytes) -> None:
        if name in self._staged:
            self._staged[name].write(payload)
            return
        buf = self.pool.checkout()  # clean: kept in _staged until commit or close
        buf.write(payload)
        self._staged[name] = buf

    def commit(self, device: Dict[str, bytes]) -> int:
        moved = 0
        while self._staged:
            name, buf = self._staged.popitem()
            device[name] = bytes(buf.view())
            self.pool.checkin(buf)
            moved += 1
        return moved

    def _gather(self, parts: Sequence[bytes]) -> PinnedBuffer:
        buf = self.pool.checkout()  # clean: handed to the caller
        offset = 0
        for part in parts:
            buf.write(part, offset)
            offset += len(part)
        return buf

    def snapshot(self, parts: Sequence[bytes]) -> bytes:
        return bytes(self._gather(parts).view())  # leak: the bytes are copied out and the buffer is dropped

    def upload(self, parts: Sequence[bytes], device: Dict[str, bytes], key: str) -> None:
        buf = self._gather(parts)  # clean: checked in in finally
        try:
            device[key] = bytes(buf.view())
        finally:
            self.pool.checkin(buf)

    def begin_layer(self, layer: int) -> None:
        self._scratch = self.pool.checkout()  # leak: each layer overwrites the previous layer's scratch
        self._scratch.write(layer.to_bytes(4, "little"))

    def begin_header(self, magic: bytes) -> None:
        if self._header is not None:
            self.pool.checkin(self._header)
        self._header = self.pool.checkout()  # clean: near miss, the previous one is checked in first
        self._header.write(magic)

    def close(self) -> None:
        if self._scratch is not None:
            self.pool.checkin(self._scratch)
            self._scratch = None
        if self._header is not None:
            self.pool.checkin(self._header)
            self._header = None
        for name in list(self._staged):
            self.pool.checkin(self._staged.pop(name))


def copy_blob(pool: PinnedPool, blob: bytes, sink: List[bytes]) -> None:
    """Bounce a blob through pinned memory with a separate buffer for the ragged tail."""
    step = pool.capacity
    buf = pool.checkout()  # leak: rebound when the blob has a ragged tail
    for start in range(0, len(blob), step):
        piece = blob[start:start + step]
        if len(piece) < step:
            buf = pool.checkout()  # clean: checked in after the loop
        buf.write(piece)
        sink.append(bytes(buf.view()))
    pool.checkin(buf)


def copy_double_buffered(pool: PinnedPool, blob: bytes, sink: List[bytes]) -> None:
    front = pool.checkout()  # clean: near miss, names are swapped but both are checked in
    back = pool.checkout()  # clean: near miss, names are swapped but both are checked in
    for start in range(0, len(blob), pool.capacity):
        front.used = 0
        front.write(blob[start:start + pool.capacity])
        sink.append(bytes(front.view()))
        front, back = back, front
    pool.checkin(front)
    pool.checkin(back)


def iter_pages(pool: PinnedPool, blob: bytes, page: int) -> Iterator[memoryview]:
    for start in range(0, len(blob), page):
        buf = pool.checkout()  # clean: near miss, finally also runs when the generator is closed
        try:
            buf.write(blob[start:start + page])
            yield buf.view()
        finally:
            pool.checkin(buf)


def filled_buffers(pool: PinnedPool, rows: Sequence[bytes]) -> Iterator[PinnedBuffer]:
    for row in rows:
        buf = pool.try_checkout()  # clean: near miss, ownership goes to the consumer with each yield
        if buf is None:
            return
        buf.write(row)
        yield buf


def send_rows(pool: PinnedPool, rows: Sequence[bytes], wire: List[bytes]) -> int:
    sent = 0
    for buf in filled_buffers(pool, rows):  # clean: every yielded buffer is checked in
        wire.append(bytes(buf.view()))
        pool.checkin(buf)
        sent += 1
    return sent


def send_until_eos(pool: PinnedPool, rows: Sequence[bytes], wire: List[bytes]) -> int:
    sent = 0
    for buf in filled_buffers(pool, rows):  # leak: break at the end marker keeps the last buffer
        if bytes(buf.view()) == b"<eos>":
            break
        wire.append(bytes(buf.view()))
        pool.checkin(buf)
        sent += 1
    return sent


def try_stage_pair(pool: PinnedPool, key: bytes, value: bytes) -> Optional[bytes]:
    k_buf = pool.try_checkout()  # clean: near miss, checked in when the second is not to be had
    if k_buf is None:
        return None
    v_buf = pool.try_checkout()  # clean: checked in below
    if v_buf is None:
        pool.checkin(k_buf)
        return None
    k_buf.write(key)
    v_buf.write(value)
    merged = bytes(k_buf.view()) + bytes(v_buf.view())
    for buf in (k_buf, v_buf):
        pool.checkin(buf)
    return merged
