# take: P.grab_stream()
# give: P.park_stream(X)
# gets: value
# type: SideStreams
import threading
import time

import torch


class SideStreams:
    def __init__(self, device, soft_limit=8):
        self.device = device
        self.soft_limit = soft_limit
        self._mutex = threading.RLock()
        self._parked = []
        self._made = 0
        self._busy_since = {}
        self.total_busy_s = 0.0

    def grab_stream(self):
        with self._mutex:
            if self._parked:
                s = self._parked.pop()
            else:
                s = torch.cuda.Stream(device=self.device)
                self._made += 1
            self._busy_since[id(s)] = time.monotonic()
            return s

    def park_stream(self, stream):
        with self._mutex:
            began = self._busy_since.pop(id(stream), None)
            if began is None:
                raise KeyError("stream does not belong to this set or is parked already")
            self.total_busy_s += time.monotonic() - began
            self._parked.append(stream)

    def describe(self):
        with self._mutex:
            return f"{self._made} streams, {len(self._busy_since)} busy, {self.total_busy_s:.2f}s"
