"""Checkpoint writer: rotating shard files, host byte budget, journal and background uploads."""
import json
import os
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor


class HostBytes:
    """Bounds the host memory that snapshots may fill."""

    def __init__(self, limit):
        self._cv = threading.Condition()
        self._left = limit

    def reserve(self, n):
        with self._cv:  # clean: the with statement releases it
            if n > self._left:
                return None
            self._left -= n
            return n

    def unreserve(self, n):
        with self._cv:  # clean: the with statement releases it
            self._left += n
            self._cv.notify_all()


class RotatingShards:
    def __init__(self, folder, max_bytes):
        self.folder = folder
        self.max_bytes = max_bytes
        self.serial = 0
        self.written = 0
        self.data = None
        self.meta = None
        self.entries = []

    def _path(self, kind):
        return os.path.join(self.folder, f"{kind}-{self.serial:05d}")

    def rotate(self):
        if self.data is not None:
            self.data.flush()
            self.data.close()
        self.serial += 1
        self.written = 0
        self.data = open(self._path("data"), "wb")  # clean: near miss, former one closed above, last by finish
        self.meta = open(self._path("meta"), "w")  # leak: the next rotate overwrites the former file unclosed

    def append(self, name, payload):
        if self.data is None or self.written + len(payload) > self.max_bytes:
            self.rotate()
        self.data.write(payload)
        self.meta.write(json.dumps({"name": name, "at": self.written, "len": len(payload)}) + "\n")
        self.entries.append((name, self.serial))
        self.written += len(payload)

    def finish(self):
        if self.data is None:
            return []
        self.data.close()
        self.meta.close()
        self.data = self.meta = None
        return self.entries


class Snapshot:
    def __init__(self, step, held):
        self.step = step
        self.held = held
        self.optim_held = 0
        self.tensors = {}
        self.future = None


class Checkpointer:
    def __init__(self, budget: HostBytes, shards: RotatingShards, workers=2):
        self.budget = budget
        self.shards = shards
        self.snapshots = OrderedDict()
        self.best = None
        self.executor = ThreadPoolExecutor(workers)  # clean: near miss, shutdown in close
        self.journal = open(os.path.join(shards.folder, "journal"), "a")  # clean: closed in close

    def snapshot(self, step, tensors, optim=None):
        if step in self.snapshots:
            return False
        size = sum(t.nbytes for t in tensors.values())
        held = self.budget.reserve(size)  # clean: near miss, commit and discard both unreserve held
        if held is None:
            return False
        snap = Snapshot(step, held)
        snap.tensors = {k: t.cpu() for k, t in tensors.items()}
        if optim:
            extra = sum(t.nbytes for t in optim.values())
            got = self.budget.reserve(extra)  # leak: commit unreserves held and optim_held, discard only held
            if got is None:
                self.budget.unreserve(held)
                return False
            snap.optim_held = got
            snap.tensors.update((f"optim/{k}", t.cpu()) for k, t in optim.items())
        self.snapshots[step] = snap
        return True

    def commit(self, step):
        snap = self.snapshots.pop(step)
        for name, t in snap.tensors.items():
            self.shards.append(name, t.numpy().tobytes())
        self.budget.unreserve(snap.held)
        self.budget.unreserve(snap.optim_held)
        self.journal.write(f"{step} committed\n")

    def discard(self, before):
        gone = 0
        for step in [s for s in self.snapshots if s < before]:
            snap = self.snapshots.pop(step)
            self.budget.unreserve(snap.held)
            self.journal.write(f"{step} discarded\n")
            gone += 1
        return gone

    def keep_best(self, step, score, tensors):
        if self.best is not None and self.best["score"] >= score:
            return False
        size = self.budget.reserve(sum(t.nbytes for t in tensors.values()))  # leak: next best overwrites it
        if size is None:
            return False
        self.best = {"step": step, "score": score, "bytes": size, "tensors": tensors}
        return True

    def close(self):
        for step in list(self.snapshots):
            self.commit(step)
        if self.best is not None:
            self.budget.unreserve(self.best["bytes"])
            self.best = None
        self.executor.shutdown()
        self.journal.close()


class UploadTable:
    """Parts on their way to the object store: part -> (file, reserved bytes)."""

    def __init__(self, budget: HostBytes, retries=3):
        self.budget = budget
        self.retries = retries
        self.parts = {}
        self.attempts = {}

    def begin(self, part, path):
        if part in self.parts:
            return False
        reserved = self.budget.reserve(os.path.getsize(path))  # clean: near miss, done and retry unreserve
        if reserved is None:
            return False
        src = open(path, "rb")  # leak: retry closes the file only when it gives up on the part, done never
        self.parts[part] = (src, reserved)
        self.attempts[part] = 0
        return True

    def retry(self, part):
        src, reserved = self.parts[part]
        self.attempts[part] += 1
        if self.attempts[part] < self.retries:
            src.seek(0)
            return True
        del self.parts[part], self.attempts[part]
        src.close()
        self.budget.unreserve(reserved)
        return False

    def done(self, part):
        _, reserved = self.parts.pop(part)
        self.attempts.pop(part)
        self.budget.unreserve(reserved)
