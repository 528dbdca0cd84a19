"""RDMA memory registrations, cached by (address, length)."""
from types import SimpleNamespace


class MrCache:
    def __init__(self, verbs, max_idle=64):
        self._verbs = verbs
        self._max_idle = max_idle
        self._regions = {}
        self._idle = []

    def register(self, addr, length):
        mr = self._regions.get((addr, length))
        if mr is None:
            mr = SimpleNamespace(key=(addr, length), lkey=self._verbs.reg_mr(addr, length), refs=0)
            self._regions[mr.key] = mr
        elif mr.refs == 0:
            self._idle.remove(mr)
        mr.refs += 1
        return mr

    def deregister(self, mr):
        mr.refs -= 1
        if mr.refs:
            return
        self._idle.append(mr)
        if len(self._idle) > self._max_idle:
            old = self._idle.pop(0)
            del self._regions[old.key]
            self._verbs.dereg_mr(old.lkey)


class KvTransfer:
    def __init__(self, cache: MrCache, qp):
        self.cache = cache
        self.qp = qp
        self.pending = {}

    def push(self, block):
        mr = self.cache.register(block.addr, block.nbytes)  # clean: deregistered in finally
        try:
            self.qp.write_sync(mr.lkey, block)
        finally:
            self.cache.deregister(mr)

    def post(self, block):
        mr = self.cache.register(block.addr, block.nbytes)  # leak: a full queue returns None with the region
        wr = self.qp.post_write(mr.lkey, block)
        if wr is None:
            return None
        self.pending[wr] = mr
        return wr

    def completed(self, wr):
        self.cache.deregister(self.pending.pop(wr))

    def post_or_drop(self, block):
        mr = self.cache.register(block.addr, block.nbytes)  # clean: pending or deregistered
        wr = self.qp.post_write(mr.lkey, block)
        if wr is None:
            self.cache.deregister(mr)
        else:
            self.pending[wr] = mr

    def push_pair(self, k, v):
        mr = self.cache.register(k.addr, k.nbytes)  # leak: overwritten by the region of v
        self.qp.write_sync(mr.lkey, k)
        mr = self.cache.register(v.addr, v.nbytes)  # clean: deregistered below
        self.qp.write_sync(mr.lkey, v)
        self.cache.deregister(mr)
