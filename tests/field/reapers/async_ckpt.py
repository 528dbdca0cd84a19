"""Asynchronous checkpoint writer: tensors go to a fixed set of host slabs, upload threads drain them."""
import json
import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

class CheckpointError(RuntimeError): ...
class TensorTooLarge(CheckpointError): ...
class NoSlab(CheckpointError): ...
class StoreError(IOError): ...


@dataclass
class Slab:
    index: int
    data: np.ndarray
    used: int = 0


class SlabPool:
    def __init__(self, count, slab_bytes):
        self.slab_bytes = slab_bytes
        self._q = queue.LifoQueue()
        for i in range(count):
            self._q.put(Slab(i, np.empty(slab_bytes, dtype=np.uint8)))

    def get(self, timeout=30.0):
        try:
            return self._q.get(timeout=timeout)  # clean: returned to the caller
        except queue.Empty:
            raise NoSlab(f"no slab within {timeout}s") from None

    def put(self, slab):
        slab.used = 0
        self._q.put(slab)


class PermitGate:
    def __init__(self, n):
        self._cv = threading.Condition()
        self._left = n

    def enter(self, timeout):
        with self._cv:
            if not self._cv.wait_for(lambda: self._left > 0, timeout):
                return False
            self._left -= 1
            return True

    def leave(self):
        with self._cv:
            self._left += 1
            self._cv.notify()


@dataclass
class WriteJob:
    key: str
    slab: Slab
    done: Future = field(default_factory=Future)


class Uploader:
    def __init__(self, pool, store):
        self.pool, self.store = pool, store
        self._jobs = queue.Queue()
        self._open = True
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def submit(self, job):
        with self._lock:
            if self._open:
                self._jobs.put(job)
                return True
        job.done.set_exception(CheckpointError("uploader is closed"))
        return False

    def _main(self):
        while True:
            job = self._jobs.get()
            if job is None:
                break
            try:
                self.store.put(job.key, job.slab.data[: job.slab.used].tobytes())
                job.done.set_result(job.slab.used)
            except StoreError as exc:
                job.done.set_exception(exc)
            finally:
                self.pool.put(job.slab)

    def close(self):
        with self._lock:
            self._open = False
            self._jobs.put(None)
        self._thread.join()


def stage(pool, tensor):
    raw = np.ascontiguousarray(tensor).view(np.uint8).reshape(-1)
    slab = pool.get()  # leak: the size check comes after the slab was taken
    if raw.size > slab.data.size:
        raise TensorTooLarge(f"{raw.size} bytes in a slab of {slab.data.size}")
    slab.data[: raw.size] = raw
    slab.used = raw.size
    return slab


def canonical(name):
    return name.removeprefix("module.").removeprefix("_orig_mod.")


class Session:
    def __init__(self, step, pool, gate, executor, store):
        self.step, self.pool, self.gate = step, pool, gate
        self.executor, self.store = executor, store
        self._parts = {}
        self._futures = []
        self._direct = []

    def add(self, name, tensor):
        try:
            self._parts[canonical(name)] = stage(self.pool, tensor)  # leak: two names with one canonical form overwrite each other's slab
        except TensorTooLarge:
            self._direct.append((canonical(name), tensor))

    def add_scalar_table(self, table):
        blob = np.frombuffer(json.dumps(table).encode(), dtype=np.uint8)
        slab = self.pool.get()  # clean: near miss, put under a key of its own and uploaded by flush()
        n = min(blob.size, slab.data.size)
        slab.data[:n] = blob[:n]
        slab.used = n
        self._parts[f"__scalars_{len(self._parts)}"] = slab

    def _upload(self, key, slab):
        self.store.put(f"{self.step}/{key}", slab.data[: slab.used].tobytes())

    def flush(self):
        while self._parts:
            key, slab = self._parts.popitem()
            fut = self.executor.submit(self._upload, key, slab)
            fut.add_done_callback(lambda _f, s=slab: self.pool.put(s))
            self._futures.append(fut)

    def commit(self):
        try:
            self.flush()
            for key, tensor in self._direct:
                self.store.put(f"{self.step}/{key}", tensor.tobytes())
            for fut in self._futures:
                fut.result()
            self.store.put(f"{self.step}/COMMIT", b"ok")
        finally:
            self.gate.leave()

    def abandon(self):
        for slab in self._parts.values():
            self.pool.put(slab)
        self._parts.clear()
        self.gate.leave()


class Checkpointer:
    def __init__(self, store, slabs=16, slab_bytes=64 << 20, max_sessions=2):
        self.store = store
        self.pool = SlabPool(slabs, slab_bytes)
        self.gate = PermitGate(max_sessions)
        self.executor = ThreadPoolExecutor(4)
        self.uploader = Uploader(self.pool, store)
        self._last = -1

    def begin(self, step):
        if not self.gate.enter(timeout=60):  # leak: a step that was saved before returns with the permit taken
            raise CheckpointError("older checkpoints are still being written")
        if step <= self._last:
            return None
        self._last = step
        return Session(step, self.pool, self.gate, self.executor, self.store)

    def save(self, step, state):
        session = self.begin(step)  # clean: committed or abandoned on every path, and both leave the gate
        if session is None:
            return False
        try:
            for name, tensor in state.items():
                session.add(name, tensor)
            session.add_scalar_table({"step": step, "time": time.time()})
        except NoSlab:
            session.abandon()
            return False
        session.commit()
        return True

    def save_rng(self, step, words):
        slab = self.pool.get()  # leak: submit() refuses the job once the uploader is closed, and the slab stays with the job
        slab.used = words.nbytes
        slab.data[: slab.used] = words.view(np.uint8)
        job = WriteJob(f"{step}/rng", slab)
        self.uploader.submit(job)
        return job.done

    def save_loader_state(self, step, payload, attempts=3):
        for attempt in range(attempts):
            slab = self.pool.get(timeout=5)  # leak: an attempt that fails sleeps and takes another slab
            slab.data[: len(payload)] = np.frombuffer(payload, dtype=np.uint8)
            slab.used = len(payload)
            try:
                self.store.put(f"{step}/loader", slab.data[: slab.used].tobytes())
            except StoreError:
                time.sleep(2 ** attempt)
                continue
            self.pool.put(slab)
            return True
        return False

    def verify(self, keys):
        bad = []
        for key in keys:
            slab = self.pool.get()  # clean: put in finally, also on continue
            try:
                blob = self.store.get(key)
                if len(blob) > slab.data.size:
                    continue
                slab.data[: len(blob)] = np.frombuffer(blob, dtype=np.uint8)
                if not slab.data[: len(blob)].any():
                    bad.append(key)
            except StoreError:
                bad.append(key)
            finally:
                self.pool.put(slab)
        return bad

    def export_index(self, step, names):
        if not self.gate.enter(timeout=5):  # clean: near miss, only a granted permit gets past the return, and finally leaves
            return None
        try:
            slab = self.pool.get(timeout=1)  # clean: goes to the uploader, or back here when it refuses
            text = "\n".join(names).encode()[: slab.data.size]
            slab.data[: len(text)] = np.frombuffer(text, dtype=np.uint8)
            slab.used = len(text)
            job = WriteJob(f"{step}/index", slab)
            if not self.uploader.submit(job):
                self.pool.put(slab)
                return None
            return job.done
        except NoSlab:
            return None
        finally:
            self.gate.leave()

    def close(self):
        self.executor.shutdown(wait=True)
        self.uploader.close()
