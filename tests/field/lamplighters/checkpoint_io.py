"""Sharded checkpoint writer with a bounded set of upload lanes.

A *lane* is a persistent connection to the object store plus its multipart
buffer.  The store throttles us per connection, so lanes are counted strictly.
"""
import hashlib
import io
import json
import logging
import os
import queue
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

LOG = logging.getLogger("ckpt")

DEFAULT_LANES = int(os.environ.get("CKPT_LANES", "8"))


class LaneTimeout(Exception):
    pass


class UploadError(Exception):
    def __init__(self, key, transient):
        super().__init__(key)
        self.transient = transient


class Lane:
    def __init__(self, number, root):
        self.number = number
        self.root = Path(root)
        self.buffer = io.BytesIO()
        self.broken = False

    def send(self, key, blob):
        if self.broken:
            raise UploadError(key, transient=True)
        if len(key) > 1024:
            raise UploadError(key, transient=False)
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(blob)

    def mend(self):
        self.buffer = io.BytesIO()
        self.broken = False


class LaneRack:
    """All lanes of the process.  ``board``/``alight`` are the two halves."""

    def __init__(self, root, lanes=DEFAULT_LANES):
        self._q = queue.LifoQueue()
        self._lock = threading.Lock()
        self.boarded = 0
        for i in range(lanes):
            self._q.put(Lane(i, root))

    def board(self, timeout=30.0):
        try:
            lane = self._q.get(timeout=timeout)  # clean: counted and returned
        except queue.Empty:
            raise LaneTimeout(f"no lane in {timeout:.1f}s") from None
        with self._lock:
            self.boarded += 1
        return lane

    def board_mended(self, timeout=30.0):
        lane = self.board(timeout)  # clean: mended if need be, then returned
        if lane.broken:
            lane.mend()
        return lane

    def board_quota(self, quota, timeout=30.0):
        """Like ``board``, but refuse when ``quota`` lanes are out already."""
        lane = self._q.get(timeout=timeout)  # leak: over quota it raises with the lane off the queue
        with self._lock:
            if self.boarded >= quota:
                raise LaneTimeout(f"quota of {quota} reached")
            self.boarded += 1
        return lane

    def alight(self, lane):
        lane.buffer.seek(0)
        lane.buffer.truncate()
        with self._lock:
            self.boarded -= 1
        self._q.put(lane)

    @contextmanager
    def lane(self, timeout=30.0):
        lane = self.board(timeout)  # clean: finally
        try:
            yield lane
        finally:
            self.alight(lane)

    @contextmanager
    def quiet_lane(self, timeout=30.0):
        """A lane for best-effort uploads; errors in the body are swallowed."""
        lane = self.board(timeout)  # leak: an UploadError in the body is handled and the lane kept from the rack
        try:
            yield lane
        except UploadError as err:
            LOG.info("best-effort upload failed: %s", err)
            return
        self.alight(lane)


class ShardSession:
    """Context manager over one lane for a sequence of tensors."""

    def __init__(self, rack, prefix, strict=True):
        self.rack = rack
        self.prefix = prefix
        self.strict = strict
        self.lane = None
        self.keys = []

    def __enter__(self):
        self.lane = self.rack.board_mended()  # clean: each way through __exit__ passes the finally
        return self

    def put(self, name, tensor):
        buf = self.lane.buffer
        buf.seek(0)
        buf.truncate()
        torch.save(tensor, buf)
        key = f"{self.prefix}/{name}.pt"
        self.lane.send(key, buf.getvalue())
        self.keys.append(key)

    def __exit__(self, exc_type, exc, tb):
        try:
            if exc_type is None:
                self._index()
                return False
            if not self.strict and exc_type is UploadError:
                return True
            return False
        finally:
            lane, self.lane = self.lane, None
            self.rack.alight(lane)

    def _index(self):
        self.lane.send(f"{self.prefix}/index.json", json.dumps(self.keys).encode())


