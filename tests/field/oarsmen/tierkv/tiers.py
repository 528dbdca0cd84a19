"""The three places where a KV block can be."""
from __future__ import annotations

import os
import threading
import zlib
from typing import Dict, List, Optional, Set

import torch


class Damaged(Exception):
    """A stored block does not match its checksum."""


class GpuTier:
    def __init__(self, blocks: int, elems: int) -> None:
        self.data = torch.zeros((blocks, elems), dtype=torch.float16, device="cuda")
        self._free: List[int] = list(range(blocks))
        self._lock = threading.Lock()

    def alloc(self) -> Optional[int]:
        with self._lock:
            return self._free.pop() if self._free else None  # clean: returned

    def alloc_run(self, n: int) -> Optional[List[int]]:
        """n neighbouring blocks, for kernels that want one stride."""
        with self._lock:
            free: Set[int] = set(self._free)
            for start in sorted(free):
                run = range(start, start + n)
                if all(b in free for b in run):
                    for b in run:
                        self._free.remove(b)  # clean: the whole run is returned
                    return list(run)
        return None

    def alloc_even(self, n: int) -> List[int]:
        """Up to n blocks of even index, which share no cache line with a neighbour."""
        got: List[int] = []
        with self._lock:
            odd: List[int] = []
            while self._free and len(got) < n:
                b = self._free.pop()  # clean: near miss, the odd ones are put back below, the even ones are returned
                (odd if b & 1 else got).append(b)
            self._free.extend(odd)
        return got

    def free(self, blocks: List[int]) -> None:
        with self._lock:
            self._free.extend(blocks)


class HostTier:
    """Page-locked slots. A slot is in use from reserve() to vacate()."""

    def __init__(self, slots: int, elems: int) -> None:
        self.data = torch.zeros((slots, elems), dtype=torch.float16, pin_memory=True)
        self.sums: Dict[int, int] = {}
        self.retired: Set[int] = set()
        self._idle: List[int] = list(range(slots))
        self._lock = threading.Lock()

    def reserve(self) -> Optional[int]:
        with self._lock:
            while self._idle:
                slot = self._idle.pop()  # clean: near miss, one that is skipped is entered as retired and comes back by reinstate()
                if self._flaky(slot):
                    self.retired.add(slot)
                    continue
                return slot
        return None

    def _flaky(self, slot: int) -> bool:
        return bool(self.data[slot].isnan().any())

    def reinstate(self) -> None:
        with self._lock:
            while self.retired:
                slot = self.retired.pop()  # clean: idle again two lines below
                self.data[slot].zero_()
                self._idle.append(slot)

    def seal(self, slot: int) -> None:
        self.sums[slot] = zlib.crc32(self.data[slot].numpy().tobytes())

    def check(self, slot: int) -> None:
        if self.sums.get(slot) != zlib.crc32(self.data[slot].numpy().tobytes()):
            raise Damaged(f"host slot {slot}")

    def vacate(self, slot: int) -> None:
        with self._lock:
            self.sums.pop(slot, None)
            self._idle.append(slot)


class DiskTier:
    def __init__(self, root: str, elems: int) -> None:
        self.root = root
        self.elems = elems

    def _path(self, key: str) -> str:
        return os.path.join(self.root, key + ".kv")

    def store(self, key: str, t: torch.Tensor) -> None:
        with open(self._path(key), "wb") as fh:  # clean: with
            fh.write(t.numpy().tobytes())

    def load(self, key: str, into: torch.Tensor) -> bool:
        try:
            fh = open(self._path(key), "rb")  # leak: a file that is too short returns False without being closed
        except FileNotFoundError:
            return False
        raw = fh.read()
        if len(raw) != self.elems * 2:
            return False
        fh.close()
        into.copy_(torch.frombuffer(bytearray(raw), dtype=torch.float16))
        return True
