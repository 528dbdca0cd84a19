"""Feature tables in segments of one shared buffer, used by loader processes."""
from __future__ import annotations

import atexit
import logging
from typing import Any, Dict, Iterable, List, Optional, Tuple

import numpy as np

logger = logging.getLogger(__name__)


class SegmentTable:
    """Fixed-size segments of one buffer."""

    def __init__(self, segments: int, seg_bytes: int) -> None:
        self._map = bytearray(segments * seg_bytes)
        self.seg_bytes = seg_bytes
        self._free: List[int] = list(reversed(range(segments)))
        self.owners: Dict[int, str] = {}

    def reserve(self, owner: str) -> int:
        if not self._free:
            raise MemoryError("no shared segment left")
        seg = self._free.pop()  # clean: entered in owners and returned
        self.owners[seg] = owner
        return seg

    def reserve_aligned(self, owner: str, align: int) -> Optional[int]:
        for _ in range(len(self._free)):
            seg = self._free.pop(0)  # clean: near miss, misaligned ones go to the back of the list
            if seg % align == 0:
                self.owners[seg] = owner
                return seg
            self._free.append(seg)
        return None

    def unreserve(self, seg: int) -> None:
        self.owners.pop(seg, None)
        self._free.append(seg)

    def reserve_group(self, owner: str, n: int) -> Optional[List[int]]:
        group = [self._free.pop() for _ in range(min(n, len(self._free)))]  # leak: an incomplete group returns None and its segments are gone
        if len(group) < n:
            return None
        for seg in group:
            self.owners[seg] = owner
        return group

    def view(self, seg: int, dtype: Any, count: int) -> np.ndarray:
        return np.frombuffer(self._map, dtype=dtype, count=count, offset=seg * self.seg_bytes)


class FeatureStore:
    def __init__(self, table: SegmentTable, owner: str) -> None:
        self.table = table
        self.owner = owner
        self.columns: Dict[str, Tuple[int, np.dtype, int]] = {}
        atexit.register(self.close)

    def add(self, name: str, values: np.ndarray) -> None:
        if name in self.columns:
            raise KeyError(f"column {name} exists")
        seg = self.table.reserve(self.owner)  # clean: kept in columns, remove() and close() unreserve
        self.table.view(seg, values.dtype, values.size)[:] = values.ravel()
        self.columns[name] = (seg, values.dtype, values.size)

    def update(self, name: str, values: np.ndarray) -> None:
        seg = self.table.reserve(self.owner)  # leak: the column's former segment is overwritten in the dict
        self.table.view(seg, values.dtype, values.size)[:] = values.ravel()
        self.columns[name] = (seg, values.dtype, values.size)

    def replace(self, name: str, values: np.ndarray) -> None:
        seg = self.table.reserve(self.owner)  # clean: near miss, remove() unreserves the former segment
        self.table.view(seg, values.dtype, values.size)[:] = values.ravel()
        self.remove(name)
        self.columns[name] = (seg, values.dtype, values.size)

    def remove(self, name: str) -> bool:
        entry = self.columns.pop(name, None)
        if entry is None:
            return False
        self.table.unreserve(entry[0])
        return True

    def try_add(self, name: str, values: np.ndarray) -> bool:
        try:
            seg = self.table.reserve(self.owner)  # leak: oversized columns end in the handler, the segment stays reserved
            if values.nbytes > self.table.seg_bytes:
                raise MemoryError(f"{name}: {values.nbytes} bytes")
            self.table.view(seg, values.dtype, values.size)[:] = values.ravel()
            self.columns[name] = (seg, values.dtype, values.size)
            return True
        except MemoryError as e:
            logger.warning("column not added: %s", e)
            return False

    def try_add_checked(self, name: str, values: np.ndarray) -> bool:
        if values.nbytes > self.table.seg_bytes or name in self.columns:
            return False
        try:
            seg = self.table.reserve(self.owner)  # clean: near miss, the handler is for reserve itself
        except MemoryError:
            return False
        self.table.view(seg, values.dtype, values.size)[:] = values.ravel()
        self.columns[name] = (seg, values.dtype, values.size)
        return True

    def aggregate(self, names: Iterable[str], op: str) -> Optional[float]:
        seg = self.table.reserve_aligned(self.owner, 2)  # leak: an unknown operation returns None after the loop has used the segment
        if seg is None:
            return None
        acc = self.table.view(seg, np.float64, 1)
        acc[0] = 0.0
        for n in names:
            s, dt, cnt = self.columns[n]
            acc[0] += float(self.table.view(s, dt, cnt).sum())
        if op == "sum":
            value = float(acc[0])
        elif op == "neg":
            value = -float(acc[0])
        else:
            logger.error("unknown operation %s", op)
            return None
        self.table.unreserve(seg)
        return value

    def scratch_sort(self, name: str) -> np.ndarray:
        s, dt, cnt = self.columns[name]
        seg = self.table.reserve(self.owner)  # clean: unreserved after the copy
        tmp = self.table.view(seg, dt, cnt)
        tmp[:] = np.sort(self.table.view(s, dt, cnt))
        out = tmp.copy()
        self.table.unreserve(seg)
        return out

    def join(self, left: str, right: str) -> Optional[int]:
        group = self.table.reserve_group(self.owner, 2)  # leak: the second of the two segments is never unreserved
        if group is None:
            return None
        for seg, name in zip(group, (left, right)):
            s, dt, cnt = self.columns[name]
            self.table.view(seg, dt, cnt)[:] = self.table.view(s, dt, cnt)
        lv, rv = (self.table.view(g, np.int64, 1) for g in group)
        matches = int(np.intersect1d(lv, rv).size)
        self.table.unreserve(group[0])
        return matches

    def correlate(self, left: str, right: str) -> Optional[float]:
        group = self.table.reserve_group(self.owner, 2)  # clean: near miss, the loop in finally unreserves every member
        if group is None:
            return None
        try:
            data = []
            for seg, name in zip(group, (left, right)):
                s, dt, cnt = self.columns[name]
                if cnt < 2:
                    return None
                v = self.table.view(seg, dt, cnt)
                v[:] = self.table.view(s, dt, cnt)
                data.append(v)
            return float(np.corrcoef(data[0], data[1])[0, 1])
        finally:
            for seg in group:
                self.table.unreserve(seg)

    def close(self) -> None:
        for name in list(self.columns):
            self.remove(name)
