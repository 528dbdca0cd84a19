"""Writers, staged files, shared segments, quotas and uploads of the checkpointer."""
from __future__ import annotations

import os
import queue
import threading
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field


class CheckpointError(Exception):
    pass


class ShardWriter:
    def __init__(self, number):
        self.number = number
        self.target = None
        self.written = 0

    def begin(self, target):
        self.target = target
        self.written = 0

    def write(self, blob):
        if self.target is None:
            raise CheckpointError("no target")
        self.written += len(blob)


class WriterCrew:
    """A LifoQueue of writers, hired for a shard."""

    def __init__(self, n=2):
        self._bench = queue.LifoQueue()
        for i in range(n):
            self._bench.put(ShardWriter(i))
        self.hired = 0

    def hire(self, timeout=None):
        try:
            w = self._bench.get(timeout=timeout)
        except queue.Empty:
            return None
        self.hired += 1
        return w

    def lay_off(self, writer):
        writer.target = None
        self.hired -= 1
        self._bench.put(writer)


def write_shard(crew, target, blobs):
    writer = crew.hire()  # leak: a CheckpointError is caught and answered -1 with the writer hired
    writer.begin(target)
    try:
        for blob in blobs:
            writer.write(blob)
    except CheckpointError:
        return -1
    n = writer.written
    crew.lay_off(writer)
    return n


def write_parallel(crew, shards):
    with ExitStack() as stack:
        for target, blob in shards.items():
            w = crew.hire(timeout=5)  # clean: the exit stack lays it off
            if w is None:
                raise CheckpointError("no writer")
            stack.callback(crew.lay_off, w)
            w.begin(target)
            w.write(blob)


class BackgroundShard:
    def __init__(self, crew, target):
        self.crew = crew
        self.target = target
        self.thread = None

    def start(self, blobs):
        writer = self.crew.hire()  # clean: near miss, the thread lays it off when it ends
        writer.begin(self.target)

        def work():
            try:
                for b in blobs:
                    writer.write(b)
            finally:
                self.crew.lay_off(writer)

        self.thread = threading.Thread(target=work)
        self.thread.start()


class StagedNames:
    """A final path is claimed by one stager at a time; publish or abandon ends the claim."""

    def __init__(self):
        self._staged = {}

    def stage(self, path):
        if path in self._staged:
            raise CheckpointError(f"{path} is being staged")
        self._staged[path] = f"{path}.{uuid.uuid4().hex[:8]}.part"
        return self._staged[path]

    def publish(self, path):
        os.replace(self._staged.pop(path), path)

    def abandon(self, path):
        tmp = self._staged.pop(path)
        if os.path.exists(tmp):
            os.unlink(tmp)


def save_text(names, path, text):
    tmp = names.stage(path)  # clean: published or abandoned
    with open(tmp, "w") as f:
        n = f.write(text)
    if n != len(text):
        names.abandon(path)
        return False
    names.publish(path)
    return True


def save_if_changed(names, path, text, old):
    tmp = names.stage(path)  # leak: unchanged text returns with the path still staged
    if text == old:
        return False
    with open(tmp, "w") as f:
        f.write(text)
    names.publish(path)
    return True


def save_pair(names, a, b, blob):
    for path in (a, b):
        tmp = names.stage(path)  # leak: when the write of b fails only b is abandoned, a stays staged
        try:
            with open(tmp, "wb") as f:
                f.write(blob)
        except OSError:
            names.abandon(path)
            return False
    names.publish(a)
    names.publish(b)
    return True


@dataclass
class Segment:
    name: str
    buf: bytearray
    attached: int = 0


class SharedSegments:
    """Named memory between ranks of a host; the last detach unlinks."""

    def __init__(self):
        self._by_name = {}
        self._lock = threading.Lock()

    def attach(self, name, size=0):
        with self._lock:
            seg = self._by_name.get(name)
            if seg is None:
                if not size:
                    raise FileNotFoundError(name)
                seg = self._by_name[name] = Segment(name, bytearray(size))
            seg.attached += 1
            return seg

    def detach(self, name):
        with self._lock:
            seg = self._by_name[name]
            seg.attached -= 1
            if seg.attached == 0:
                del self._by_name[name]


