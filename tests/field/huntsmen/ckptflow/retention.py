"""Which checkpoints stay: pinned ones are never deleted."""
import json
import threading
from collections import Counter
from contextlib import contextmanager


class ManifestError(Exception):
    pass


class Retention:
    def __init__(self, http, keep=3):
        self.http = http
        self.keep = keep
        self.steps = []
        self._pins = Counter()
        self._lock = threading.Lock()
        self._best = None

    def pin(self, step):
        with self._lock:
            if step not in self.steps:
                raise KeyError(step)
            self._pins[step] += 1
            return step

    def unpin(self, step):
        with self._lock:
            self._pins[step] -= 1

    @contextmanager
    def pinned(self, step):
        self.pin(step)  # clean: unpinned in the finally
        try:
            yield step
        finally:
            self.unpin(step)

    def sweep(self):
        with self._lock:
            old = [s for s in self.steps[:-self.keep] if not self._pins[s]]
            self.steps = [s for s in self.steps if s not in old]
        for step in old:
            self.http.delete_prefix(f"step-{step:08d}/")
        return old

    def mark_best(self, step):
        """The best one so far stays whatever its age."""
        self.pin(step)  # clean: near miss, moved to _best, whose former pin is let go, clear_best() does the last
        if self._best is not None:
            self.unpin(self._best)
        self._best = step

    def clear_best(self):
        if self._best is not None:
            self.unpin(self._best)
            self._best = None

    def _manifest(self, step):
        raw = self.http.get(f"step-{step:08d}/manifest.json")
        if raw is None:
            raise ManifestError(f"step {step} was not finished")
        return json.loads(raw)["keys"]

    def restore(self, step, load):
        self.pin(step)  # leak: an unfinished step raises ManifestError before the try, and restore_latest() goes on to the one before
        keys = self._manifest(step)
        try:
            for key in keys:
                load(key, self.http.get(key))
        finally:
            self.unpin(step)
        return len(keys)

    def restore_latest(self, load):
        for step in sorted(self.steps, reverse=True):
            try:
                return step, self.restore(step, load)
            except ManifestError:
                continue
        return None

    def copy_out(self, step, put):
        with self.pinned(step):  # clean: the context manager unpins
            keys = self._manifest(step)
            for key in keys:
                put(key, self.http.get(key))
        return keys
