# take: P.split_off(n)
# give: P.join(X)
# gets: optional
# type: BuddyArena
import threading


class BuddyArena:
    def __init__(self, max_order):
        self.max_order = max_order
        self._free = {k: set() for k in range(max_order + 1)}
        self._free[max_order].add(0)
        self._order_of = {}
        self._lk = threading.Lock()
        self.live_units = 0

    def _descend(self, have, want, base):
        while have > want:
            have -= 1
            self._free[have].add(base + (1 << have))

    def split_off(self, units):
        want = max(units - 1, 0).bit_length()
        with self._lk:
            for k in range(want, self.max_order + 1):
                if self._free[k]:
                    base = self._free[k].pop()
                    self._descend(k, want, base)
                    self._order_of[base] = want
                    self.live_units += 1 << want
                    return base
            return None

    def join(self, base):
        with self._lk:
            k = self._order_of.pop(base)
            self.live_units -= 1 << k
            while k < self.max_order and (base ^ (1 << k)) in self._free[k]:
                self._free[k].remove(base ^ (1 << k))
                base &= ~(1 << k)
                k += 1
            self._free[k].add(base)