def publish_state(segments, rank, blob):
    seg = segments.attach(f"rank{rank}", len(blob))  # clean: near miss, detached by the name of the record
    seg.buf[: len(blob)] = blob
    digest = sum(seg.buf) & 0xFFFF
    segments.detach(seg.name)
    return digest


def merge_states(segments, ranks):
    total = 0
    for r in ranks:
        try:
            seg = segments.attach(f"rank{r}")  # leak: an empty segment is skipped while attached
        except FileNotFoundError:
            continue
        if not seg.buf:
            continue
        total += seg.buf[0]
        segments.detach(f"rank{r}")
    return total


class Receipt:
    def __init__(self, quota, n):
        self.quota = quota
        self.n = n
        self.live = True

    def void(self):
        if self.live:
            self.live = False
            self.quota._voided(self.n)


class DiskQuota:
    def __init__(self, limit):
        self.limit = limit
        self.charged = 0

    def charge(self, n):
        if self.charged + n > self.limit:
            return None
        self.charged += n
        return Receipt(self, n)

    def _voided(self, n):
        self.charged -= n


@dataclass
class Retention:
    """Keeps the last few checkpoints; a removed one voids its receipt."""

    keep: int
    kept: list = field(default_factory=list)

    def add(self, step, receipt):
        self.kept.append((step, receipt))
        while len(self.kept) > self.keep:
            _, old = self.kept.pop(0)
            old.void()


def checkpoint(quota, retention, step, blob, sink):
    receipt = quota.charge(len(blob))  # clean: voided on a short write, else handed to retention
    if receipt is None:
        return False
    if sink.write(blob) != len(blob):
        receipt.void()
        return False
    retention.add(step, receipt)
    return True


def checkpoint_best(quota, retention, step, blob, sink, score, best):
    receipt = quota.charge(len(blob))  # leak: a worse score returns without void or retention
    if receipt is None:
        return best
    if score <= best:
        return best
    sink.write(blob)
    retention.add(step, receipt)
    return score


class Uploads:
    """Multi-part uploads by id; complete or abort ends one."""

    def __init__(self, max_open=16):
        self._open = {}
        self._max = max_open

    def initiate(self, key):
        if len(self._open) >= self._max:
            raise CheckpointError("too many uploads")
        upload_id = uuid.uuid4().hex
        self._open[upload_id] = (key, [])
        return upload_id

    def part(self, upload_id, blob):
        self._open[upload_id][1].append(blob)
        return len(self._open[upload_id][1])

    def complete(self, upload_id):
        key, parts = self._open.pop(upload_id)
        return key, b"".join(parts)

    def abort(self, upload_id):
        self._open.pop(upload_id, None)


def upload_file(uploads, key, chunks):
    uid = uploads.initiate(key)  # clean: aborted or completed
    try:
        for c in chunks:
            uploads.part(uid, c)
    except BaseException:
        uploads.abort(uid)
        raise
    return uploads.complete(uid)


def upload_nonempty(uploads, key, chunks):
    uid = uploads.initiate(key)  # leak: no parts, no complete, no abort
    n = 0
    for c in chunks:
        n = uploads.part(uid, c)
    if n:
        return uploads.complete(uid)
    return None


class ManifestBuilder:
    """Collects entries and renders them."""

    def __init__(self):
        self.entries = []

    def reserve(self, name):
        entry = {"name": name, "parts": []}
        self.entries.append(entry)
        return entry

    def release(self):
        text = repr(self.entries)
        self.entries = []
        return text


def describe(builder, shards):
    for name, parts in shards.items():
        entry = builder.reserve(name)  # clean: a builder's entry stays in the manifest
        if not parts:
            continue
        entry["parts"].extend(parts)
    return builder.entries
