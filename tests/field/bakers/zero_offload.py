"""CPU offload of optimizer state: pinned staging buffers and copy streams."""
from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Sequence

log = logging.getLogger("zero.offload")


@dataclass
class PinnedBuffer:
    index: int
    nbytes: int
    view: bytearray
    in_use: bool = False


class PinnedBufferPool:
    """Fixed set of page-locked buffers used for host/device copies."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._buffers = [PinnedBuffer(i, nbytes, bytearray(nbytes)) for i in range(count)]
        self._free: List[int] = list(range(count))

    def checkout(self) -> PinnedBuffer:
        with self._lock:
            if not self._free:
                raise RuntimeError("pinned pool exhausted")
            buf = self._buffers[self._free.pop()]
            buf.in_use = True
            return buf

    def checkout_or_none(self) -> Optional[PinnedBuffer]:
        with self._lock:
            if not self._free:
                return None
            buf = self._buffers[self._free.pop()]
            buf.in_use = True
            return buf

    def checkin(self, buf: PinnedBuffer) -> None:
        with self._lock:
            if not buf.in_use:
                raise ValueError(f"buffer {buf.index} is not out")
            buf.in_use = False
            self._free.append(buf.index)

    @property
    def available(self) -> int:
        return len(self._free)


class CopyError(RuntimeError):
    pass


class HostState:
    """Momentum and variance of one parameter, living on the host."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.exp_avg = bytearray(size)
        self.exp_avg_sq = bytearray(size)
        self.dirty = False


class OffloadedAdam:
    def __init__(self, pool: PinnedBufferPool, states: Dict[str, HostState]) -> None:
        self.pool = pool
        self.states = states
        self.skipped = 0
        self._inflight: Dict[str, PinnedBuffer] = {}

    def _upload(self, buf: PinnedBuffer, src: bytearray) -> None:
        if len(src) > buf.nbytes:
            raise CopyError(f"{len(src)} > {buf.nbytes}")
        buf.view[:len(src)] = src

    def stage_state(self, name: str) -> bool:
        """Copies both moments to the device; False when the copy failed."""
        state = self.states[name]
        first = self.pool.checkout()  # clean: checked in by the handler and at the end
        second = self.pool.checkout()  # leak: the handler checks in first only
        try:
            self._upload(first, state.exp_avg)
            self._upload(second, state.exp_avg_sq)
        except CopyError as exc:
            log.warning("staging %s: %s", name, exc)
            self.pool.checkin(first)
            return False
        self.pool.checkin(first)
        self.pool.checkin(second)
        return True

    def stage_pair(self, name: str) -> Optional[List[PinnedBuffer]]:
        lo = self.pool.checkout_or_none()  # clean: checked in when hi is missing, else returned
        if lo is None:
            return None
        hi = self.pool.checkout_or_none()  # clean: None leaves early, else returned with lo
        if hi is None:
            self.pool.checkin(lo)
            return None
        state = self.states[name]
        self._upload(lo, state.exp_avg)
        self._upload(hi, state.exp_avg_sq)
        return [lo, hi]

    def step_pair(self, name: str, lr: float) -> bool:
        pair = self.stage_pair(name)  # clean: near miss, None holds nothing and the loop checks in each
        if not pair:
            return False
        self._apply(pair, lr)
        for buf in pair:
            self.pool.checkin(buf)
        return True

    def _apply(self, pair: Sequence[PinnedBuffer], lr: float) -> None:
        for buf in pair:
            for i in range(min(8, buf.nbytes)):
                buf.view[i] = (buf.view[i] + int(lr * 10)) % 256

    def warm_pair(self, name: str) -> int:
        pair = self.stage_pair(name)  # leak: only the first of the two is checked in
        if pair is None:
            return 0
        touched = pair[0].nbytes + pair[1].nbytes
        self.pool.checkin(pair[0])
        return touched

    def prefetch(self, names: Iterable[str]) -> int:
        """Starts uploads for the coming parameters."""
        started = 0
        for name in names:
            state = self.states.get(name)
            if state is None:
                continue
            buf = self.pool.checkout_or_none()  # leak: overlapping windows overwrite the entry of a name already in flight
            if buf is None:
                break
            self._upload(buf, state.exp_avg)
            self._inflight[name] = buf
            started += 1
        return started

    def run_window(self, names: Sequence[str], width: int) -> List[Optional[bytes]]:
        done = []
        for at, name in enumerate(names):
            self.prefetch(names[at:at + width])
            done.append(self.finish(name))
        return done

    def finish(self, name: str) -> Optional[bytes]:
        buf = self._inflight.pop(name, None)
        if buf is None:
            return None
        data = bytes(buf.view)
        self.pool.checkin(buf)
        return data

    def finish_all(self) -> None:
        for name in list(self._inflight):
            self.finish(name)

    def writeback(self, name: str, grads: bytearray, found_inf: bool) -> None:
        buf = None
        if not found_inf:
            buf = self.pool.checkout()  # clean: near miss, both guards test found_inf, which does not change
            self._upload(buf, grads)
        self.states[name].dirty = not found_inf
        if found_inf:
            self.skipped += 1
        else:
            self.pool.checkin(buf)

    def writeback_all(self, grads: Dict[str, bytearray]) -> int:
        failed = 0
        for name, grad in grads.items():
            buf = self.pool.checkout()  # leak: the handler goes on to the next gradient without a checkin
            try:
                self._upload(buf, grad)
                self.states[name].exp_avg[:4] = buf.view[:4]
            except (CopyError, KeyError) as exc:
                log.error("writeback of %s: %s", name, exc)
                failed += 1
                continue
            self.pool.checkin(buf)
        return failed


class GradAccumulator:
    """Holds one pinned accumulation buffer per parameter for the whole step."""

    def __init__(self, pool: PinnedBufferPool) -> None:
        self.pool = pool
        self._acc: Dict[str, PinnedBuffer] = {}

    def add(self, name: str, grad: bytes) -> None:
        acc = self._acc.get(name)
        if acc is None:
            acc = self._acc[name] = self.pool.checkout()  # clean: near miss, only for a missing entry, flush checks in all
        for i, g in enumerate(grad[:acc.nbytes]):
            acc.view[i] = (acc.view[i] + g) % 256

    def flush(self) -> Dict[str, bytes]:
        out = {}
        while self._acc:
            name, buf = self._acc.popitem()
            out[name] = bytes(buf.view)
            self.pool.checkin(buf)
        return out

    def rename(self, old: str, new: str) -> None:
        if old in self._acc and new not in self._acc:
            self._acc[new] = self._acc.pop(old)
