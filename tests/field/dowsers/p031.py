"""Point-to-point buffers for each (src, dst) pair of ranks."""
from collections import defaultdict, deque


class PairBuffers:
    def __init__(self, alloc, depth=2):
        self._alloc = alloc
        self._depth = depth
        self._queues = defaultdict(deque)
        self._count = defaultdict(int)

    def grant(self, src, dst):
        key = (src, dst)
        queue = self._queues[key]
        if queue:
            return queue.popleft()
        if self._count[key] < self._depth:
            self._count[key] += 1
            return self._alloc()
        return None

    def ungrant(self, src, dst, buf):
        self._queues[src, dst].append(buf)


class PpComm:
    def __init__(self, rank, buffers: PairBuffers, nic):
        self.rank = rank
        self.buffers = buffers
        self.nic = nic

    def send(self, dst, act):
        buf = self.buffers.grant(self.rank, dst)  # clean: ungranted in finally
        if buf is None:
            return False
        try:
            buf.fill(act)
            self.nic.put(dst, buf)
        finally:
            self.buffers.ungrant(self.rank, dst, buf)
        return True

    def send_first_free(self, dsts, act):
        for dst in dsts:
            buf = self.buffers.grant(self.rank, dst)  # leak: a busy link continues with the buffer
            if buf is None or self.nic.busy(dst):
                continue
            buf.fill(act)
            self.nic.put(dst, buf)
            self.buffers.ungrant(self.rank, dst, buf)
            return dst
        return None

    def recv(self, src):
        buf = self.buffers.grant(src, self.rank)  # leak: returns on a timeout without ungrant
        if buf is None:
            return None
        if not self.nic.get(src, buf, timeout=1.0):
            return None
        act = buf.clone()
        self.buffers.ungrant(src, self.rank, buf)
        return act

    def ping(self, dst):
        buf = self.buffers.grant(self.rank, dst)  # clean: one way, ungranted
        if buf is not None:
            self.nic.put(dst, buf)
            self.buffers.ungrant(self.rank, dst, buf)
