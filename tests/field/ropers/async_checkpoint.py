"""Asynchronous checkpointing: state is staged into host slots and written by a thread."""
from __future__ import annotations

import json
import os
import queue
import tempfile
import threading
from dataclasses import dataclass
from typing import Dict, List, Optional


class StagingSlot:
    def __init__(self, idx: int) -> None:
        self.idx = idx
        self.view = b""


class StagingPool:
    def __init__(self, n: int) -> None:
        self._sem = threading.Semaphore(n)
        self._mu = threading.Lock()
        self._slots = [StagingSlot(i) for i in range(n)]

    def lease(self, timeout: Optional[float] = None) -> Optional[StagingSlot]:
        if not self._sem.acquire(timeout=timeout):  # clean: the permit goes with the slot, unlease releases it
            return None
        with self._mu:
            return self._slots.pop()

    def unlease(self, slot: StagingSlot) -> None:
        slot.view = b""
        with self._mu:
            self._slots.append(slot)
        self._sem.release()

    def idle(self) -> int:
        return len(self._slots)


@dataclass
class WriteJob:
    path: str
    slot: StagingSlot
    fsync: bool = False


class CheckpointWriter(threading.Thread):
    def __init__(self, pool: StagingPool) -> None:
        super().__init__(daemon=True)
        self.pool = pool
        self.jobs: "queue.Queue[Optional[WriteJob]]" = queue.Queue()
        self.failed: List[str] = []

    def run(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                return
            try:
                self._write(job)
            except OSError:
                self.failed.append(job.path)
            finally:
                self.pool.unlease(job.slot)

    def _write(self, job: WriteJob) -> None:
        fh = open(job.path + ".tmp", "wb")  # clean: closed in finally
        try:
            fh.write(job.slot.view)
            if job.fsync:
                os.fsync(fh.fileno())
        finally:
            fh.close()
        os.replace(job.path + ".tmp", job.path)


class AsyncCheckpointer:
    def __init__(self, root: str, pool: StagingPool, writer: CheckpointWriter) -> None:
        self.root = root
        self.pool = pool
        self.writer = writer
        self._index_fh = None
        self._latest: Optional[StagingSlot] = None

    def save(self, name: str, state: Dict[str, int], timeout: float = 1.0) -> bool:
        slot = self.pool.lease(timeout)  # clean: moved into the job, the writer thread gives it back
        if slot is None:
            return False
        slot.view = json.dumps(state).encode()
        self.writer.jobs.put(WriteJob(os.path.join(self.root, name), slot))
        return True

    def save_if_changed(self, name: str, state: Dict[str, int], digest: int) -> bool:
        slot = self.pool.lease(1.0)  # leak: an unchanged state returns without giving the slot back
        if slot is None:
            return False
        slot.view = json.dumps(state).encode()
        if hash(slot.view) == digest:
            return False
        self.writer.jobs.put(WriteJob(os.path.join(self.root, name), slot))
        return True

    def save_sharded(self, shards: Dict[str, Dict[str, int]]) -> int:
        written = 0
        for name, state in shards.items():
            slot = self.pool.lease(1.0)  # leak: empty shards continue without unlease
            if slot is None:
                break
            slot.view = json.dumps(state).encode()
            if not state:
                continue
            self.writer.jobs.put(WriteJob(os.path.join(self.root, name), slot))
            written += 1
        return written

    def save_with_retry(self, name: str, state: Dict[str, int], tries: int = 3) -> bool:
        for attempt in range(tries):
            slot = self.pool.lease(0.1 * (attempt + 1))  # leak: a failed encoding retries with a new slot
            if slot is None:
                continue
            try:
                slot.view = json.dumps(state).encode()
            except TypeError:
                state = {k: int(v) for k, v in state.items()}
                continue
            self.writer.jobs.put(WriteJob(os.path.join(self.root, name), slot))
            return True
        return False

    def save_blocking(self, name: str, state: Dict[str, int], tries: int = 3) -> bool:
        slot = None
        while slot is None and tries > 0:
            slot = self.pool.lease(0.1)  # clean: near miss, rebinding only while nothing was got
            tries -= 1
        if slot is None:
            return False
        try:
            slot.view = json.dumps(state).encode()
            self.writer._write(WriteJob(os.path.join(self.root, name), slot, True))
            return True
        except OSError:
            return False
        finally:
            self.pool.unlease(slot)

    def hold_latest(self, state: Dict[str, int]) -> None:
        slot = self.pool.lease()  # clean: near miss, the slot held before is given back before it is replaced
        if self._latest is not None:
            self.pool.unlease(self._latest)
        slot.view = json.dumps(state).encode()
        self._latest = slot

    def open_index(self) -> None:
        self._index_fh = open(os.path.join(self.root, "index"), "a")  # leak: reopened each epoch, the handle before is overwritten unclosed

    def log_index(self, line: str) -> None:
        if self._index_fh is not None:
            self._index_fh.write(line + "\n")

    def close(self) -> None:
        if self._index_fh is not None:
            self._index_fh.close()
            self._index_fh = None
        if self._latest is not None:
            self.pool.unlease(self._latest)
            self._latest = None


def run_epochs(ckpt: AsyncCheckpointer, epochs: int) -> None:
    for epoch in range(epochs):
        ckpt.open_index()
        ckpt.log_index(f"epoch {epoch}")
        ckpt.save(f"epoch{epoch}", {"epoch": epoch})
    ckpt.close()


def latest_step(root: str) -> Optional[int]:
    path = os.path.join(root, "latest")
    if not os.path.exists(path):
        return None
    fh = open(path)  # leak: returns on an empty file before close
    text = fh.read().strip()
    if not text:
        return None
    fh.close()
    return int(text)


def write_latest(root: str, step: int) -> None:
    fh = open(os.path.join(root, "latest"), "w")  # clean: closed on the only ordinary way
    fh.write(str(step))
    fh.close()


def checksum(paths: List[str]) -> int:
    total = 0
    for p in paths:
        with open(p, "rb") as fh:  # clean: with
            head = fh.read(4)
            if len(head) < 4:
                continue
            total += sum(head)
    return total


def load_state(path: str, strict: bool) -> Dict[str, int]:
    try:
        fh = open(path, "rb")  # clean: near miss, the except ends before the handle exists and the finally closes it
    except FileNotFoundError:
        if strict:
            raise
        return {}
    try:
        return json.loads(fh.read() or b"{}")
    finally:
        fh.close()


def try_load(path: str) -> Optional[Dict[str, int]]:
    fh = None
    try:
        fh = open(path, "rb")  # leak: bad json is survived, the handle stays open
        data = json.loads(fh.read())
        fh.close()
        return data
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        sp = StagingPool(2)
        w = CheckpointWriter(sp)
        w.start()
        c = AsyncCheckpointer(tmp, sp, w)
        c.save("a", {"x": 1})
        c.save_blocking("b", {"y": 2})
        c.hold_latest({"x": 1})
        c.close()
        w.jobs.put(None)
        w.join()
        write_latest(tmp, 3)
        assert latest_step(tmp) == 3 and sp.idle() == 2
        load_state(os.path.join(tmp, "a"), True)
        checksum([os.path.join(tmp, "a")])
