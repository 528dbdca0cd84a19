import threading


class NotEnough(Exception):
    """Fewer devices are free than were asked for."""


class DeviceSet:
    """Some devices that belong together; a context manager that gives them back."""

    def __init__(self, owner, ids):
        self.owner = owner
        self.ids = ids

    def give_back(self):
        ids, self.ids = self.ids, []
        self.owner._give(ids)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.give_back()


class Devices:
    def __init__(self, count, per_node=8):
        self._lock = threading.Lock()
        self._free = set(range(count))
        self.per_node = per_node

    def lease(self, n):
        with self._lock:
            if n > len(self._free):
                raise NotEnough("%d wanted, %d free" % (n, len(self._free)))
            return DeviceSet(self, [self._free.pop() for _ in range(n)])  # clean: returned to the caller inside the set

    def lease_node(self):
        """All devices of one node."""
        with self._lock:
            for first in range(0, max(self._free, default=0) + 1, self.per_node):
                node = set(range(first, first + self.per_node))
                if node <= self._free:
                    self._free -= node
                    return DeviceSet(self, sorted(node))  # clean: returned to the caller
        raise NotEnough("no whole node")

    def _give(self, ids):
        with self._lock:
            self._free.update(ids)


def place_models(devices, gen_size, ref_size):
    """The devices of the generator and of the reference model, or None."""
    try:
        gen = devices.lease(gen_size)  # leak: when the reference model finds no devices those of the generator are kept
        ref = devices.lease(ref_size)  # clean: returned to the caller
    except NotEnough as exc:
        print("placement: %s" % exc)
        return None
    return gen, ref


def bandwidth(devices, measure):
    with devices.lease(2) as pair:  # clean: the context manager gives back
        return measure(*pair.ids)
