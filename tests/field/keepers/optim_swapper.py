"""Optimizer state swapped between NVMe files and a ring of host buffers."""
from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Deque, Dict, Iterator, List, Optional

import numpy as np


class RingBuffer:
    """Segments of one host array handed out by index, in any order of return."""

    def __init__(self, segments: int, numel: int) -> None:
        self.data = np.zeros((segments, numel), dtype=np.float32)
        self._cond = threading.Condition()
        self._free: Deque[int] = deque(range(segments))

    def enter(self) -> int:
        with self._cond:
            while not self._free:
                self._cond.wait()
            return self._free.popleft()

    def enter_nowait(self) -> Optional[int]:
        with self._cond:
            return self._free.popleft() if self._free else None

    def enter_pair(self) -> Optional[List[int]]:
        with self._cond:
            first = self._free.popleft() if self._free else None  # leak: the only free segment is not put back when a pair is impossible
            second = self._free.popleft() if self._free else None  # clean: near miss, None implies nothing of its own is held
            if first is None or second is None:
                return None
            return [first, second]

    def leave(self, seg: int) -> None:
        with self._cond:
            self._free.append(seg)
            self._cond.notify()


class StateSwapper:
    def __init__(self, root: Path, ring: RingBuffer, threads: int = 2) -> None:
        self.root = root
        self.ring = ring
        self.io = ThreadPoolExecutor(threads)
        self.resident: Dict[str, int] = {}
        self.reads: Dict[str, Dict[str, Any]] = {}

    def _path(self, key: str) -> Path:
        return self.root / f"{key}.f32"

    def _read_into(self, key: str, seg: int) -> int:
        raw = np.fromfile(self._path(key), dtype=np.float32)
        self.ring.data[seg, :raw.size] = raw
        return raw.size

    def swap_in(self, key: str) -> np.ndarray:
        seg = self.resident.get(key)
        if seg is None:
            seg = self.ring.enter()  # clean: near miss, resident until swap_out leaves it
            self.resident[key] = seg
            self._read_into(key, seg)
        return self.ring.data[seg]

    def swap_out(self, key: str) -> None:
        seg = self.resident.pop(key)
        self.ring.data[seg].tofile(self._path(key))
        self.ring.leave(seg)

    def start_read(self, key: str) -> bool:
        if key in self.resident or key in self.reads:
            return True
        seg = self.ring.enter_nowait()  # clean: near miss, in reads, finish_read makes it resident or leaves it
        if seg is None:
            return False
        self.reads[key] = {"seg": seg, "future": self.io.submit(self._read_into, key, seg)}
        return True

    def finish_read(self, key: str) -> bool:
        rec = self.reads.pop(key)
        try:
            rec["future"].result()
        except OSError:
            self.ring.leave(rec["seg"])
            return False
        self.resident[key] = rec["seg"]
        return True

    def write_async(self, key: str, values: np.ndarray) -> "Future[None]":
        seg = self.ring.enter()  # clean: near miss, the done callback leaves the segment whatever the outcome
        self.ring.data[seg, :values.size] = values
        future = self.io.submit(self.ring.data[seg].tofile, self._path(key))
        future.add_done_callback(lambda _: self.ring.leave(seg))
        return future

    def write_checked(self, key: str, values: np.ndarray) -> "Future[None]":
        seg = self.ring.enter()  # leak: the callback returns early for a failed write
        self.ring.data[seg, :values.size] = values
        future = self.io.submit(self.ring.data[seg].tofile, self._path(key))

        def _done(fut: "Future[None]") -> None:
            if fut.exception() is not None:
                return
            self.ring.leave(seg)

        future.add_done_callback(_done)
        return future

    def step(self, keys: List[str], lr: float) -> int:
        updated = 0
        for key in keys:
            pair = self.ring.enter_pair()  # clean: both segments leave in the finally
            if pair is None:
                break
            try:
                n = self._read_into(f"{key}.grad", pair[0])
                self._read_into(key, pair[1])
                self.ring.data[pair[1], :n] -= lr * self.ring.data[pair[0], :n]
                updated += 1
            finally:
                for seg in pair:
                    self.ring.leave(seg)
        return updated

    def momentum(self, key: str, beta: float) -> Optional[np.ndarray]:
        pair = self.ring.enter_pair()  # leak: only the first of the pair leaves
        if pair is None:
            return None
        n = self._read_into(f"{key}.grad", pair[0])
        self._read_into(f"{key}.m", pair[1])
        mixed = beta * self.ring.data[pair[1], :n] + (1 - beta) * self.ring.data[pair[0], :n]
        self.ring.leave(pair[0])
        return mixed

    def stream(self, keys: List[str]) -> Iterator[np.ndarray]:
        for key in keys:
            seg = self.ring.enter()  # clean: near miss, the finally around the yield leaves it
            try:
                n = self._read_into(key, seg)
                yield self.ring.data[seg, :n]
            finally:
                self.ring.leave(seg)

    def norm(self, key: str, cap: int) -> float:
        seg = self.ring.enter()  # leak: a state beyond the cap returns without leave
        n = self._read_into(key, seg)
        if n > cap:
            return float("inf")
        value = float(np.linalg.norm(self.ring.data[seg, :n]))
        self.ring.leave(seg)
        return value

    def total_norm(self, keys: List[str]) -> float:
        return sum(float(np.square(part).sum()) for part in self.stream(keys)) ** 0.5
