"""Pinned host buffers for h2d / d2h staging, plus the copy queue that sits on top of them."""
import bisect
import threading
from typing import Callable, Dict, Iterable, Iterator, List, Optional

import torch

_SIZES = [1 << k for k in range(16, 29)]


class PinnedPool:
    def __init__(self, per_size: int = 4):
        self._bins: Dict[int, List[torch.Tensor]] = {s: [] for s in _SIZES}
        self._left = {s: per_size for s in _SIZES}
        self._lock = threading.Lock()

    def _fit(self, nbytes: int) -> Optional[int]:
        i = bisect.bisect_left(_SIZES, nbytes)
        return _SIZES[i] if i < len(_SIZES) else None

    def stage(self, nbytes: int) -> Optional[torch.Tensor]:
        size = self._fit(nbytes)
        if size is None:
            return None
        with self._lock:
            if self._bins[size]:
                return self._bins[size].pop()
            if self._left[size] == 0:
                return None
            self._left[size] -= 1
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def unstage(self, buf: torch.Tensor) -> None:
        with self._lock:
            self._bins[buf.numel()].append(buf)

    def stage_tagged(self, nbytes: int, tags: Dict[int, str], tag: str) -> Optional[torch.Tensor]:
        buf = self.stage(nbytes)  # leak: duplicate tag returns None with buf staged
        if buf is None:
            return None
        if tag in tags.values():
            return None
        tags[buf.data_ptr()] = tag
        return buf


class Transfer:
    def __init__(self, dst: torch.Tensor, buf: Optional[torch.Tensor] = None):
        self.dst = dst
        self.buf = buf
        self.event: Optional[torch.cuda.Event] = None


class Copier:
    def __init__(self, pool: PinnedPool):
        self.pool = pool
        self.pending: List[Transfer] = []
        self.stream = torch.cuda.Stream()
        self.use_pinned = True

    def upload_sync(self, data: bytes, dst: torch.Tensor) -> bool:
        buf = self.pool.stage(len(data))  # clean: unstaged in finally
        if buf is None:
            return False
        try:
            buf[:len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            dst.copy_(buf[:len(data)])
        finally:
            self.pool.unstage(buf)
        return True

    def upload(self, data: bytes, dst: torch.Tensor) -> Optional[Transfer]:
        tr = Transfer(dst)
        tr.buf = self.pool.stage(len(data))  # clean: near miss, transfer is queued and poll() unstages
        if tr.buf is None:
            return None
        tr.buf[:len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        with torch.cuda.stream(self.stream):
            dst.copy_(tr.buf[:len(data)], non_blocking=True)
            tr.event = torch.cuda.Event()
            tr.event.record()
        self.pending.append(tr)
        return tr

    def poll(self) -> int:
        still: List[Transfer] = []
        for tr in self.pending:
            if tr.event.query():
                self.pool.unstage(tr.buf)
            else:
                still.append(tr)
        self.pending = still
        return len(still)

    def upload_small(self, data: bytes, dst: torch.Tensor) -> bool:
        tr = Transfer(dst, self.pool.stage(len(data)))  # leak: transfer is never queued and ends with the call
        if tr.buf is None:
            return False
        tr.buf[:len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        tr.dst.copy_(tr.buf[:len(data)])
        return True

    def _fetch_raw(self, src: torch.Tensor) -> torch.Tensor:
        n = src.numel() * src.element_size()
        buf = self.pool.stage(n)  # clean: handed to the caller
        if buf is None:
            raise MemoryError(n)
        buf[:n].copy_(src.view(torch.uint8).flatten())
        return buf

    def checksum(self, src: torch.Tensor) -> int:
        return int(self._fetch_raw(src).sum())  # leak: staged buffer is summed and dropped

    def to_bytes(self, src: torch.Tensor) -> bytes:
        raw = self._fetch_raw(src)  # clean: near miss, unstaged after conversion of its copy
        blob = raw.clone().numpy().tobytes()
        self.pool.unstage(raw)
        return blob

    def compare(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        ra = self._fetch_raw(a)  # leak: only released when the sizes agree
        rb = self._fetch_raw(b)  # leak: only released when the sizes agree
        if ra.numel() != rb.numel():
            return False
        same = torch.equal(ra, rb)
        self.pool.unstage(ra)
        self.pool.unstage(rb)
        return same

    def copy_many(self, srcs: Iterable[bytes], dst: torch.Tensor) -> int:
        off = 0
        for data in srcs:
            buf = None
            if self.use_pinned:
                buf = self.pool.stage(len(data))  # clean: near miss, buf is None exactly when the pageable path runs
            if buf is None:
                dst[off:off + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
                off += len(data)
                continue
            buf[:len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            dst[off:off + len(data)].copy_(buf[:len(data)])
            off += len(data)
            self.pool.unstage(buf)
        return off

    def copy_skipping(self, srcs: Iterable[bytes], dst: torch.Tensor, skip: Callable[[bytes], bool]) -> int:
        off = 0
        for data in srcs:
            buf = self.pool.stage(len(data))  # leak: skipped chunk continues without unstage
            if buf is None:
                break
            if skip(data):
                continue
            buf[:len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            dst[off:off + len(data)].copy_(buf[:len(data)])
            off += len(data)
            self.pool.unstage(buf)
        return off

    def chunks(self, src: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
        buf = self.pool.stage(size)  # clean: unstaged in finally when the generator ends
        if buf is None:
            return
        flat = src.view(torch.uint8).flatten()
        try:
            for i in range(0, flat.numel(), size):
                part = flat[i:i + size]
                buf[:part.numel()].copy_(part)
                yield buf[:part.numel()]
        finally:
            self.pool.unstage(buf)

    def double_buffered(self, parts: List[torch.Tensor], sink: Callable[[torch.Tensor], None]) -> bool:
        front = self.pool.stage(parts[0].numel())  # clean: unstaged at the end or when back is missing
        if front is None:
            return False
        back = self.pool.stage(parts[0].numel())  # clean: swapped with front, both are unstaged
        if back is None:
            self.pool.unstage(front)
            return False
        for p in parts:
            front[:p.numel()].copy_(p)
            sink(front[:p.numel()])
            front, back = back, front
        self.pool.unstage(front)
        self.pool.unstage(back)
        return True

    def enlarge(self, buf: torch.Tensor, nbytes: int) -> Optional[torch.Tensor]:
        """Trade buf for a bigger one; buf stays the caller's if None comes back."""
        bigger = self.pool.stage(nbytes)  # clean: returned in exchange for buf
        if bigger is None:
            return None
        bigger[:buf.numel()].copy_(buf)
        self.pool.unstage(buf)
        return bigger

    def gather(self, parts: List[torch.Tensor]) -> Optional[torch.Tensor]:
        buf = self.pool.stage(1 << 16)  # leak: enlarge() giving None rebinds buf and the old buffer is lost
        if buf is None:
            return None
        off = 0
        for p in parts:
            if off + p.numel() > buf.numel():
                buf = self.enlarge(buf, off + p.numel())  # leak: an enlarged buffer is lost when the next enlarge() gives None
                if buf is None:
                    return None
            buf[off:off + p.numel()].copy_(p)
            off += p.numel()
        return buf
