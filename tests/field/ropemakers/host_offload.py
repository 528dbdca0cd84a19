"""Offload of cold KV pages to pinned host memory and to a spill file."""
from __future__ import annotations

import logging
import os
import threading
from typing import Callable, Dict, Iterable, List, Optional, Tuple

import torch

log = logging.getLogger(__name__)


class HostPages:
    """A slab of pinned pages. get_page() returns a number, page(n) the tensor."""

    def __init__(self, count: int, page_bytes: int):
        self.slab = torch.empty(count, page_bytes, dtype=torch.uint8)
        self._stack = list(range(count - 1, -1, -1))
        self._cv = threading.Condition()

    def get_page(self) -> int:
        with self._cv:
            return self._stack.pop() if self._stack else -1

    def wait_page(self, timeout: float) -> int:
        with self._cv:
            if not self._cv.wait_for(lambda: self._stack, timeout):
                raise TimeoutError("no host page")
            return self._stack.pop()

    def page(self, n: int) -> torch.Tensor:
        return self.slab[n]

    def put_page(self, n: int) -> None:
        with self._cv:
            self._stack.append(n)
            self._cv.notify()


class SpillFile:
    """Fixed-size records in one file."""

    def __init__(self, path: str, record: int, limit: int):
        self.record = record
        self.limit = limit
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # clean: closed in close()
        self._next = 0
        self._holes: List[int] = []

    def new_record(self) -> Optional[int]:
        if self._holes:
            return self._holes.pop()
        if self._next >= self.limit:
            return None
        self._next += 1
        return self._next - 1

    def write(self, rec: int, data: bytes) -> int:
        return os.pwrite(self.fd, data, rec * self.record)

    def read(self, rec: int) -> bytes:
        return os.pread(self.fd, self.record, rec * self.record)

    def erase(self, rec: int) -> None:
        self._holes.append(rec)

    def close(self) -> None:
        os.close(self.fd)


def check_spill_path(path: str, need: int) -> bool:
    fd = os.open(path, os.O_RDONLY)  # leak: not closed when the file is smaller than needed
    size = os.fstat(fd).st_size
    if size < need:
        log.error("%s has %d bytes, %d needed", path, size, need)
        return False
    os.close(fd)
    return True


def dump_index(path: str, index: Dict[str, int]) -> None:
    f = open(path + ".tmp", "w")  # clean: closed in finally
    try:
        for k, v in sorted(index.items()):
            f.write(f"{k} {v}\n")
    finally:
        f.close()
    os.replace(path + ".tmp", path)


def load_index(path: str) -> Dict[str, int]:
    out: Dict[str, int] = {}
    with open(path) as f:  # clean: context manager
        for line in f:
            k, v = line.split()
            out[k] = int(v)
    return out


