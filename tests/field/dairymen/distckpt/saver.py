"""The saving half: sessions and what is written later."""
import logging
import queue
import threading

from .regions import RegionsSpent
from .sinks import SinkFailed

log = logging.getLogger("distckpt.saver")


class SaveSession:
    """One checkpoint being written.  Regions queue here until flush()."""

    def __init__(self, pool, sinks, step, rank):
        self.pool = pool
        self.sinks = sinks
        self.step = step
        self.rank = rank
        self.entries = []
        self._staged = []
        self.sink = None

    def __enter__(self):
        self.sink = self.sinks.attach(self._file())  # clean: near miss, __exit__ detaches by the name
        return self

    def __exit__(self, etype, exc, tb):
        self.rollback()
        self.sinks.detach(self._file())
        return etype is not None and issubclass(etype, SinkFailed)

    def _file(self):
        return f"step{self.step}-rank{self.rank}.bin"

    def stage(self, name, data):
        region = self.pool.lend(len(data))  # clean: near miss, kept in _staged, flush() or rollback() take it back
        self._staged.append((name, region))
        region.write(data)

    def stage_dedup(self, name, data, seen):
        """Stage unless the same bytes were staged under another name."""
        region = self.pool.lend(len(data))  # leak: a duplicate is noted in entries and its region is not taken back
        region.write(data)
        key = hash(bytes(region.seal()))
        if key in seen:
            self.entries.append({"name": name, "same_as": seen[key]})
            return False
        seen[key] = name
        self._staged.append((name, region))
        return True

    def flush(self):
        while self._staged:
            name, region = self._staged[0]
            at = self.sink.append(region.seal())
            self.entries.append({"name": name, "at": at, "n": region.length})
            self._staged.pop(0)
            self.pool.take_back(region)

    def rollback(self):
        for _, region in self._staged:
            self.pool.take_back(region)
        self._staged.clear()


class Saver:
    def __init__(self, pool, sinks, rank):
        self.pool = pool
        self.sinks = sinks
        self.rank = rank
        self._later = queue.Queue()
        self._thread = None

    def save(self, step, tensors):
        with SaveSession(self.pool, self.sinks, step, self.rank) as s:  # clean: __exit__ rolls back and detaches
            for name, data in tensors.items():
                try:
                    s.stage(name, data)
                except RegionsSpent:
                    s.flush()
                    s.stage(name, data)
            s.flush()
            return s.entries

    def save_raw(self, step, blob):
        """A blob without a session, for the random states."""
        name = f"step{step}-rank{self.rank}.rng"
        sink = self.sinks.attach(name)  # leak: RegionsSpent is handled by a return that does not detach
        try:
            region = self.pool.lend(len(blob))  # clean: the finally takes it back, also for SinkFailed
        except RegionsSpent:
            log.warning("no region for %s", name)
            return False
        try:
            region.write(blob)
            sink.append(region.seal())
            return True
        except SinkFailed as exc:
            log.error("%s", exc)
            return False
        finally:
            self.pool.take_back(region)
            self.sinks.detach(name)

    def save_later(self, step, name, data):
        region = self.pool.lend(len(data))  # leak: _work() drops items of a step that is too old without taking the region back
        region.write(data)
        self._later.put((step, name, region))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def _work(self):
        newest = -1
        while True:
            item = self._later.get()
            if item is None:
                return
            step, name, region = item
            newest = max(newest, step)
            if step < newest - 1:
                log.info("%s of step %d is out of date", name, step)
                continue
            sink = self.sinks.attach(name)  # clean: detached in finally
            try:
                sink.append(region.seal())
            except SinkFailed as exc:
                log.error("later: %s", exc)
            finally:
                self.pool.take_back(region)
                self.sinks.detach(name)

    def close(self):
        if self._thread is not None:
            self._later.put(None)
            self._thread.join()
        self.sinks.discard_all()
        self.pool.unmap_all()
