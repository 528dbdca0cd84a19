class ObjectStore:
    def __init__(self):
        self._values = {}
        self._counts = {}

    def put(self, oid, value):
        self._values[oid] = value
        self._counts.setdefault(oid, 0)

    def incref(self, oid):
        self._counts[oid] += 1
        return self._values[oid]

    def decref(self, oid):
        self._counts[oid] -= 1
        if self._counts[oid] == 0:
            del self._counts[oid], self._values[oid]


class TaskSpec:
    def __init__(self, tid, func, args):
        self.tid = tid
        self.func = func
        self.args = list(args)
        self.attempts = 0


class TaskManager:
    """Keeps argument objects alive while a task is pending or running."""

    def __init__(self, store, max_attempts=3):
        self.store = store
        self.max_attempts = max_attempts
        self.pending = {}
        self.actors = {}

    def submit(self, spec):
        if spec.tid in self.pending:
            return False
        for oid in spec.args:
            self.store.incref(oid)  # leak: the last failed attempt pops the task without decref
        self.pending[spec.tid] = spec
        return True

    def finished(self, tid, result):
        spec = self.pending.pop(tid, None)
        if spec is None:
            return
        self.store.put(tid, result)
        for oid in spec.args:
            self.store.decref(oid)

    def failed(self, tid):
        spec = self.pending[tid]
        spec.attempts += 1
        if spec.attempts < self.max_attempts:
            return "retry"
        self.pending.pop(tid)
        return "gave up"

    def create_actor(self, name, state_oid):
        if name in self.actors:
            return self.actors[name]
        state = self.store.incref(state_oid)  # clean: kill_actor drops the reference
        self.actors[name] = (state_oid, state)
        return self.actors[name]

    def swap_state(self, name, state_oid):
        old_oid, _ = self.actors[name]
        state = self.store.incref(state_oid)  # clean: the old reference is dropped, kill_actor drops the new
        self.actors[name] = (state_oid, state)
        self.store.decref(old_oid)

    def kill_actor(self, name):
        entry = self.actors.pop(name, None)
        if entry is not None:
            self.store.decref(entry[0])


def fetch_many(store, oids, limit):
    values = []
    for oid in oids:
        values.append(store.incref(oid))  # leak: only the first `limit` references are dropped
    for oid in oids[:limit]:
        store.decref(oid)
    return sum(v is not None for v in values)
