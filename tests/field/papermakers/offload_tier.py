"""Host and disk tiers for KV blocks of long, idle contexts."""
from __future__ import annotations

import mmap
import os
import queue
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Optional

import numpy as np
import torch


class HostArena:
    """Page sized pinned extents; free extents live in a bitmap."""

    def __init__(self, extents: int, extent_bytes: int):
        self.mem = torch.empty(extents, extent_bytes, dtype=torch.uint8, pin_memory=True)
        self.used = np.zeros(extents, dtype=bool)
        self.lock = threading.Lock()

    def grab(self) -> int:
        with self.lock:
            idle = np.flatnonzero(~self.used)
            if idle.size == 0:
                return -1
            self.used[idle[0]] = True
            return int(idle[0])

    def drop(self, ext: int, n: int = 1) -> None:
        with self.lock:
            self.used[ext : ext + n] = False

    def at(self, ext: int) -> torch.Tensor:
        return self.mem[ext]


class FilePool:
    """Preallocated segment files; a lease is an open descriptor."""

    def __init__(self, root: Path, count: int, size: int):
        self.size = size
        self.names: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for i in range(count):
            self.names.put(root / f"seg{i:04d}.kv")

    def checkout(self) -> Optional[tuple[Path, int]]:
        try:
            path = self.names.get_nowait()  # leak: the name is not put back when the disk has no room
        except queue.Empty:
            return None
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # clean: returned, or closed when there is no room
        try:
            os.posix_fallocate(fd, 0, self.size)
        except OSError:
            os.close(fd)
            return None
        return path, fd

    def checkin(self, path: Path, fd: int) -> None:
        os.close(fd)
        self.names.put(path)


class BounceBuffers:
    def __init__(self, n: int, nbytes: int):
        self.bufs = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(n)]
        self.cv = threading.Condition()

    def wait_one(self, timeout: float = 5.0) -> Optional[torch.Tensor]:
        with self.cv:
            if not self.cv.wait_for(lambda: self.bufs, timeout):
                return None
            return self.bufs.pop()  # clean: returned to the caller

    def done(self, buf: torch.Tensor) -> None:
        with self.cv:
            self.bufs.append(buf)
            self.cv.notify()


class OffloadTier:
    def __init__(self, arena: HostArena, files: FilePool, bounce: BounceBuffers):
        self.arena = arena
        self.files = files
        self.bounce = bounce
        self.host: OrderedDict[int, int] = OrderedDict()
        self.disk: dict[int, tuple[Path, int]] = {}

    # ---- device to host ----------------------------------------------------------

    def offload(self, key: int, block: torch.Tensor) -> bool:
        if key in self.host or key in self.disk:
            return True
        ext = self.arena.grab()  # clean: near miss, stored in host, a second grab only follows -1
        if ext < 0:
            if not self._spill_oldest():
                return False
            ext = self.arena.grab()  # clean: stored in host
            if ext < 0:
                return False
        self.arena.at(ext).copy_(block.view(torch.uint8).flatten(), non_blocking=True)
        self.host[key] = ext
        return True

    def offload_if_cold(self, key: int, block: torch.Tensor, hits: int) -> bool:
        ext = self.arena.grab()  # leak: hot blocks and known keys return with the extent marked used
        if ext < 0:
            return False
        if hits > 2 or key in self.host or key in self.disk:
            return False
        self.arena.at(ext).copy_(block.view(torch.uint8).flatten())
        self.host[key] = ext
        return True

    def fetch(self, key: int, out: torch.Tensor) -> bool:
        ext = self.host.pop(key, None)  # clean: dropped after the copy
        if ext is None:
            return self._fetch_disk(key, out)
        out.view(torch.uint8).flatten().copy_(self.arena.at(ext))
        self.arena.drop(ext)
        return True

    def discard(self, key: int) -> None:
        ext = self.host.pop(key, None)  # clean: near miss, either tier's lease is given back
        if ext is not None:
            self.arena.drop(ext)
        elif key in self.disk:
            self.files.checkin(*self.disk.pop(key))

    # ---- host to disk ------------------------------------------------------------

    def _spill_oldest(self) -> bool:
        if not self.host:
            return False
        key, ext = self.host.popitem(last=False)  # leak: the extent is gone from host when no segment file is left
        seg = self.files.checkout()  # clean: stored in disk, discard checks it in
        if seg is None:
            return False
        path, fd = seg
        os.pwrite(fd, self.arena.at(ext).numpy().tobytes(), 0)
        self.disk[key] = (path, fd)
        self.arena.drop(ext)
        return True

    def _fetch_disk(self, key: int, out: torch.Tensor) -> bool:
        seg = self.disk.get(key)
        if seg is None:
            return False
        buf = self.bounce.wait_one()  # leak: a truncated segment returns without done
        if buf is None:
            return False
        data = os.pread(seg[1], buf.numel(), 0)
        if len(data) < buf.numel():
            return False
        buf.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        out.view(torch.uint8).flatten().copy_(buf)
        self.bounce.done(buf)
        return True

    # ---- import and export -------------------------------------------------------

    def import_mapped(self, keys: list[int], src: Path) -> int:
        fd = os.open(src, os.O_RDONLY)  # clean: closed in finally
        try:
            mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)  # clean: closed after the loop
        finally:
            os.close(fd)
        width = self.arena.mem.shape[1]
        loaded = 0
        for i, key in enumerate(keys):
            if key in self.host or key in self.disk:
                continue
            ext = self.arena.grab()  # leak: a short tail breaks out with the extent unused
            if ext < 0:
                break
            piece = mapped[i * width : (i + 1) * width]
            if len(piece) < width:
                break
            self.arena.at(ext).copy_(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
            self.host[key] = ext
            loaded += 1
        mapped.close()
        return loaded

    def export(self, keys: list[int], dst: Path) -> int:
        fh = open(dst, "wb")  # leak: a key that is not resident returns before close
        for key in keys:
            if key not in self.host:
                return -1
            fh.write(self.arena.at(self.host[key]).numpy().tobytes())
        fh.close()
        return len(keys)

    def close(self) -> None:
        for key in list(self.host) + list(self.disk):
            self.discard(key)
