"""Leader leases with a fencing token; a holder stays until it yields."""
import time


class LeaseBoard:
    def __init__(self, clock=time.monotonic):
        self._clock = clock
        self._rows = {}
        self._fence = 0

    def grab(self, name, who):
        if name in self._rows:
            return None
        self._fence += 1
        self._rows[name] = {"who": who, "seen": self._clock(), "fence": self._fence}
        return self._fence

    def renew(self, name, fence):
        row = self._rows.get(name)
        if row is None or row["fence"] != fence:
            return False
        row["seen"] = self._clock()
        return True

    def yield_lease(self, name, fence):
        if name in self._rows and self._rows[name]["fence"] == fence:
            del self._rows[name]


class Leader:
    def __init__(self, board, me):
        self.board = board
        self.me = me
        self.fence = None

    def campaign(self):
        self.fence = self.board.grab("leader", self.me)  # clean: stored, yielded by resign
        return self.fence is not None

    def heartbeat(self):
        return self.board.renew("leader", self.fence)

    def resign(self):
        self.board.yield_lease("leader", self.fence)
        self.fence = None


def compact(board, me, shard):
    fence = board.grab(shard.name, me)  # leak: small shards return with the lease
    if fence is None:
        return False
    if shard.size < 1024:
        return False
    shard.compact(fence)
    board.yield_lease(shard.name, fence)
    return True


def backup(board, me, shard, target):
    fence = board.grab(shard.name, me)  # clean: yielded in finally
    if fence is None:
        return
    try:
        target.copy(shard, fence)
    finally:
        board.yield_lease(shard.name, fence)


def vacant(board, me, names):
    return [n for n in names if board.grab(n, me)]  # leak: grabbed to see, and not yielded
