# take: P.lease(n)
# give: X.close()
# gets: optional
# type: DeviceBroker
class DeviceLease:
    def __init__(self, broker, ids):
        self._broker = broker
        self.ids = tuple(ids)

    @property
    def visible_devices(self):
        return ",".join(map(str, self.ids))

    def close(self):
        broker, self._broker = self._broker, None
        if broker is not None:
            broker._reclaim(self.ids)


class DeviceBroker:
    """Lends GPUs of the host to evaluation jobs; prefers contiguous ids (NVLink neighbours)."""

    def __init__(self, count):
        self._free = [True] * count

    def _pick(self, n):
        for lo in range(len(self._free) - n + 1):
            if all(self._free[lo:lo + n]):
                return range(lo, lo + n)
        loose = [i for i, ok in enumerate(self._free) if ok]
        return loose[:n] if len(loose) >= n else None

    def lease(self, n):
        ids = self._pick(n)
        if ids is None:
            return None
        for i in ids:
            self._free[i] = False
        return DeviceLease(self, ids)

    def _reclaim(self, ids):
        for i in ids:
            self._free[i] = True
