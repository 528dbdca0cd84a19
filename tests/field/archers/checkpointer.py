"""Asynchronous checkpoints: state is copied to host buffers, written by a thread pool and uploaded in parts."""
from __future__ import annotations

import hashlib
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Iterator, Mapping

import torch

PART = 64 << 20


class CorruptShard(Exception):
    pass


class HostBuffer:
    def __init__(self, nbytes: int) -> None:
        self.data = torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self.length = 0

    def fill(self, state: Mapping[str, torch.Tensor]) -> None:
        offset = 0
        for name in sorted(state):
            raw = state[name].detach().contiguous().view(torch.uint8).reshape(-1)
            self.data[offset:offset + raw.numel()].copy_(raw, non_blocking=True)
            offset += raw.numel()
        self.length = offset

    def bytes(self) -> bytes:
        return self.data[: self.length].numpy().tobytes()


class HostBuffers:
    def __init__(self, count: int, nbytes: int) -> None:
        self._cond = threading.Condition()
        self._idle = [HostBuffer(nbytes) for _ in range(count)]

    def acquire(self) -> HostBuffer:
        with self._cond:
            while not self._idle:
                self._cond.wait()
            return self._idle.pop()  # clean: returned to the caller

    def release(self, buf: HostBuffer) -> None:
        buf.length = 0
        with self._cond:
            self._idle.append(buf)
            self._cond.notify()


class Upload:
    def __init__(self, backend: Any, key: str, uid: str) -> None:
        self.backend, self.key, self.uid = backend, key, uid
        self.parts: list[str] = []

    def put(self, data: bytes) -> bool:
        etag = self.backend.put_part(self.key, self.uid, len(self.parts) + 1, data)
        if etag is None:
            return False
        self.parts.append(etag)
        return True

    def complete(self) -> None:
        self.backend.complete(self.key, self.uid, self.parts)

    def abort(self) -> None:
        self.backend.abort(self.key, self.uid)


class Store:
    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def begin(self, key: str) -> Upload:
        uid = self.backend.create_multipart(key)  # clean: returned to the caller as an upload
        return Upload(self.backend, key, uid)

    def get(self, key: str) -> bytes | None:
        return self.backend.get(key)


class Retention:
    def __init__(self, keep: int) -> None:
        self.keep = keep
        self._holds: Counter[int] = Counter()
        self._steps: list[int] = []
        self._lock = threading.Lock()

    def add(self, step: int) -> None:
        with self._lock:
            self._steps.append(step)

    def hold(self, step: int) -> int:
        with self._lock:
            self._holds[step] += 1
        return step

    def unhold(self, step: int) -> None:
        with self._lock:
            self._holds[step] -= 1

    @contextmanager
    def holding(self, step: int) -> Iterator[int]:
        held = self.hold(step)  # clean: the finally undoes it
        try:
            yield held
        finally:
            self.unhold(held)

    def collect(self) -> list[int]:
        with self._lock:
            old = [s for s in self._steps[: -self.keep] if self._holds[s] <= 0]
            self._steps = [s for s in self._steps if s not in old]
        return old


