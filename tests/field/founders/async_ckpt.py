"""Asynchronous checkpointing: staged to host buffers, written by a background thread."""
from __future__ import annotations

import json
import os
import queue
import tempfile
import threading
from typing import Any, Callable, Dict, List, Optional


class HostStage:
    def __init__(self, n: int) -> None:
        self._sem = threading.BoundedSemaphore(n)
        self._spare: List[bytearray] = [bytearray() for _ in range(n)]
        self._mu = threading.Lock()

    def lease(self, timeout: Optional[float] = None) -> Optional[bytearray]:
        if not self._sem.acquire(timeout=timeout):  # clean: permit goes with the buffer, unlease releases it
            return None
        with self._mu:
            return self._spare.pop()

    def unlease(self, buf: bytearray) -> None:
        buf.clear()
        with self._mu:
            self._spare.append(buf)
        self._sem.release()


class SaveTask:
    def __init__(self, step: int, shards: Dict[str, bytearray], on_done: Optional[Callable[["SaveTask"], None]]) -> None:
        self.step = step
        self.shards = shards
        self.on_done = on_done
        self.error: Optional[BaseException] = None


class AsyncCheckpointer:
    def __init__(self, folder: str, stage: HostStage) -> None:
        self.folder = folder
        self.stage = stage
        self.q: "queue.Queue[Optional[SaveTask]]" = queue.Queue(maxsize=8)
        self._save_lock = threading.Lock()
        self._last: Optional[SaveTask] = None
        self._log = open(os.path.join(folder, "save.log"), "a")  # clean: held by the object, closed by shutdown
        self.worker = threading.Thread(target=self._run, daemon=True)
        self.worker.start()

    def _run(self) -> None:
        while True:
            task = self.q.get()
            if task is None:
                return
            try:
                self._write(task)
            except OSError as exc:
                task.error = exc
            finally:
                for buf in task.shards.values():
                    self.stage.unlease(buf)
                task.shards.clear()
                if task.on_done:
                    task.on_done(task)

    def _write(self, task: SaveTask) -> None:
        for name, buf in task.shards.items():
            with open(os.path.join(self.folder, f"{task.step}-{name}.bin"), "wb") as f:  # clean: with
                f.write(buf)

    def save(self, step: int, state: Dict[str, bytes]) -> None:
        shards: Dict[str, bytearray] = {}
        for name, data in state.items():
            buf = self.stage.lease()  # clean: moved into the task, the worker unleases it
            assert buf is not None
            buf.extend(data)
            shards[name] = buf
        self.q.put(SaveTask(step, shards, None))

    def save_nowait(self, step: int, state: Dict[str, bytes]) -> bool:
        shards: Dict[str, bytearray] = {}
        for name, data in state.items():
            buf = self.stage.lease(timeout=0.01)  # leak: a full queue answers False and drops the shards
            if buf is None:
                for b in shards.values():
                    self.stage.unlease(b)
                return False
            buf.extend(data)
            shards[name] = buf
        try:
            self.q.put_nowait(SaveTask(step, shards, None))
        except queue.Full:
            return False
        return True

    def save_or_skip(self, step: int, state: Dict[str, bytes]) -> bool:
        shards: Dict[str, bytearray] = {}
        queued = False
        try:
            for name, data in state.items():
                buf = self.stage.lease(timeout=0.01)  # clean: near miss, finally unleases what was not queued
                if buf is None:
                    return False
                shards[name] = buf
                buf.extend(data)
            self.q.put_nowait(SaveTask(step, shards, None))
            queued = True
        except queue.Full:
            pass
        finally:
            if not queued:
                for b in shards.values():
                    self.stage.unlease(b)
        return queued

    def save_exclusive(self, step: int, state: Dict[str, bytes]) -> bool:
        if not self._save_lock.acquire(blocking=False):  # clean: near miss, on_done releases the lock
            return False
        shards = {}
        for name, data in state.items():
            buf = self.stage.lease()  # clean: moved into the task
            assert buf is not None
            buf.extend(data)
            shards[name] = buf
        self.q.put(SaveTask(step, shards, lambda _t: self._save_lock.release()))
        return True

    def rotate(self, keep: int) -> List[str]:
        self._save_lock.acquire()  # leak: early return with few files keeps the lock
        names = sorted(n for n in os.listdir(self.folder) if n.endswith(".bin"))
        if len(names) <= keep:
            return []
        gone = names[:-keep]
        for n in gone:
            os.unlink(os.path.join(self.folder, n))
        self._save_lock.release()
        return gone

    def write_meta(self, step: int, meta: Dict[str, Any]) -> bool:
        f = open(os.path.join(self.folder, f"{step}.json"), "w")  # leak: unserialisable meta returns False before close
        try:
            json.dump(meta, f)
        except TypeError:
            return False
        f.close()
        return True

    def read_meta(self, step: int) -> Optional[Dict[str, Any]]:
        try:
            f = open(os.path.join(self.folder, f"{step}.json"))  # clean: near miss, a failed open has nothing to close
        except FileNotFoundError:
            return None
        with f:
            return json.load(f)

    def latest_step(self) -> int:
        best = -1
        for n in os.listdir(self.folder):
            if not n.endswith(".json"):
                continue
            f = open(os.path.join(self.folder, n))  # leak: continue on an empty file skips close
            head = f.read(1)
            if not head:
                continue
            f.close()
            best = max(best, int(n.split(".")[0]))
        return best

    def reopen_log(self, name: str) -> None:
        path = os.path.join(self.folder, name)
        old, self._log = self._log, open(path, "a")  # clean: near miss, the old log is closed next
        old.close()

    def note(self, text: str) -> None:
        self._log.write(text + "\n")

    def stage_preview(self, data: bytes, limit: int) -> bytes:
        buf = self.stage.lease()  # leak: the slice is a copy, the buffer goes out of scope on the short way
        if buf is None:
            return b""
        buf.extend(data)
        if len(buf) <= limit:
            return bytes(buf)
        out = bytes(buf[:limit])
        self.stage.unlease(buf)
        return out

    def shutdown(self) -> None:
        self.q.put(None)
        self.worker.join()
        self._log.close()


