"""A light timeline of moves, printed by the trainer every few hundred steps."""
import time
from collections import Counter


class Timeline:
    def __init__(self, keep=1000):
        self.keep = keep
        self.events = []
        self.counts = Counter()

    def mark(self, layer, what):
        self.counts[what] += 1
        self.events.append((time.perf_counter(), layer, what))
        if len(self.events) > self.keep:
            del self.events[: self.keep // 2]

    def summary(self):
        return ", ".join(f"{k}={v}" for k, v in sorted(self.counts.items()))
