"""Page-locked staging buffers between the feature fetchers and the device."""
from __future__ import annotations

import struct
import threading
import zlib
from collections import defaultdict
from typing import Dict, Iterable, List, Optional, Sequence

try:
    import torch
except ImportError:
    torch = None


class TransferError(RuntimeError):
    pass


class PinnedBuffer:
    __slots__ = ("data", "used")

    def __init__(self, capacity: int) -> None:
        if torch is not None and torch.cuda.is_available():
            self.data = memoryview(torch.empty(capacity, dtype=torch.uint8).pin_memory().numpy())
        else:
            self.data = memoryview(bytearray(capacity))
        self.used = 0

    @property
    def capacity(self) -> int:
        return len(self.data)

    def append(self, payload: bytes) -> None:
        self.data[self.used:self.used + len(payload)] = payload
        self.used += len(payload)

    def view(self) -> memoryview:
        return self.data[:self.used]


def _bucket(nbytes: int) -> int:
    size = 64
    while size < nbytes:
        size *= 2
    return size


class PinnedPool:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: Dict[int, List[PinnedBuffer]] = defaultdict(list)
        self.outstanding = 0

    def checkout(self, nbytes: int) -> PinnedBuffer:
        size = _bucket(nbytes)
        with self._lock:
            self.outstanding += 1
            buf = self._idle[size].pop() if self._idle[size] else PinnedBuffer(size)
        buf.used = 0
        return buf

    def checkin(self, buf: PinnedBuffer) -> None:
        with self._lock:
            self.outstanding -= 1
            self._idle[buf.capacity].append(buf)


class HostStager:
    def __init__(self, pool: PinnedPool) -> None:
        self._pool = pool

    def stage(self, payload: bytes) -> PinnedBuffer:
        buf = self._pool.checkout(len(payload))  # clean: returned, done() gives it back
        buf.append(payload)
        return buf

    def done(self, buf: PinnedBuffer) -> None:
        self._pool.checkin(buf)


class Device:
    """Thin stand-in for the copy engine."""

    def __init__(self) -> None:
        self.blobs: Dict[int, bytes] = {}
        self.fail_next = 0

    def write(self, view: memoryview) -> int:
        if self.fail_next:
            self.fail_next -= 1
            raise TransferError("copy engine busy")
        crc = zlib.crc32(view)
        self.blobs[crc] = bytes(view)
        return crc


class BatchUploader:
    def __init__(self, stager: HostStager, device: Device) -> None:
        self._stager = stager
        self._device = device

    def stage_ids(self, ids: Sequence[int]) -> PinnedBuffer:
        return self._stager.stage(struct.pack(f"<{len(ids)}q", *ids))  # clean: wrapper hands the buffer on

    def upload(self, ids: Sequence[int]) -> int:
        buf = self.stage_ids(ids)  # clean: done() in finally
        try:
            return self._device.write(buf.view())
        finally:
            self._stager.done(buf)

    def fingerprint(self, ids: Sequence[int]) -> int:
        return zlib.crc32(bytes(self.stage_ids(ids).view()))  # leak: the staged buffer is copied from and dropped

    def upload_if_new(self, ids: Sequence[int]) -> bool:
        buf = self.stage_ids(ids)  # leak: return False for a known batch
        if zlib.crc32(buf.view()) in self._device.blobs:
            return False
        self._device.write(buf.view())
        self._stager.done(buf)
        return True

    def upload_many(self, batches: Iterable[Sequence[int]]) -> List[int]:
        staged: List[PinnedBuffer] = []
        for ids in batches:
            if not ids:
                continue
            staged.append(self.stage_ids(ids))  # clean: near miss, every listed buffer goes back in the second loop
        crcs = []
        for buf in staged:
            crcs.append(self._device.write(buf.view()))
            self._stager.done(buf)
        return crcs

    def upload_retrying(self, ids: Sequence[int], attempts: int = 3) -> Optional[int]:
        for _ in range(attempts):
            buf = self.stage_ids(ids)  # leak: a TransferError goes round with a new buffer
            try:
                crc = self._device.write(buf.view())
            except TransferError:
                continue
            self._stager.done(buf)
            return crc
        return None

    def upload_patient(self, ids: Sequence[int], attempts: int = 3) -> Optional[int]:
        for attempt in range(attempts):
            buf = self.stage_ids(ids)  # clean: near miss, finally runs before continue and return
            try:
                return self._device.write(buf.view())
            except TransferError:
                if attempt + 1 == attempts:
                    return None
                continue
            finally:
                self._stager.done(buf)
        return None


class Concatenator:
    """Packs variable-length features into one staging buffer."""

    def __init__(self, pool: PinnedPool) -> None:
        self._pool = pool

    def pack(self, parts: Iterable[bytes]) -> PinnedBuffer:
        buf = self._pool.checkout(64)  # leak: rebound to the grown buffer without check-in
        for part in parts:
            while buf.used + len(part) > buf.capacity:
                grown = self._pool.checkout(buf.capacity * 2)  # leak: lost in turn when the buffer grows again
                grown.append(bytes(buf.view()))
                buf = grown
            buf.append(part)
        return buf

    def pack_exact(self, parts: Iterable[bytes]) -> PinnedBuffer:
        buf = self._pool.checkout(64)  # clean: checked in before it is rebound, else returned
        for part in parts:
            if buf.used + len(part) > buf.capacity:
                old = buf
                buf = self._pool.checkout(old.used + len(part))  # clean: near miss, the previous one is kept in old and checked in
                buf.append(bytes(old.view()))
                self._pool.checkin(old)
            buf.append(part)
        return buf

    def send(self, parts: Iterable[bytes], device: Device) -> int:
        buf = self.pack(parts)  # clean: checked in after the write
        crc = device.write(buf.view())
        self._pool.checkin(buf)
        return crc

    def total_bytes(self, parts: Iterable[bytes]) -> int:
        packed = self.pack_exact(parts)  # leak: only its length is read
        return packed.used
