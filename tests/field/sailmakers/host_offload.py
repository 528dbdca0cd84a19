"""KV offload to host memory and local NVMe: a write-behind thread, read-ahead futures, slab files."""
import logging
import mmap
import os
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional

import torch

log = logging.getLogger(__name__)


class HostSlabs:
    """Slabs of one pinned tensor. rent(None) blocks; rent(t) gives up after t seconds."""

    def __init__(self, count: int, slab_bytes: int):
        self.mem = torch.empty(count, slab_bytes, dtype=torch.uint8, pin_memory=True)
        self._q: "queue.LifoQueue[int]" = queue.LifoQueue()
        for i in range(count):
            self._q.put(i)

    def rent(self, timeout: Optional[float] = None) -> Optional[int]:
        try:
            return self._q.get(timeout=timeout)  # clean: returned to the caller
        except queue.Empty:
            return None

    def repay(self, i: int) -> None:
        self._q.put(i)


class SlabFile:
    """Record numbers in one preallocated file."""

    def __init__(self, path: str, records: int, record_bytes: int):
        self.record_bytes = record_bytes
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)  # clean: kept in self.fd, closed by close()
        os.ftruncate(self.fd, records * record_bytes)
        self.map = mmap.mmap(self.fd, records * record_bytes)  # clean: kept in self.map, closed by close()
        self._next = 0
        self._total = records
        self._returned: List[int] = []

    def record(self) -> int:
        if self._returned:
            return self._returned.pop()  # clean: returned to the caller
        if self._next == self._total:
            return -1
        self._next += 1
        return self._next - 1

    def unrecord(self, r: int) -> None:
        self._returned.append(r)

    def write(self, r: int, data: torch.Tensor) -> bool:
        off = r * self.record_bytes
        raw = data.numpy().tobytes()
        if len(raw) > self.record_bytes:
            return False
        self.map[off:off + len(raw)] = raw
        return True

    def read(self, r: int, out: torch.Tensor) -> None:
        off = r * self.record_bytes
        out.copy_(torch.frombuffer(self.map[off:off + out.numel()], dtype=torch.uint8))

    def close(self) -> None:
        self.map.close()
        os.close(self.fd)


def inspect_slab(path: str) -> Optional[int]:
    fd = os.open(path, os.O_RDONLY)  # leak: an empty file returns before close
    size = os.fstat(fd).st_size
    if size == 0:
        return None
    magic = os.pread(fd, 8, 0)
    os.close(fd)
    return size if magic != b"\0" * 8 else 0


@dataclass
class Spill:
    key: str
    slab: int
    nbytes: int
    done: Optional[Callable[[bool], None]] = None


