"""Host staging for H2D / D2H copies.

Buffers are pinned, uint8 and kept by power-of-two size class.  The pool never
gives memory back to the OS while the trainer is alive; it only recycles.
"""
from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from typing import Callable, Deque, Dict, Iterable, List, Optional, Tuple

import torch

log = logging.getLogger(__name__)

MIN_CLASS = 4096


class StagingExhausted(RuntimeError):
    pass


class PinnedPool:
    def __init__(self, cap_bytes: int) -> None:
        self._lock = threading.Lock()
        self._free: Dict[int, List[torch.Tensor]] = defaultdict(list)
        self._used = 0
        self._cap = cap_bytes

    @staticmethod
    def size_class(nbytes: int) -> int:
        return max(MIN_CLASS, 1 << (nbytes - 1).bit_length())

    def checkout(self, nbytes: int) -> torch.Tensor:
        k = self.size_class(nbytes)
        with self._lock:
            if self._free[k]:
                return self._free[k].pop()  # clean: handed to the caller
            if self._used + k > self._cap:
                raise StagingExhausted(f"{self._used + k} > {self._cap}")
            self._used += k
        return torch.empty(k, dtype=torch.uint8, pin_memory=True)

    def try_checkout(self, nbytes: int) -> Optional[torch.Tensor]:
        try:
            return self.checkout(nbytes)  # clean: handed to the caller
        except StagingExhausted:
            return None

    def checkout_aligned(self, nbytes: int, align: int) -> Optional[torch.Tensor]:
        """A recycled buffer whose base is aligned for O_DIRECT, or None."""
        k = self.size_class(nbytes)
        with self._lock:
            shelf = self._free[k]
            while shelf:
                buf = shelf.pop()  # leak: a misaligned buffer is dropped while its bytes stay in _used
                if buf.data_ptr() % align == 0:
                    return buf
        return None

    def checkin(self, buf: torch.Tensor) -> None:
        with self._lock:
            self._free[buf.numel()].append(buf)


class H2DCopier:
    """Stages host arrays and copies them on a side stream."""

    def __init__(self, pool: PinnedPool, device: torch.device) -> None:
        self.pool = pool
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._inflight: Deque[Tuple[torch.cuda.Event, torch.Tensor]] = deque()

    def submit(self, src: torch.Tensor) -> torch.Tensor:
        raw = src.contiguous().view(torch.uint8).flatten()
        n = raw.numel()
        stage = self.pool.checkout(n)  # clean: near miss, parked in _inflight, which reap() gives back
        stage[:n].copy_(raw)
        with torch.cuda.stream(self.stream):
            out = stage[:n].to(self.device, non_blocking=True)
            ev = torch.cuda.Event()
            ev.record(self.stream)
        self._inflight.append((ev, stage))
        self.reap()
        return out.view(src.dtype).view(src.shape)

    def submit_small(self, src: torch.Tensor) -> Optional[torch.Tensor]:
        raw = src.contiguous().view(torch.uint8).flatten()
        stage = self.pool.try_checkout(raw.numel())  # clean: None needs no return and the rest is checked in
        if stage is None:
            return None
        stage[: raw.numel()].copy_(raw)
        out = stage[: raw.numel()].to(self.device)
        self.pool.checkin(stage)
        return out.view(src.dtype).view(src.shape)

    def submit_many(self, srcs: Iterable[torch.Tensor]) -> List[torch.Tensor]:
        outs = []
        for src in srcs:
            raw = src.contiguous().view(torch.uint8).flatten()
            stage = self.pool.checkout(max(raw.numel(), 1))  # leak: an empty tensor continues past the checkin
            if raw.numel() == 0:
                outs.append(torch.empty_like(src, device=self.device))
                continue
            stage[: raw.numel()].copy_(raw)
            out = stage[: raw.numel()].to(self.device)
            outs.append(out.view(src.dtype).view(src.shape))
            self.pool.checkin(stage)
        return outs

    def reap(self, block: bool = False) -> int:
        done = 0
        while self._inflight:
            ev, stage = self._inflight[0]
            if block:
                ev.synchronize()
            elif not ev.query():
                break
            self._inflight.popleft()
            self.pool.checkin(stage)
            done += 1
        return done

    def close(self) -> None:
        self.reap(block=True)


class D2HFetcher:
    def __init__(self, pool: PinnedPool, on_ready: Optional[Callable[[str, bytes], None]] = None) -> None:
        self.pool = pool
        self.on_ready = on_ready
        self._pending: Dict[str, Tuple[torch.cuda.Event, torch.Tensor, int]] = {}

    def start(self, key: str, t: torch.Tensor) -> None:
        flat = t.detach().contiguous().view(torch.uint8).flatten()
        host = self.pool.checkout(flat.numel())  # leak: a second start() for a key overwrites the pending entry
        host[: flat.numel()].copy_(flat, non_blocking=True)
        ev = torch.cuda.Event()
        ev.record()
        self._pending[key] = (ev, host, flat.numel())

    def finish(self, key: str) -> bytes:
        ev, host, n = self._pending.pop(key)
        try:
            ev.synchronize()
            data = host[:n].numpy().tobytes()
        finally:
            self.pool.checkin(host)
        if self.on_ready is not None:
            self.on_ready(key, data)
        return data

    def finish_all(self) -> Dict[str, bytes]:
        return {k: self.finish(k) for k in list(self._pending)}

    def fetch_pair(self, a: torch.Tensor, b: torch.Tensor) -> Optional[Tuple[bytes, bytes]]:
        fa = a.detach().contiguous().view(torch.uint8).flatten()
        fb = b.detach().contiguous().view(torch.uint8).flatten()
        ha = self.pool.try_checkout(fa.numel())  # leak: kept when the second checkout gives None
        if ha is None:
            return None
        hb = self.pool.try_checkout(fb.numel())  # clean: None or checked in below
        if hb is None:
            log.warning("staging is full, pair of %d bytes skipped", fb.numel())
            return None
        ha[: fa.numel()].copy_(fa)
        hb[: fb.numel()].copy_(fb)
        out = ha[: fa.numel()].numpy().tobytes(), hb[: fb.numel()].numpy().tobytes()
        self.pool.checkin(hb)
        self.pool.checkin(ha)
        return out

    def fetch_grow(self, chunks: Iterable[torch.Tensor]) -> bytes:
        """Concatenates chunks into one staging buffer that doubles when it is full."""
        buf = self.pool.checkout(MIN_CLASS)  # clean: near miss, replaced only after it is checked in
        fill = 0
        try:
            for c in chunks:
                flat = c.detach().view(torch.uint8).flatten()
                while fill + flat.numel() > buf.numel():
                    bigger = self.pool.checkout(buf.numel() * 2)  # clean: becomes buf, checked in by finally
                    bigger[:fill].copy_(buf[:fill])
                    self.pool.checkin(buf)
                    buf = bigger
                buf[fill : fill + flat.numel()].copy_(flat)
                fill += flat.numel()
            return buf[:fill].numpy().tobytes()
        finally:
            self.pool.checkin(buf)

    def fetch_checked(self, t: torch.Tensor, limit: int) -> bytes:
        flat = t.detach().view(torch.uint8).flatten()
        host = self.pool.checkout(flat.numel())  # leak: not checked in when the limit is exceeded
        if flat.numel() > limit:
            raise ValueError(f"{flat.numel()} bytes over the limit of {limit}")
        host[: flat.numel()].copy_(flat)
        data = host[: flat.numel()].numpy().tobytes()
        self.pool.checkin(host)
        return data