class SaveScope:
    """`with SaveScope(...)`: leases one buffer for the block."""

    def __init__(self, stage: HostStage, sink: Callable[[bytes], None]) -> None:
        self.stage = stage
        self.sink = sink
        self.buf: Optional[bytearray] = None

    def __enter__(self) -> bytearray:
        self.buf = self.stage.lease()  # leak: __exit__ returns early on an exception and suppresses it
        assert self.buf is not None
        return self.buf

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None and issubclass(exc_type, OSError):
            return True
        self.sink(bytes(self.buf))
        self.stage.unlease(self.buf)
        self.buf = None
        return False


class QuietScope:
    def __init__(self, stage: HostStage, sink: Callable[[bytes], None]) -> None:
        self.stage = stage
        self.sink = sink
        self.buf: Optional[bytearray] = None

    def __enter__(self) -> bytearray:
        self.buf = self.stage.lease()  # clean: near miss, __exit__ unleases before its early return
        assert self.buf is not None
        return self.buf

    def __exit__(self, exc_type, exc, tb) -> bool:
        data = bytes(self.buf)
        self.stage.unlease(self.buf)
        self.buf = None
        if exc_type is not None:
            return issubclass(exc_type, OSError)
        self.sink(data)
        return False


def main() -> None:
    with tempfile.TemporaryDirectory() as d:
        stage = HostStage(6)
        ck = AsyncCheckpointer(d, stage)
        ck.save(1, {"rank0": b"x" * 10})
        ck.save_or_skip(2, {"rank0": b"y"})
        ck.save_exclusive(3, {"rank0": b"z"})
        ck.write_meta(3, {"loss": 1.0})
        ck.read_meta(3)
        ck.latest_step()
        ck.stage_preview(b"abcdef", 3)
        ck.reopen_log("save2.log")
        ck.note("done")
        out: List[bytes] = []
        with QuietScope(stage, out.append) as b:  # clean: with
            b.extend(b"q")
        with SaveScope(stage, out.append) as b:  # clean: no exception in the block
            b.extend(b"s")
        ck.shutdown()
        assert out == [b"q", b"s"]


if __name__ == "__main__":
    main()
