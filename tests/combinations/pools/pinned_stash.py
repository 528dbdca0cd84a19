# take: P.loan(n)
# give: P.settle(X)
# gets: value
# type: PinnedStash
import threading
from collections import defaultdict

import torch


def _round_up_pow2(n):
    return 1 << max(9, (n - 1).bit_length())


class PinnedStash:
    """Page-locked byte buffers kept by power-of-two size. Never says no, it just grows."""

    def __init__(self, pin=True):
        self._pin = pin and torch.cuda.is_available()
        self._shelf = defaultdict(list)
        self._mu = threading.Lock()
        self.bytes_created = 0

    def loan(self, nbytes):
        size = _round_up_pow2(nbytes)
        with self._mu:
            if self._shelf[size]:
                return self._shelf[size].pop()
        buf = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)
        with self._mu:
            self.bytes_created += size
        return buf

    def settle(self, buf):
        with self._mu:
            self._shelf[buf.numel()].append(buf)
