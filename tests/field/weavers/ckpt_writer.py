"""Sharded checkpoints: stage tensors through a slab pool, write, fsync, rename."""
from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from queue import Queue
from typing import BinaryIO, Dict, List, Optional, Tuple


class Slab:
    def __init__(self, size: int) -> None:
        self.mem = bytearray(size)
        self.fill = 0


class SlabPool:
    def __init__(self, n: int, size: int) -> None:
        self.size = size
        self._q: "Queue[Slab]" = Queue()
        for _ in range(n):
            self._q.put(Slab(size))

    def alloc(self) -> Slab:
        return self._q.get()

    def free(self, slab: Slab) -> None:
        slab.fill = 0
        self._q.put(slab)

    def idle(self) -> int:
        return self._q.qsize()


class ShardWriter:
    """Writes one shard. A job is (name, slab); the consumer thread frees the slab."""

    def __init__(self, root: str, pool: SlabPool) -> None:
        self.root = root
        self.pool = pool
        self.jobs: "Queue[Optional[Tuple[str, Slab]]]" = Queue()
        self.index: Dict[str, Tuple[int, int]] = {}
        self.log: Optional[BinaryIO] = None
        self._thread: Optional[threading.Thread] = None

    def begin(self) -> None:
        if self.log is not None:
            self.log.close()
        self.log = open(os.path.join(self.root, "shard.bin"), "wb")  # clean: near miss, an older log is closed first, finish() closes this one
        self._thread = threading.Thread(target=self._consume, daemon=True)
        self._thread.start()

    def _consume(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                return
            name, slab = job
            self.index[name] = (self.log.tell(), slab.fill)
            self.log.write(slab.mem[:slab.fill])
            self.pool.free(slab)

    def add(self, name: str, raw: bytes) -> bool:
        slab = self.pool.alloc()  # leak: a tensor larger than a slab is refused with the slab allocated
        if len(raw) > len(slab.mem):
            return False
        slab.mem[:len(raw)] = raw
        slab.fill = len(raw)
        self.jobs.put((name, slab))
        return True

    def add_many(self, tensors: Dict[str, bytes]) -> int:
        n = 0
        for name, raw in tensors.items():
            if len(raw) > self.pool.size or name in self.index:
                continue
            slab = self.pool.alloc()  # clean: near miss, both skips stand before the alloc; queued for the consumer
            slab.mem[:len(raw)] = raw
            slab.fill = len(raw)
            self.jobs.put((name, slab))
            n += 1
        return n

    def finish(self) -> None:
        self.jobs.put(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.log is not None:
            self.log.flush()
            os.fsync(self.log.fileno())
            self.log.close()
            self.log = None

    def digest(self, parts: List[bytes]) -> int:
        """Rolling checksum; staged so that it sees what the disk would."""
        slab = self.pool.alloc()  # leak: a part that does not fit makes the loop take another slab and forget this one
        for p in parts:
            if slab.fill + len(p) > len(slab.mem):
                slab = self.pool.alloc()  # leak: rebound again by the next overflow
            slab.mem[slab.fill:slab.fill + len(p)] = p
            slab.fill += len(p)
        crc = sum(slab.mem[:slab.fill]) & 0xFFFF
        self.pool.free(slab)
        return crc


def write_manifest(root: str, index: Dict[str, Tuple[int, int]], tries: int = 3) -> bool:
    for n in range(tries):
        tmp = open(os.path.join(root, f".manifest.{n}"), "w")  # leak: a failed dump is caught and retried with a new file
        try:
            json.dump(index, tmp)
            tmp.flush()
        except (OSError, TypeError):
            time.sleep(0.001)
            continue
        tmp.close()
        os.replace(tmp.name, os.path.join(root, "manifest.json"))
        return True
    return False


def write_latest(root: str, step: int) -> None:
    fd, path = tempfile.mkstemp(dir=root)  # clean: near miss, fdopen takes the descriptor over and the with closes it
    with os.fdopen(fd, "w") as fh:  # clean: with
        fh.write(str(step))
    os.replace(path, os.path.join(root, "latest"))


def read_manifest(root: str) -> Optional[dict]:
    fh = None
    try:
        fh = open(os.path.join(root, "manifest.json"))  # clean: near miss, the handler returns through the finally
        return json.load(fh)
    except (OSError, ValueError):
        return None
    finally:
        if fh is not None:
            fh.close()
