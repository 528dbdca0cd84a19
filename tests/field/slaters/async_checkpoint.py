"""Asynchronous checkpointing: stage to host, write from a background thread."""
from __future__ import annotations

import json
import logging
import os
import queue
import tempfile
import threading
from dataclasses import dataclass, field
from typing import Dict, List, Optional

log = logging.getLogger("ckpt.async")


class StageBuffer:
    def __init__(self, size: int) -> None:
        self.mem = bytearray(size)
        self.used = 0

    def fill(self, payload: bytes) -> None:
        self.used = len(payload)
        self.mem[:self.used] = payload


class StagingArena:
    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self._cond = threading.Condition()
        self._free: List[StageBuffer] = [StageBuffer(size) for _ in range(count)]
        self.total = count

    def checkout(self, timeout: Optional[float] = None) -> Optional[StageBuffer]:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._free), timeout):
                return None
            return self._free.pop()

    def checkin(self, buf: StageBuffer) -> None:
        with self._cond:
            buf.used = 0
            self._free.append(buf)
            self._cond.notify()

    def available(self) -> int:
        with self._cond:
            return len(self._free)


@dataclass
class ShardWrite:
    path: str
    buffer: StageBuffer
    step: int


@dataclass
class SaveRequest:
    step: int
    directory: str
    state: Dict[str, bytes]
    shards: List[ShardWrite] = field(default_factory=list)


class AsyncCheckpointer:
    def __init__(self, arena: StagingArena, keep_every: int = 1) -> None:
        self.arena = arena
        self.keep_every = keep_every
        self._queue: "queue.Queue[Optional[ShardWrite]]" = queue.Queue()
        self._save_lock = threading.Lock()
        self._index_lock = threading.Lock()
        self._written: Dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # -- trainer side ------------------------------------------------------

    def stage(self, req: SaveRequest) -> int:
        """Copies the state to host buffers; returns the number of shards staged."""
        for name, payload in req.state.items():
            buf = self.arena.checkout(timeout=1.0)  # clean: moved into the request, queued by commit or returned by abort
            if buf is None:
                self.abort(req)
                return 0
            buf.fill(payload)
            req.shards.append(ShardWrite(os.path.join(req.directory, f"{name}.bin"), buf, req.step))
        return len(req.shards)

    def commit(self, req: SaveRequest) -> None:
        for shard in req.shards:
            self._queue.put(shard)
        req.shards = []

    def abort(self, req: SaveRequest) -> None:
        while req.shards:
            self.arena.checkin(req.shards.pop().buffer)

    def save(self, step: int, directory: str, state: Dict[str, bytes]) -> bool:
        if not self._save_lock.acquire(blocking=False):  # clean: near miss, released on both ways after it
            log.warning("step %d: previous save still staging", step)
            return False
        req = SaveRequest(step, directory, state)
        staged = self.stage(req)  # clean: committed below, aborted inside when incomplete
        if staged < len(state):
            self._save_lock.release()
            return False
        self.commit(req)
        self._save_lock.release()
        return True

    def save_if_due(self, step: int, directory: str, state: Dict[str, bytes]) -> bool:
        self._save_lock.acquire()  # leak: steps that are not due return with the lock held
        if step % self.keep_every:
            return False
        req = SaveRequest(step, directory, state)
        ok = self.stage(req) == len(state)  # clean: committed below, aborted inside when incomplete
        if ok:
            self.commit(req)
        self._save_lock.release()
        return ok

    def save_metadata(self, directory: str, meta: Dict[str, object]) -> bool:
        payload = json.dumps(meta).encode()
        buf = self.arena.checkout(timeout=0.5)  # leak: metadata larger than a buffer goes inline and drops it
        if buf is None:
            return False
        if len(payload) > self.arena.size:
            with open(os.path.join(directory, "meta.json"), "wb") as f:  # clean: with
                f.write(payload)
            return True
        buf.fill(payload)
        self._queue.put(ShardWrite(os.path.join(directory, "meta.json"), buf, -1))
        return True

    def wait(self) -> None:
        self._queue.join()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    # -- writer thread -----------------------------------------------------

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                self._queue.task_done()
                return
            try:
                self._write(item)
            except OSError:
                log.exception("write of %s failed", item.path)
            finally:
                self.arena.checkin(item.buffer)
                self._queue.task_done()

    def _write(self, item: ShardWrite) -> None:
        tmp = item.path + ".tmp"
        out = open(tmp, "wb")  # leak: OSError from write or fsync is survived by the thread, close is skipped
        out.write(memoryview(item.buffer.mem)[:item.buffer.used])
        out.flush()
        os.fsync(out.fileno())
        out.close()
        os.replace(tmp, item.path)
        self._index_lock.acquire()  # clean: released in finally
        try:
            self._written[item.path] = item.step
        finally:
            self._index_lock.release()

    def last_step(self, path: str) -> Optional[int]:
        self._index_lock.acquire()  # leak: returns early for an unknown path
        step = self._written.get(path)
        if step is None:
            return None
        self._index_lock.release()
        return step


def read_manifest(path: str) -> Dict[str, int]:
    f = open(path)  # clean: near miss, closed on the bad-JSON way as well
    try:
        return json.load(f)
    except ValueError:
        log.warning("manifest %s is not readable", path)
        return {}
    finally:
        f.close()


def latest_step(directory: str) -> int:
    best = -1
    for name in sorted(os.listdir(directory)):
        if not name.endswith(".step"):
            continue
        f = open(os.path.join(directory, name))  # leak: empty marker files continue before close
        text = f.read().strip()
        if not text:
            continue
        best = max(best, int(text))
        f.close()
    return best


def main() -> None:
    arena = StagingArena(64, 4)
    with tempfile.TemporaryDirectory() as d:
        ck = AsyncCheckpointer(arena)
        ck.save(1, d, {"w": b"abc", "b": b"de"})
        ck.save_metadata(d, {"step": 1})
        ck.wait()
        ck.save_if_due(2, d, {"w": b"xyz"})
        ck.close()
        print(read_manifest(os.path.join(d, "meta.json")), latest_step(d), ck.last_step(os.path.join(d, "w.bin")), arena.available())


if __name__ == "__main__":
    main()
