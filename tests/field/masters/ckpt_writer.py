"""Asynchronous checkpoint writer.

Shards are serialised into a few fixed write slots and written by a small pool of threads,
while training goes on. A step directory is locked by a lease file as long as somebody
writes, verifies or deletes it.
"""
from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import queue
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

LOG = logging.getLogger("ckpt")
INLINE = 64 << 10


class CorruptShard(Exception):
    def __init__(self, path: Path):
        super().__init__(f"{path} does not match the manifest")
        self.path = path


class WriteSlot:
    __slots__ = ("data", "used")

    def __init__(self, size: int):
        self.data = mmap.mmap(-1, size)
        self.used = 0

    def pack(self, t: torch.Tensor) -> None:
        raw = t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        self.data[:len(raw)] = raw
        self.used = len(raw)


class SlotRing:
    def __init__(self, n: int, size: int):
        self.size = size
        self._q: queue.Queue[WriteSlot] = queue.Queue()
        for _ in range(n):
            self._q.put(WriteSlot(size))

    def acquire(self) -> WriteSlot:
        return self._q.get()  # clean: returned

    def try_acquire(self) -> WriteSlot | None:
        try:
            return self._q.get_nowait()  # clean: returned
        except queue.Empty:
            return None

    def release(self, slot: WriteSlot) -> None:
        slot.used = 0
        self._q.put(slot)


class DirLease:
    """O_EXCL file in the directory; gone when released."""

    def __init__(self, path: Path, fd: int):
        self.path, self.fd = path, fd

    def release(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            (self.path / ".lease").unlink(missing_ok=True)


def lease_dir(path: Path) -> DirLease | None:
    path.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(path / ".lease", os.O_CREAT | os.O_EXCL | os.O_WRONLY)  # clean: the lease closes it
    except FileExistsError:
        return None
    os.write(fd, str(os.getpid()).encode())
    return DirLease(path, fd)


@contextmanager
def leased(path: Path):
    lease = lease_dir(path)  # clean: released in the finally
    try:
        yield lease is not None
    finally:
        if lease is not None:
            lease.release()


class Writer:
    def __init__(self, root: Path, ring: SlotRing, threads: int = 4):
        self.root, self.ring = root, ring
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="ckpt")
        self.manifest: dict[str, str] = {}
        self.bytes = 0

    def _write(self, slot: WriteSlot, path: Path) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        view = memoryview(slot.data)[:slot.used]
        with open(path, "wb") as f:  # clean: closed by the with
            f.write(view)
            os.fsync(f.fileno())
        self.bytes += slot.used
        return hashlib.sha256(view).hexdigest()

    def submit(self, name: str, t: torch.Tensor, step: int) -> Future:
        slot = self.ring.acquire()  # clean: near miss, the callback releases it however the write ends
        try:
            slot.pack(t)
            fut = self.pool.submit(self._write, slot, self.step_dir(step) / name)
        except Exception:
            self.ring.release(slot)
            raise

        def _done(f: Future, slot=slot, name=name):
            self.ring.release(slot)
            if f.exception() is None:
                self.manifest[name] = f.result()

        fut.add_done_callback(_done)
        return fut

    def submit_scalar(self, name: str, t: torch.Tensor, step: int) -> Future | None:
        """Small tensors go into the manifest itself if they can."""
        slot = self.ring.acquire()  # leak: the inline branch returns without a release
        slot.pack(t)
        if slot.used <= INLINE:
            self.manifest[name] = "hex:" + slot.data[:slot.used].hex()
            return None
        fut = self.pool.submit(self._write, slot, self.step_dir(step) / name)
        fut.add_done_callback(lambda _: self.ring.release(slot))
        return fut

    def submit_optimizer(self, state: dict, step: int) -> list[Future]:
        futs = []
        for name, t in state.items():
            slot = self.ring.try_acquire()  # leak: when the executor is shut down the slot stays with nobody
            if slot is None:
                LOG.debug("no slot for %s, written in line", name)
                torch.save(t, self.step_dir(step) / f"{name}.pt")
                continue
            slot.pack(t)
            try:
                fut = self.pool.submit(self._write, slot, self.step_dir(step) / name)
            except RuntimeError:
                LOG.warning("writer is closing, optimizer state cut off at %s", name)
                break
            fut.add_done_callback(lambda _, s=slot: self.ring.release(s))
            futs.append(fut)
        return futs

    def step_dir(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def commit(self, step: int, futs: list[Future]) -> bool:
        """Wait for the shards, check them, write the manifest."""
        d = self.step_dir(step)
        lease = lease_dir(d)  # leak: a shard that fails its check raises CorruptShard with the directory leased
        if lease is None:
            LOG.warning("%s is leased by another process", d)
            return False
        for f in futs:
            f.result()
        for name, digest in self.manifest.items():
            if digest.startswith("hex:"):
                continue
            if hashlib.sha256((d / name).read_bytes()).hexdigest() != digest:
                raise CorruptShard(d / name)
        (d / "manifest.json").write_text(json.dumps(self.manifest))
        lease.release()
        return True

    def save(self, step: int, tensors: dict[str, torch.Tensor]) -> bool:
        futs = [self.submit(n, t, step) for n, t in tensors.items()]
        try:
            return self.commit(step, futs)
        except CorruptShard as e:
            LOG.error("step %d not committed: %s", step, e)
            return False
        finally:
            self.manifest = {}

    def prune(self, keep: int, protected: set[int]) -> int:
        gone = 0
        for d in sorted(self.root.glob("step-*"))[:-keep]:
            lease = lease_dir(d)  # leak: a protected step is skipped after it was leased
            if lease is None:
                continue
            if int(d.name[5:]) in protected:
                LOG.debug("%s is protected", d.name)
                continue
            lease.release()
            shutil.rmtree(d)
            gone += 1
        return gone

    def close(self) -> None:
        self.pool.shutdown(wait=True)


class Reader:
    """Open shard files by name, kept until close()."""

    def __init__(self, d: Path):
        self.d, self.files = d, {}
        with leased(d) as mine:  # clean: the context manager releases
            self.manifest = json.loads((d / "manifest.json").read_text()) if mine else {}

    def _file(self, name: str):
        f = self.files.get(name)
        if f is None:
            f = self.files[name] = open(self.d / name, "rb")  # leak: reopen() puts another handle into the table without closing this one
        return f

    def reopen(self, name: str) -> None:
        """The file was replaced below us (object store mounts do that)."""
        if not (self.d / name).exists():
            return
        self.files[name] = open(self.d / name, "rb")  # leak: called a second time, it does the same to its own handle

    def read(self, name: str, off: int, n: int) -> bytes:
        f = self._file(name)
        f.seek(off)
        return f.read(n)

    def chunks(self, name: str, size: int = 1 << 20):
        m = mmap.mmap(self._file(name).fileno(), 0, access=mmap.ACCESS_READ)  # clean: near miss, closed when the generator ends or is closed
        try:
            for off in range(0, len(m), size):
                yield m[off:off + size]
        finally:
            m.close()

    def close(self) -> None:
        for f in self.files.values():
            f.close()
        self.files.clear()