class Offloader:
    def __init__(self, pages: HostPages, spill: SpillFile):
        self.pages = pages
        self.spill = spill
        self.on_host: Dict[str, int] = {}
        self.on_disk: Dict[str, int] = {}
        self.lock = threading.Lock()

    def store(self, key: str, kv: torch.Tensor) -> bool:
        n = self.pages.get_page()  # clean: near miss, filed in on_host, forget() and demote() take it out
        if n < 0:
            return self.store_on_disk(key, kv)
        self.pages.page(n)[: kv.numel()].copy_(kv.view(-1))
        old = self.on_host.pop(key, None)
        if old is not None:
            self.pages.put_page(old)
        self.on_host[key] = n
        return True

    def store_on_disk(self, key: str, kv: torch.Tensor) -> bool:
        rec = self.spill.new_record()  # leak: a short write returns False with the record taken
        if rec is None:
            return False
        data = bytes(kv.view(-1).tolist())
        if self.spill.write(rec, data) != len(data):
            log.error("short write of %s", key)
            return False
        self.on_disk[key] = rec
        return True

    def demote(self, key: str) -> bool:
        """Host to disk."""
        n = self.on_host.get(key)
        if n is None:
            return False
        rec = self.spill.new_record()  # clean: near miss, erased when the write comes out short
        if rec is None:
            return False
        data = bytes(self.pages.page(n).tolist())
        if self.spill.write(rec, data) != len(data):
            self.spill.erase(rec)
            return False
        stale = self.on_disk.pop(key, None)
        if stale is not None:
            self.spill.erase(stale)
        self.on_disk[key] = rec
        self.pages.put_page(self.on_host.pop(key))
        return True

    def promote(self, key: str, timeout: float = 1.0) -> bool:
        """Disk to host."""
        try:
            n = self.pages.wait_page(timeout)  # leak: page kept when the key is not on disk
        except TimeoutError:
            return False
        rec = self.on_disk.get(key)
        if rec is None:
            return False
        raw = torch.frombuffer(bytearray(self.spill.read(rec)), dtype=torch.uint8)
        self.pages.page(n)[: raw.numel()].copy_(raw)
        self.on_host[key] = n
        self.spill.erase(self.on_disk.pop(key))
        return True

    def fetch(self, key: str, out: torch.Tensor) -> bool:
        n = self.on_host.get(key, -1)
        borrowed = False
        if n < 0:
            if key not in self.on_disk:
                return False
            n = self.pages.get_page()  # clean: near miss, put back when borrowed is set
            if n < 0:
                return False
            borrowed = True
            raw = torch.frombuffer(bytearray(self.spill.read(self.on_disk[key])), dtype=torch.uint8)
            self.pages.page(n)[: raw.numel()].copy_(raw)
        out.view(-1).copy_(self.pages.page(n)[: out.numel()])
        if borrowed:
            self.pages.put_page(n)
        return True

    def fetch_async(self, key: str, run: Callable[[Callable[[], None]], None], out: torch.Tensor) -> bool:
        n = self.pages.get_page()  # clean: put back by the job in its finally
        if n < 0:
            return False

        def job() -> None:
            try:
                rec = self.on_disk.get(key)
                if rec is None:
                    return
                raw = torch.frombuffer(bytearray(self.spill.read(rec)), dtype=torch.uint8)
                self.pages.page(n)[: raw.numel()].copy_(raw)
                out.view(-1).copy_(self.pages.page(n)[: out.numel()])
            finally:
                self.pages.put_page(n)

        run(job)
        return True

    def copy_entry(self, src: str, dst: str) -> bool:
        with self.lock:
            n = self.pages.get_page()  # leak: dst may be there already, its page is overwritten in the dict
            if n < 0 or src not in self.on_host:
                if n >= 0:
                    self.pages.put_page(n)
                return False
            self.pages.page(n).copy_(self.pages.page(self.on_host[src]))
            self.on_host[dst] = n
            return True

    def rename(self, src: str, dst: str) -> None:
        n = self.on_host.pop(src, None)
        if n is None:
            return
        old = self.on_host.pop(dst, None)
        if old is not None:
            self.pages.put_page(old)
        self.on_host[dst] = n

    def reserve_for(self, keys: Iterable[str]) -> Dict[str, int]:
        """Pages for a batch of keys; the caller files or returns them."""
        plan: Dict[str, int] = {}
        for key in keys:
            if key in self.on_host or key in plan:
                continue
            n = self.pages.get_page()  # clean: the plan is undone when pages run out
            if n < 0:
                for m in plan.values():
                    self.pages.put_page(m)
                return {}
            plan[key] = n
        return plan

    def store_batch(self, items: Dict[str, torch.Tensor]) -> int:
        plan = self.reserve_for(items)  # leak: keys whose tensor is empty are left out with their page
        stored = 0
        for key, n in plan.items():
            kv = items[key]
            if kv.numel() == 0:
                continue
            self.pages.page(n)[: kv.numel()].copy_(kv.view(-1))
            self.on_host[key] = n
            stored += 1
        return stored

    def prefetch(self, items: Dict[str, torch.Tensor]) -> List[Tuple[str, int]]:
        plan = self.reserve_for(items)  # clean: every page is filed or put back
        filed = []
        for key, n in plan.items():
            if items[key].numel() == 0:
                self.pages.put_page(n)
                continue
            self.on_host[key] = n
            filed.append((key, n))
        return filed

    def forget(self, key: str) -> None:
        n = self.on_host.pop(key, None)
        if n is not None:
            self.pages.put_page(n)
        rec = self.on_disk.pop(key, None)
        if rec is not None:
            self.spill.erase(rec)
