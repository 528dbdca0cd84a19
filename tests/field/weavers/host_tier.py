"""Pinned host tier under the paged KV cache: swap-out, prefetch, write-back."""
from __future__ import annotations

import logging
import time
import zlib
from dataclasses import dataclass
from typing import Optional

log = logging.getLogger("host_tier")

COMPRESS_LIMIT = 1 << 20


class PinnedExhausted(RuntimeError):
    pass


@dataclass
class Page:
    rid: str
    layer: int
    data: bytearray
    dirty: bool = True

    @property
    def nbytes(self) -> int:
        return len(self.data)


class PinnedBuf:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.mem = bytearray(nbytes)
        self.used = 0


class PinnedPool:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.in_use = 0
        self._spare: dict[int, list[PinnedBuf]] = {}

    def checkout(self, nbytes: int) -> PinnedBuf:
        if self.in_use + nbytes > self.capacity:
            raise PinnedExhausted(f"{nbytes} B asked, {self.capacity - self.in_use} B left")
        self.in_use += nbytes
        spare = self._spare.get(nbytes)
        return spare.pop() if spare else PinnedBuf(nbytes)

    def checkin(self, buf: PinnedBuf) -> None:
        self.in_use -= buf.nbytes
        buf.used = 0
        self._spare.setdefault(buf.nbytes, []).append(buf)


class HostTier:
    def __init__(self, pinned: PinnedPool, sink) -> None:
        self.pinned = pinned
        self.sink = sink
        self._resident: dict[str, list[PinnedBuf]] = {}
        self._staged: dict[str, tuple[PinnedBuf, PinnedBuf]] = {}
        self._bounce: Optional[PinnedBuf] = None
        self._index: Optional[PinnedBuf] = None
        self.skipped = 0
        self.missed = 0

    def swap_out(self, rid: str, pages: list[Page], layers: Optional[set[int]] = None) -> int:
        """Copy the request's pages to host memory. Returns the bytes moved."""
        held: list[PinnedBuf] = []
        moved = 0
        t0 = time.monotonic()
        for page in pages:
            if not page.dirty:
                continue
            buf = self.pinned.checkout(page.nbytes)  # leak: pages outside the layer filter `continue` with the buffer in hand
            if layers is not None and page.layer not in layers:
                self.skipped += 1
                continue
            buf.mem[:page.nbytes] = page.data
            buf.used = page.nbytes
            page.dirty = False
            moved += page.nbytes
            held.append(buf)
        if held:
            self._resident.setdefault(rid, []).extend(held)
        dt = time.monotonic() - t0
        if dt > 0.05:
            log.warning("slow swap-out of %s: %.3f s for %d B", rid, dt, moved)
        return moved

    def swap_in(self, rid: str, pages: list[Page]) -> bool:
        held = self._resident.pop(rid, None)
        if held is None:
            return False
        if len(pages) < len(held):
            self._resident[rid] = held
            return False
        for page, buf in zip(pages, held):
            page.data[:buf.used] = buf.mem[:buf.used]
            page.dirty = True
        for buf in held:
            self.pinned.checkin(buf)
        return True

    def forget(self, rid: str) -> None:
        for buf in self._resident.pop(rid, ()):
            self.pinned.checkin(buf)
        pair = self._staged.pop(rid, None)
        if pair is not None:
            for buf in pair:
                self.pinned.checkin(buf)

    def prefetch(self, rids: list[str], nbytes: int) -> int:
        """Stage a key and a value buffer per request ahead of the next step."""
        staged = 0
        for rid in rids:
            if rid in self._staged:
                continue
            try:
                kbuf = self.pinned.checkout(nbytes)  # leak: the second checkout raises and the handler moves on
                vbuf = self.pinned.checkout(nbytes)  # clean: stored with its twin, nothing fails after it
            except PinnedExhausted:
                self.missed += 1
                continue
            self._staged[rid] = (kbuf, vbuf)
            staged += 1
        return staged

    def prefetch_one(self, rid: str, nbytes: int) -> bool:
        if rid in self._staged:
            return True
        kbuf: Optional[PinnedBuf] = None
        try:
            kbuf = self.pinned.checkout(nbytes)  # clean: near miss, the handler returns it if the second one fails
            vbuf = self.pinned.checkout(nbytes)  # clean: stored
        except PinnedExhausted:
            if kbuf is not None:
                self.pinned.checkin(kbuf)
            self.missed += 1
            return False
        self._staged[rid] = (kbuf, vbuf)
        return True

    def _ensure_bounce(self, nbytes: int) -> PinnedBuf:
        if self._bounce is None or self._bounce.nbytes < nbytes:
            self._bounce = self.pinned.checkout(nbytes)  # leak: a smaller bounce buffer is overwritten, not returned
        return self._bounce

    def _ensure_index(self, nbytes: int) -> None:
        if self._index is not None and self._index.nbytes >= nbytes:
            return
        stale = self._index
        self._index = self.pinned.checkout(nbytes)  # clean: near miss, the overwritten buffer is checked in below
        if stale is not None:
            self.pinned.checkin(stale)

    def write_back(self, pages: list[Page], compress: bool) -> int:
        """Push dirty pages to the sink, compressed through a scratch buffer when asked."""
        total = 0
        scratch = None
        if compress:
            scratch = self.pinned.checkout(COMPRESS_LIMIT)  # leak: `compress` is switched off for an oversized page, so the check-in is skipped
        for page in pages:
            if not page.dirty:
                continue
            if page.nbytes > COMPRESS_LIMIT:
                compress = False
            if compress:
                packed = zlib.compress(bytes(page.data), 1)
                scratch.mem[:len(packed)] = packed
                self.sink.write(bytes(scratch.mem[:len(packed)]))
                total += len(packed)
            else:
                self.sink.write(bytes(page.data))
                total += page.nbytes
            page.dirty = False
        if compress:
            self.pinned.checkin(scratch)
        return total

    def checksum(self, page: Page, through_pinned: bool) -> int:
        stage = None
        if through_pinned:
            stage = self.pinned.checkout(page.nbytes)  # clean: near miss, the same unchanged flag guards the check-in
            stage.mem[:page.nbytes] = page.data
        src = stage.mem if through_pinned else page.data
        crc = zlib.crc32(bytes(src[:page.nbytes]))
        if through_pinned:
            self.pinned.checkin(stage)
        return crc

    def copy_through(self, src: Page, dst: Page) -> None:
        buf = self._ensure_bounce(src.nbytes)  # clean: near miss, the tier keeps the bounce buffer
        buf.mem[:src.nbytes] = src.data
        dst.data[:src.nbytes] = buf.mem[:src.nbytes]

    def close(self) -> None:
        for rid in list(self._resident) + list(self._staged):
            self.forget(rid)
        for attr in ("_bounce", "_index"):
            buf = getattr(self, attr)
            if buf is not None:
                self.pinned.checkin(buf)
                setattr(self, attr, None)
