"""A background compactor that works on leased file segments in threads."""
import threading


class SegmentTable:
    def __init__(self, names):
        self._cold = list(names)
        self._guard = threading.Lock()

    def check_out(self):
        with self._guard:
            return self._cold.pop(0) if self._cold else None

    def check_in(self, name):
        with self._guard:
            self._cold.append(name)


class Compactor(threading.Thread):
    def __init__(self, table, segment, store):
        super().__init__(daemon=True)
        self.table = table
        self.segment = segment
        self.store = store
        self.saved = 0

    def run(self):
        try:
            before = self.store.size(self.segment)
            self.store.rewrite(self.segment)
            self.saved = before - self.store.size(self.segment)
        finally:
            self.table.check_in(self.segment)


class Verifier(threading.Thread):
    def __init__(self, segment, store):
        super().__init__(daemon=True)
        self.segment = segment
        self.store = store
        self.ok = None

    def run(self):
        self.ok = self.store.checksum(self.segment) == self.store.recorded(self.segment)


class Maintenance:
    def __init__(self, table, store):
        self.table = table
        self.store = store
        self.workers = []

    def _next_large(self, floor):
        name = self.table.check_out()  # clean: handed on, or checked in when it is small
        if name is not None and self.store.size(name) < floor:
            self.table.check_in(name)
            return None
        return name

    def compact(self, floor):
        name = self._next_large(floor)  # clean: the thread checks it in
        if name is None:
            return False
        worker = Compactor(self.table, name, self.store)
        self.workers.append(worker)
        worker.start()
        return True

    def verify(self, floor):
        name = self._next_large(floor)  # clean: checked in after the join
        if name is None:
            return None
        worker = Verifier(name, self.store)
        worker.start()
        worker.join()
        self.table.check_in(name)
        return worker.ok

    def verify_later(self, floor):
        name = self._next_large(floor)  # leak: the verifier does not check in
        if name is None:
            return None
        worker = Verifier(name, self.store)
        worker.start()
        return worker

    def sizes(self, floor):
        return [self.store.size(self._next_large(floor) or "root")]  # leak: only its size is listed
