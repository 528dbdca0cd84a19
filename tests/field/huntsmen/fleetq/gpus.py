"""Which GPUs of this machine are free, by kind ("small" are MIG slices, "full" whole devices)."""
import threading


class GpuBook:
    def __init__(self, inventory):
        self._free = {kind: list(ids) for kind, ids in inventory.items()}
        self._kind_of = {i: kind for kind, ids in inventory.items() for i in ids}
        self._changed = threading.Condition()

    def take(self, kind, n):
        """n devices of one kind, or an empty list."""
        with self._changed:
            shelf = self._free[kind]
            if len(shelf) < n:
                return []
            return [shelf.pop() for _ in range(n)]  # clean: handed to the caller

    def take_up_to(self, kind, n):
        with self._changed:
            shelf = self._free[kind]
            return [shelf.pop() for _ in range(min(n, len(shelf)))]  # clean: handed to the caller

    def take_best(self, n):
        """Slices if there are enough of them, else whole devices."""
        got = self.take_up_to("small", n)  # leak: with too few slices the name is bound to whole devices and the slices are forgotten
        if len(got) < n:
            got = self.take("full", n)  # clean: handed to the caller
        return got

    def take_waiting(self, kind, n, timeout):
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._free[kind]) >= n, timeout):
                return []
            return [self._free[kind].pop() for _ in range(n)]  # clean: handed to the caller

    def put(self, ids):
        with self._changed:
            for i in ids:
                self._free[self._kind_of[i]].append(i)
            self._changed.notify_all()
