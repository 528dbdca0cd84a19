# take: P.join_group(key)
# give: P.leave_group(key)
# gets: value
# type: ElasticRanks
import logging
import threading

log = logging.getLogger("elastic")


class RankSlot:
    def __init__(self, rank):
        self.rank = rank
        self.host = None

    @property
    def vacant(self):
        return self.host is None


class ElasticRanks:
    def __init__(self, world_size):
        self._slots = tuple(RankSlot(r) for r in range(world_size))
        self._lock = threading.Lock()
        self.joins = 0

    def _find(self, pred):
        return next((s for s in self._slots if pred(s)), None)

    def join_group(self, host):
        with self._lock:
            slot = self._find(lambda s: s.vacant)
            if slot is None:
                raise RuntimeError(f"world is full, {host} cannot join")
            slot.host = host
            self.joins += 1
            log.info("%s joined as rank %d", host, slot.rank)
            return slot.rank

    def leave_group(self, host):
        with self._lock:
            slot = self._find(lambda s: s.host == host)
            if slot is None:
                raise KeyError(host)
            slot.host = None