class Checkpointer:
    def __init__(self, store: Store, buffers: HostBuffers, retention: Retention, writers: int = 2) -> None:
        self.store = store
        self.buffers = buffers
        self.retention = retention
        self._pool = ThreadPoolExecutor(writers, thread_name_prefix="ckpt")
        self._bandwidth = threading.BoundedSemaphore(writers)
        self._base: HostBuffer | None = None
        self._stopping = False

    def save(self, step: int, state: Mapping[str, torch.Tensor]) -> Future[bool] | None:
        buf = self.buffers.acquire()  # leak: a pool that is shut down refuses the job and the buffer has no callback yet
        buf.fill(state)
        try:
            future = self._pool.submit(self._write, step, buf)
        except RuntimeError:
            return None
        future.add_done_callback(lambda _f: self.buffers.release(buf))
        return future

    def save_now(self, step: int, state: Mapping[str, torch.Tensor]) -> bool:
        buf = self.buffers.acquire()  # clean: the finally releases it on both ways out
        try:
            buf.fill(state)
            if buf.length == 0:
                return False
            return self._write(step, buf)
        finally:
            self.buffers.release(buf)

    def save_delta(self, step: int, state: Mapping[str, torch.Tensor]) -> int:
        """Writes what differs from the state before; the newest state becomes the base."""
        buf = self.buffers.acquire()  # clean: near miss, becomes the base; the base that it replaces is released, close() releases the last
        buf.fill(state)
        old, self._base = self._base, buf
        if old is None:
            return buf.length
        changed = int((old.data[: buf.length] != buf.data[: buf.length]).sum())
        self.buffers.release(old)
        return changed

    def _write(self, step: int, buf: HostBuffer) -> bool:
        self._bandwidth.acquire()  # leak: a checkpointer that is stopping returns with the permit
        if self._stopping:
            return False
        try:
            ok = self._upload(f"step-{step}/state", buf.bytes())
            if ok:
                ok = self._manifest(step, buf)
        finally:
            self._bandwidth.release()
        if ok:
            self.retention.add(step)
        return ok

    def _upload(self, key: str, data: bytes, tries: int = 3) -> bool:
        upload = self.store.begin(key)  # leak: when the tries of a part are used up the upload is neither completed nor aborted
        for start in range(0, len(data), PART):
            for _ in range(tries):
                if upload.put(data[start:start + PART]):
                    break
            else:
                return False
        upload.complete()
        return True

    def _manifest(self, step: int, buf: HostBuffer) -> bool:
        upload = self.store.begin(f"step-{step}/manifest")  # clean: near miss, aborted by the finally unless the flag says completed
        completed = False
        try:
            digest = hashlib.sha256(buf.bytes()).hexdigest()
            if not upload.put(digest.encode()):
                return False
            upload.complete()
            completed = True
            return True
        finally:
            if not completed:
                upload.abort()

    def _verify(self, step: int, buf: HostBuffer, want: bytes) -> None:
        if hashlib.sha256(buf.bytes()).hexdigest().encode() != want:
            raise CorruptShard(f"digest of step {step} differs")

    def restore(self, step: int, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
        with self.retention.holding(step):  # clean: the context manager undoes the hold
            data = self.store.get(f"step-{step}/state")
            want = self.store.get(f"step-{step}/manifest")
            if data is None or want is None:
                raise CorruptShard(f"step {step} is incomplete")
            buf = self.buffers.acquire()  # leak: a digest that differs raises with the buffer held
            buf.data[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            buf.length = len(data)
            self._verify(step, buf, want)
            out: dict[str, torch.Tensor] = {}
            offset = 0
            for name in sorted(shapes):
                size = shapes[name].numel()
                out[name] = buf.data[offset:offset + size].clone().view(shapes[name])
                offset += size
            self.buffers.release(buf)
            return out

    def close(self) -> None:
        self._stopping = True
        self._pool.shutdown(wait=True)
        if self._base is not None:
            self.buffers.release(self._base)
            self._base = None


class Evaluator:
    def __init__(self, ckpt: Checkpointer, pool: ThreadPoolExecutor) -> None:
        self.ckpt = ckpt
        self.pool = pool
        self.scores: dict[int, float] = {}

    def schedule(self, step: int, run: Any) -> bool:
        held = self.ckpt.retention.hold(step)  # leak: a step that was scored before is answered with its new hold kept
        if step in self.scores:
            return False
        future = self.pool.submit(run, step)
        future.add_done_callback(lambda f: self._finish(held, f))
        return True

    def compare(self, steps: list[int], run: Any) -> int | None:
        held = [self.ckpt.retention.hold(s) for s in steps]  # clean: the finally undoes all of them
        try:
            scored = [(run(s), s) for s in held]
            return max(scored)[1] if scored else None
        finally:
            for s in held:
                self.ckpt.retention.unhold(s)

    def _finish(self, step: int, future: Future[float]) -> None:
        self.ckpt.retention.unhold(step)
        if future.exception() is None:
            self.scores[step] = future.result()
