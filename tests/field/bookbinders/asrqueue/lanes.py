"""Lanes are the rows of the recogniser's state tensor; one per audio session."""
import threading
from collections import deque

import torch


class AllLanesBusy(Exception):
    pass


class Lane:
    def __init__(self, row, owner):
        self.row, self.owner = row, owner
        self.refs = 1


class LaneTable:
    def __init__(self, rows, width, device="cuda"):
        self.state = torch.zeros(rows, width, device=device)
        self._lock = threading.Lock()
        self._free = deque(range(rows))
        self._by_row = {}
        self.peak = 0

    def assign(self, owner):
        with self._lock:
            if not self._free:
                raise AllLanesBusy(owner)
            row = self._free.popleft()  # clean: leaves in the Lane
            lane = Lane(row, owner)
            self._by_row[row] = lane
            self.peak = max(self.peak, len(self._by_row))
        self.state[row].zero_()
        return lane

    def share(self, lane):
        """A second reader of the lane; everybody calls release()."""
        with self._lock:
            lane.refs += 1
        return lane

    def release(self, lane):
        with self._lock:
            lane.refs -= 1
            if lane.refs:
                return
            del self._by_row[lane.row]
            self._free.append(lane.row)


class ChunkPool:
    """Blocks of samples. Grows up to a limit, then get() gives None."""

    def __init__(self, samples, limit):
        self._samples = samples
        self._limit = limit
        self._made = 0
        self._spare = []
        self._lock = threading.Lock()

    def get(self):
        with self._lock:
            if self._spare:
                chunk = self._spare.pop()  # clean: goes to the caller
                chunk.zero_()
                return chunk
            if self._made < self._limit:
                self._made += 1
                return torch.zeros(self._samples)
        return None

    def put(self, chunk):
        with self._lock:
            self._spare.append(chunk)