class AppendSession:
    """Writes log records next to the shards; remembers what failed."""

    def __init__(self, rack, prefix):
        self.rack = rack
        self.prefix = prefix
        self.failed = []

    def __enter__(self):
        self.lane = self.rack.board()  # leak: __exit__ returns early for a transient UploadError
        return self

    def record(self, name, payload):
        self.lane.send(f"{self.prefix}/{name}", json.dumps(payload).encode())

    def __exit__(self, exc_type, exc, tb):
        if exc_type is not None and issubclass(exc_type, UploadError) and exc.transient:
            self.failed.append(str(exc))
            return True
        self.rack.alight(self.lane)
        return None


class CheckpointWriter:
    def __init__(self, rack, retries=4, backoff=0.5):
        self.rack = rack
        self.retries = retries
        self.backoff = backoff
        self._held = {}
        self._manifest_lane = None

    def upload(self, key, blob):
        for attempt in range(self.retries):
            lane = self.rack.board_mended()  # leak: a permanent error is raised again past the alight
            try:
                lane.send(key, blob)
            except UploadError as err:
                if not err.transient:
                    raise
                self.rack.alight(lane)
                time.sleep(self.backoff * 2**attempt)
            else:
                self.rack.alight(lane)
                return hashlib.sha256(blob).hexdigest()
        raise UploadError(key, transient=True)

    def upload_sticky(self, key, blob):
        """Keep the same lane over all retries."""
        lane = self.rack.board()  # clean: each return and the final raise lie inside the try
        try:
            for _ in range(self.retries):
                try:
                    lane.send(key, blob)
                    return True
                except UploadError as err:
                    if not err.transient:
                        return False
                    lane.mend()
            raise UploadError(key, transient=True)
        finally:
            self.rack.alight(lane)

    def mirror(self, key, blob, copies):
        """Write ``copies`` replicas in parallel lanes, all lanes boarded first."""
        with ExitStack() as stack:
            lanes = []
            for _ in range(copies):
                lane = self.rack.board(timeout=1.0)  # clean: registered with the stack at once
                stack.callback(self.rack.alight, lane)
                lanes.append(lane)
            for i, lane in enumerate(lanes):
                lane.send(f"replica-{i}/{key}", blob)

    def mirror_now(self, key, blob, copies):
        lanes = [self.rack.board(timeout=1.0) for _ in range(copies)]  # leak: a LaneTimeout in mid list drops the lanes boarded before
        try:
            for i, lane in enumerate(lanes):
                lane.send(f"replica-{i}/{key}", blob)
        finally:
            for lane in lanes:
                self.rack.alight(lane)

    # -- lanes that are reserved per rank ------------------------------------
    def reserve(self, rank):
        if rank not in self._held:
            self._held[rank] = self.rack.board()  # clean: only for a new rank; release_all gives it back
        return self._held[rank]

    def reassign(self, rank, to_rank):
        lane = self._held.pop(rank, None)
        if lane is None:
            return
        prev = self._held.get(to_rank)
        if prev is not None:
            self.rack.alight(prev)
        self._held[to_rank] = lane

    def open_manifest(self, step):
        self._manifest_lane = self.rack.board()  # leak: _begin raises for a bad step, and the next open overwrites the field
        self._begin(step)

    def _begin(self, step):
        if step < 0:
            raise ValueError(f"negative step {step}")
        self._manifest_lane.send(f"step-{step}/BEGIN", b"")

    def commit_manifest(self, step, digest):
        lane, self._manifest_lane = self._manifest_lane, None
        try:
            lane.send(f"step-{step}/MANIFEST", digest.encode())
        finally:
            self.rack.alight(lane)

    def release_all(self):
        while self._held:
            _, lane = self._held.popitem()
            self.rack.alight(lane)


def save_state(rack, prefix, state):
    with ShardSession(rack, prefix, strict=False) as session:  # clean: see __exit__
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            session.put(name, tensor)
