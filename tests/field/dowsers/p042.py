"""Admission gate counting permits under a condition."""
import threading


class Gate:
    def __init__(self, permits):
        self._permits = permits
        self._cond = threading.Condition()
        self.closed = False

    def admit(self, n=1, timeout=None):
        with self._cond:
            ok = self._cond.wait_for(lambda: self.closed or self._permits >= n, timeout)
            if not ok or self.closed:
                return False
            self._permits -= n
            return True

    def depart(self, n=1):
        with self._cond:
            self._permits += n
            self._cond.notify_all()


class PrefillQueue:
    def __init__(self, gate: Gate, model):
        self.gate = gate
        self.model = model
        self.active = {}

    def run(self, req):
        if not self.gate.admit(req.weight):  # clean: departs in finally
            return None
        try:
            return self.model.prefill(req)
        finally:
            self.gate.depart(req.weight)

    def run_cached(self, req, cache):
        if not self.gate.admit(req.weight):  # leak: a cache hit returns without departing
            return None
        hit = cache.get(req.key)
        if hit is not None:
            return hit
        out = self.model.prefill(req)
        self.gate.depart(req.weight)
        return out

    def start(self, req):
        if self.gate.admit(req.weight, timeout=0.5):  # clean: finish() departs
            self.active[req.id] = req.weight
            self.model.start(req)

    def finish(self, req_id):
        self.gate.depart(self.active.pop(req_id))

    def drain(self, reqs):
        for req in reqs:
            if not self.gate.admit():  # leak: the break on a stop request keeps the permit
                return
            if req.stop:
                break
            self.model.prefill(req)
            self.gate.depart()
