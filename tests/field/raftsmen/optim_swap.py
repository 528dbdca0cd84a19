"""Optimizer state swapping to NVMe (Adam moments), with best-fit host buffers.

A sub-group's moments are read into host buffers, updated on the CPU and written
back.  Reads of the next group overlap with the update of the present one.
"""
from __future__ import annotations

import heapq
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Dict, List, Optional, Tuple

import numpy as np


class HostBuffer:
    __slots__ = ("arr", "serial", "owner")

    def __init__(self, nelem: int, serial: int) -> None:
        self.arr = np.empty(nelem, np.float32)
        self.serial = serial
        self.owner: Optional[str] = None


class BestFit:
    """Idle buffers in a heap by capacity; the smallest that fits is handed out."""

    def __init__(self, capacities: List[int]) -> None:
        self._heap: List[Tuple[int, int, HostBuffer]] = []
        self._mu = threading.Lock()
        for i, c in enumerate(capacities):
            heapq.heappush(self._heap, (c, i, HostBuffer(c, i)))

    def fit(self, nelem: int, owner: str) -> Optional[HostBuffer]:
        with self._mu:
            passed = []
            found = None
            while self._heap:
                item = heapq.heappop(self._heap)  # clean: those too small are pushed again below
                if item[0] >= nelem:
                    found = item[2]
                    break
                passed.append(item)
            for item in passed:
                heapq.heappush(self._heap, item)
        if found is not None:
            found.owner = owner
        return found

    def smallest(self, owner: str, at_least: int) -> Optional[HostBuffer]:
        with self._mu:
            if not self._heap:
                return None
            cap, _, buf = heapq.heappop(self._heap)  # leak: a buffer below at_least is not pushed back
            if cap < at_least:
                return None
            buf.owner = owner
            return buf

    def retire(self, buf: HostBuffer) -> None:
        buf.owner = None
        with self._mu:
            heapq.heappush(self._heap, (buf.arr.size, buf.serial, buf))


class Swapper:
    def __init__(self, pool: BestFit, root: str, threads: int = 4) -> None:
        self.pool = pool
        self.root = root
        self._exec = ThreadPoolExecutor(threads)
        self._reads: Dict[str, Tuple[Future, HostBuffer]] = {}
        self._dirty: List[Tuple[str, int, HostBuffer]] = []

    def _file(self, name: str) -> str:
        return os.path.join(self.root, name + ".swp")

    def _read(self, name: str, view: np.ndarray) -> None:
        view[:] = np.fromfile(self._file(name), np.float32, view.size)

    def prefetch(self, name: str, nelem: int) -> bool:
        if name in self._reads:
            return True
        if not os.path.exists(self._file(name)):
            return False
        buf = self.pool.fit(nelem, name)  # clean: None is refused, else kept in _reads for swap_in() or cancel()
        if buf is None:
            return False
        self._reads[name] = (self._exec.submit(self._read, name, buf.arr[:nelem]), buf)
        return True

    def swap_in(self, name: str, nelem: int) -> Optional[HostBuffer]:
        """The caller hands the buffer to swap_out() or release()."""
        hit = self._reads.pop(name, None)
        if hit is not None:
            fut, buf = hit
            err = fut.exception()
            if err is not None:
                self.pool.retire(buf)
                raise err
            return buf
        buf = self.pool.fit(nelem, name)  # leak: a missing swap file returns None with the buffer out
        if buf is None:
            return None
        if not os.path.exists(self._file(name)):
            return None
        self._read(name, buf.arr[:nelem])
        return buf

    def swap_out(self, name: str, nelem: int, buf: HostBuffer) -> None:
        self._dirty.append((name, nelem, buf))
        if len(self._dirty) >= 4:
            self.write_back()

    def write_back(self) -> None:
        todo, self._dirty = self._dirty, []
        for name, nelem, buf in todo:
            buf.arr[:nelem].tofile(self._file(name))
            self.pool.retire(buf)

    def release(self, buf: HostBuffer) -> None:
        self.pool.retire(buf)

    def cancel(self) -> None:
        for fut, buf in self._reads.values():
            fut.cancel()
            if not fut.cancelled():
                fut.exception()
            self.pool.retire(buf)
        self._reads.clear()

    def close(self) -> None:
        self.cancel()
        self.write_back()
        self._exec.shutdown()


class SwappedAdam:
    def __init__(self, swapper: Swapper, groups: Dict[str, np.ndarray], lr: float, betas=(0.9, 0.95), eps: float = 1e-8) -> None:
        self.swapper = swapper
        self.groups = groups
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.t = 0

    def step(self, grads: Dict[str, np.ndarray]) -> int:
        self.t += 1
        names = list(self.groups)
        done = 0
        for i, name in enumerate(names):
            n = self.groups[name].size
            m = self.swapper.swap_in(name + ".m", n)  # leak: the loop continues without it when v is not there
            v = self.swapper.swap_in(name + ".v", n)  # clean: near miss, released when m is not there, else swapped out
            if m is None or v is None:
                if v is not None:
                    self.swapper.release(v)
                continue
            if i + 1 < len(names):
                nxt = names[i + 1]
                self.swapper.prefetch(nxt + ".m", self.groups[nxt].size)
                self.swapper.prefetch(nxt + ".v", self.groups[nxt].size)
            self._update(self.groups[name], grads[name], m.arr[:n], v.arr[:n])
            self.swapper.swap_out(name + ".m", n, m)
            self.swapper.swap_out(name + ".v", n, v)
            done += 1
        self.swapper.write_back()
        return done

    def _update(self, p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray) -> None:
        b1, b2 = self.betas
        m *= b1
        m += (1 - b1) * g
        v *= b2
        v += (1 - b2) * g * g
        mh = m / (1 - b1**self.t)
        vh = v / (1 - b2**self.t)
        p -= self.lr * mh / (np.sqrt(vh) + self.eps)

    def init_state(self) -> None:
        for name, p in self.groups.items():
            for kind in ("m", "v"):
                buf = self.swapper.pool.fit(p.size, name)  # clean: near miss, swap_out() takes it over
                if buf is None:
                    raise MemoryError(f"no host buffer for {name}.{kind}")
                buf.arr[: p.size] = 0
                self.swapper.swap_out(f"{name}.{kind}", p.size, buf)
        self.swapper.write_back()

    def find_nonfinite(self) -> Optional[str]:
        for name, p in self.groups.items():
            v = self.swapper.swap_in(name + ".v", p.size)  # leak: not released when a bad group ends the search
            if v is None:
                continue
            if not np.isfinite(v.arr[: p.size]).all():
                return name
            self.swapper.release(v)
        return None

    def rescale(self, factor: float) -> None:
        scratch = self.swapper.pool.smallest("rescale", 1024)  # clean: None is skipped, else released at the end
        for name, p in self.groups.items():
            m = self.swapper.swap_in(name + ".m", p.size)  # clean: swapped out again
            if m is None:
                continue
            if scratch is not None and scratch.arr.size >= p.size:
                np.multiply(m.arr[: p.size], factor, out=scratch.arr[: p.size])
                m.arr[: p.size] = scratch.arr[: p.size]
            else:
                m.arr[: p.size] *= factor
            self.swapper.swap_out(name + ".m", p.size, m)
        self.swapper.write_back()
        if scratch is not None:
            self.swapper.release(scratch)