class Offloader:
    def __init__(self, slabs: HostSlabs, file: SlabFile, device_kv: torch.Tensor, depth: int = 64):
        self.slabs, self.file, self.kv = slabs, file, device_kv
        self.on_disk: Dict[str, int] = {}
        self.on_host: Dict[str, int] = {}
        self.todo: "queue.Queue[Optional[Spill]]" = queue.Queue(depth)
        self.readers = ThreadPoolExecutor(4)
        self.cancelled: set = set()
        self._mu = threading.Lock()
        self._thread = threading.Thread(target=self._writer, daemon=True)
        self._thread.start()

    def spill(self, key: str, block: int) -> bool:
        slab = self.slabs.rent(0.01)  # leak: the writer thread drops the slab of a cancelled key
        if slab is None:
            return False
        flat = self.kv[block].reshape(-1).view(torch.uint8)
        self.slabs.mem[slab][:flat.numel()].copy_(flat)
        self.todo.put(Spill(key, slab, flat.numel()))
        return True

    def spill_nowait(self, key: str, block: int) -> bool:
        slab = self.slabs.rent(0.0)  # leak: not repaid when the queue is full
        if slab is None:
            return False
        flat = self.kv[block].reshape(-1).view(torch.uint8)
        self.slabs.mem[slab][:flat.numel()].copy_(flat)
        try:
            self.todo.put_nowait(Spill(key, slab, flat.numel()))
        except queue.Full:
            log.debug("spill queue is full, %s stays on the device", key)
            return False
        return True

    def _writer(self) -> None:
        while True:
            job = self.todo.get()
            if job is None:
                return
            if job.key in self.cancelled:
                self.cancelled.discard(job.key)
                continue
            rec = self.file.record()  # leak: not unrecorded when the write is refused
            ok = rec >= 0 and self.file.write(rec, self.slabs.mem[job.slab][:job.nbytes])
            if ok:
                with self._mu:
                    old = self.on_disk.pop(job.key, None)
                    self.on_disk[job.key] = rec
                if old is not None:
                    self.file.unrecord(old)
            self.slabs.repay(job.slab)
            if job.done is not None:
                job.done(ok)

    def keep_on_host(self, key: str, block: int) -> bool:
        if key in self.on_host:
            return True
        slab = self.slabs.rent(0.0)  # clean: near miss, moved to self.on_host, which forget() and demote() empty
        if slab is None:
            return False
        self.slabs.mem[slab].copy_(self.kv[block].reshape(-1).view(torch.uint8))
        self.on_host[key] = slab
        return True

    def demote(self, key: str) -> bool:
        slab = self.on_host.get(key)
        if slab is None:
            return False
        rec = self.file.record()  # clean: unrecorded when the write is refused, else kept in self.on_disk
        if rec < 0:
            return False
        if not self.file.write(rec, self.slabs.mem[slab]):
            self.file.unrecord(rec)
            return False
        with self._mu:
            old = self.on_disk.pop(key, None)
            self.on_disk[key] = rec
        if old is not None:
            self.file.unrecord(old)
        del self.on_host[key]
        self.slabs.repay(slab)
        return True

    def cancel(self, key: str) -> None:
        self.cancelled.add(key)

    def forget(self, key: str) -> None:
        slab = self.on_host.pop(key, None)
        if slab is not None:
            self.slabs.repay(slab)
        with self._mu:
            rec = self.on_disk.pop(key, None)
        if rec is not None:
            self.file.unrecord(rec)

    def load(self, key: str, block: int) -> bool:
        rec = self.on_disk.get(key)
        if rec is None:
            return False
        slab = self.slabs.rent()  # clean: repaid in finally
        try:
            dst = self.kv[block].reshape(-1).view(torch.uint8)
            self.file.read(rec, self.slabs.mem[slab][:dst.numel()])
            dst.copy_(self.slabs.mem[slab][:dst.numel()])
            return True
        finally:
            self.slabs.repay(slab)

    def read_ahead(self, key: str, on_ready: Callable[[int], None]) -> Optional[Future]:
        """on_ready gets the slab and repays it."""
        rec = self.on_disk.get(key)
        if rec is None:
            return None
        slab = self.slabs.rent(0.0)  # clean: near miss, the callback repays on error or passes it to on_ready
        if slab is None:
            return None
        fut = self.readers.submit(self.file.read, rec, self.slabs.mem[slab])

        def finish(f: Future) -> None:
            if f.cancelled() or f.exception() is not None:
                self.slabs.repay(slab)
                return
            on_ready(slab)

        fut.add_done_callback(finish)
        return fut

    def verify(self, keys: List[str], digest: Callable[[torch.Tensor], str], want: Dict[str, str]) -> List[str]:
        bad = []
        for key in keys:
            slab = self.slabs.rent(1.0)  # leak: a key missing on disk goes on without repay
            if slab is None:
                break
            rec = self.on_disk.get(key)
            if rec is None:
                bad.append(key)
                continue
            self.file.read(rec, self.slabs.mem[slab])
            if digest(self.slabs.mem[slab]) != want.get(key):
                bad.append(key)
            self.slabs.repay(slab)
        return bad

    def close(self) -> None:
        self.todo.put(None)
        self._thread.join()
        self.readers.shutdown()
        for key in list(self.on_host):
            self.forget(key)
        self.file.close()
