# TAKE: X = self.free.pop()
# PUT: self.free.add(X)
# EMPTY: not self.free
# COUNT: len(self.free)
# BAD: self.data[X].isnan().any()
import threading

import torch


class Slots:
    def __init__(self, n_slots: int, width: int) -> None:
        self.free: set[int] = set(range(n_slots))
        self.data = torch.zeros(n_slots, width)
        self._mu = threading.Lock()

    def take(self) -> int | None:
        with self._mu:
            if not self.free:
                return None
            return self.free.pop()

    def give(self, slot: int) -> None:
        with self._mu:
            self.free.add(slot)
