"""Requests and the scheduler that makes batches of them."""
import logging
from collections import deque

import numpy as np

log = logging.getLogger(__name__)


class Req:
    def __init__(self, rid, ids, max_new):
        self.rid = rid
        self.ids = tuple(ids)
        self.max_new = max_new
        self.out = []
        self.row = None
        self.pin = None
        self.indices = np.empty(0, dtype=np.int64)
        self.prefix = 0
        self.error = None

    @property
    def finished(self):
        return self.error is not None or len(self.out) >= self.max_new

    def all_ids(self):
        return self.ids + tuple(self.out)


class Scheduler:
    def __init__(self, pool, rows, tree, max_len):
        self.pool = pool
        self.rows = rows
        self.tree = tree
        self.max_len = max_len
        self.waiting = deque()
        self.running = []

    def _tokens(self, n):
        idx = self.pool.alloc(n)  # clean: returned, None stands for nothing before and after the eviction
        if idx is None:
            self.tree.evict(n - self.pool.available())
            idx = self.pool.alloc(n)  # clean: returned, there was nothing to give back
        return idx

    # extend

    def admit(self, req):
        """Prefix, row and memory for the rest of the prompt, or nothing of it."""
        node, have = self.tree.match(req.ids[:-1])
        pin = self.tree.pin(node)  # leak: a prompt that is too long returns True with its error, the pin is held by nobody
        if len(req.ids) + req.max_new > self.max_len:
            req.error = f"{len(req.ids)} tokens are too many"
            return True
        row = self.rows.alloc()  # leak: when the memory does not suffice only the pin is given back
        if row is None:
            pin.release()
            return False
        fresh = self._tokens(len(req.ids) - len(have))  # clean: part of the indices of the request, None when there are none
        if fresh is None:
            pin.release()
            return False
        req.row, req.pin, req.prefix = row, pin, len(have)
        req.indices = np.concatenate([have, fresh])
        self.rows.table[row, : len(req.indices)] = req.indices
        return True

    def schedule(self):
        while self.waiting:
            req = self.waiting[0]
            if not self.admit(req):
                break
            self.waiting.popleft()
            if req.error is None:
                self.running.append(req)
            else:
                log.info("%s refused: %s", req.rid, req.error)
        return self.running

    # decode

    def extend_one(self, req):
        idx = self._tokens(1)  # clean: appended to the indices of the request
        if idx is None:
            return False
        self.rows.table[req.row, len(req.indices)] = idx[0]
        req.indices = np.append(req.indices, idx)
        return True

    def decode(self, model):
        for req in list(self.running):
            if req in self.running and not self.extend_one(req):
                self.retract(self.running[-1])
        for req, token in zip(list(self.running), model(self.running)):
            req.out.append(token)
            if req.finished:
                self.finish(req)

    def finish(self, req):
        """The tokens stay in the tree, what it had already is freed."""
        self.running.remove(req)
        ids = req.all_ids()[: len(req.indices)]
        had = self.tree.insert(ids, req.indices)
        self.pool.free(req.indices[req.prefix : had])
        req.pin.release()
        self.rows.free(req.row)
        req.row = req.pin = None

    def retract(self, req):
        self.running.remove(req)
        self.pool.free(req.indices[req.prefix :])
        req.indices = req.indices[:0]
        req.pin.release()
        self.rows.free(req.row)
        req.row = req.pin = None
        req.ids, req.out = req.all_ids(), []
        self.waiting.appendleft(req)

    # things besides the batches

    def preload(self, ids, model):
        """A system prompt that is to be in the tree before the first request comes."""
        idx = self._tokens(len(ids))  # leak: what insert() has already stays with the caller, which does not free it
        if idx is None:
            return False
        model.prefill(ids, idx)
        self.tree.insert(tuple(ids), idx)
        return True

    def preload_once(self, ids, model):
        idx = self._tokens(len(ids))  # clean: near miss, the tree takes over the rest and the part that it had is freed
        if idx is None:
            return False
        model.prefill(ids, idx)
        had = self.tree.insert(tuple(ids), idx)
        self.pool.free(idx[:had])
        return True

    def keep(self, ids):
        """Holds a prefix until the function that is returned is called."""
        node, _ = self.tree.match(tuple(ids))
        return self.tree.pin(node).release  # clean: near miss, the bound method is all that is needed to release it

    def score(self, req, model):
        pin = self.tree.pin(self.tree.match(req.ids)[0])  # clean: released in finally
        try:
            idx = self._tokens(len(req.ids))  # clean: freed in the inner finally
            if idx is None:
                return None
            try:
                return model.logprobs(req.ids, idx)
            finally:
                self.pool.free(idx)
        finally:
            pin.release()

    def dry_run(self, lengths, model):
        """Largest number of tokens that the kernels take."""
        row = self.rows.alloc()  # clean: every way out after the test goes through the free below
        if row is None:
            return 0
        best = 0
        for n in lengths:
            idx = self.pool.alloc(n)  # clean: freed at the end of the turn, None breaks with nothing taken
            if idx is None:
                break
            self.rows.table[row, :n] = idx
            if model.fits(row, n):
                best = max(best, n)
            self.pool.free(idx)
        self.rows.free(row)
        return best
