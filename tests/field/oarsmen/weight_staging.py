"""Moves weight shards from local NVMe to the GPU through a fixed set of page-locked host buffers."""
import logging
import os
import queue
import threading
from collections import deque
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional

import torch

logger = logging.getLogger(__name__)

ALIGN = 4096
MIB = 1 << 20


class StagingTimeout(RuntimeError): ...


class HostBuf:
    def __init__(self, size_class: int) -> None:
        self.size_class = size_class
        self.tensor = torch.empty(size_class, dtype=torch.uint8, pin_memory=True)
        self.tag = ""

    def view(self, n: int) -> memoryview:
        return memoryview(self.tensor.numpy())[:n]

    @property
    def aligned(self) -> bool:
        return self.tensor.data_ptr() % ALIGN == 0


class StagingPool:
    def __init__(self, classes=(1 * MIB, 4 * MIB, 16 * MIB), per_class: int = 8) -> None:
        self._classes = sorted(classes)
        self._free: Dict[int, List[HostBuf]] = {c: [HostBuf(c) for _ in range(per_class)] for c in self._classes}
        self._cv = threading.Condition()
        self.misaligned = 0
        self.outstanding = 0

    def _class_for(self, nbytes: int) -> int:
        for c in self._classes:
            if nbytes <= c:
                return c
        raise ValueError(f"no staging class holds {nbytes} bytes")

    def take(self, nbytes: int, tag: str, timeout: Optional[float] = None) -> HostBuf:
        cls = self._class_for(nbytes)
        with self._cv:
            if not self._cv.wait_for(lambda: self._free[cls], timeout):
                raise StagingTimeout(f"{tag}: nothing free in class {cls // MIB} MiB")
            buf = self._free[cls].pop()  # clean: returned to the caller
            buf.tag = tag
            self.outstanding += 1
            return buf

    def try_take_direct(self, nbytes: int, tag: str) -> Optional[HostBuf]:
        """Like take(), but never waits, may hand out a larger class and only gives buffers fit for O_DIRECT."""
        least = self._class_for(nbytes)
        with self._cv:
            for cls in self._classes:
                if cls < least or not self._free[cls]:
                    continue
                buf = self._free[cls].pop()  # leak: a misaligned buffer is neither returned nor put back into its free list
                if not buf.aligned:
                    self.misaligned += 1
                    continue
                buf.tag = tag
                self.outstanding += 1
                return buf
        return None

    def put(self, buf: HostBuf) -> None:
        with self._cv:
            buf.tag = ""
            self.outstanding -= 1
            self._free[buf.size_class].append(buf)
            self._cv.notify()


@dataclass
class Flight:
    event: "torch.cuda.Event"
    buf: HostBuf
    dst: torch.Tensor
    on_done: Callable[[torch.Tensor], None]


class CopyEngine:
    """Owns a side stream. A buffer that submit() accepts goes back to the pool when its copy has landed."""

    def __init__(self, pool: StagingPool, device: str = "cuda:0", depth: int = 32) -> None:
        self.pool = pool
        self.device = device
        self.depth = depth
        self.stream = torch.cuda.Stream(device)
        self._inflight: "deque[Flight]" = deque()
        self._closing = False
        self._lock = threading.Lock()

    def submit(self, buf: HostBuf, size: int, on_done: Callable[[torch.Tensor], None]) -> bool:
        with self._lock:
            if self._closing or len(self._inflight) >= self.depth:
                return False
            dst = torch.empty(size, dtype=torch.uint8, device=self.device)
            event = torch.cuda.Event()
            with torch.cuda.stream(self.stream):
                dst.copy_(buf.tensor[:size], non_blocking=True)
                event.record(self.stream)
            self._inflight.append(Flight(event, buf, dst, on_done))
            return True

    def reap(self, block: bool = False) -> int:
        landed = 0
        while True:
            with self._lock:
                if not self._inflight:
                    return landed
                if not block and not self._inflight[0].event.query():
                    return landed
                flight = self._inflight.popleft()
            flight.event.synchronize()
            self.pool.put(flight.buf)
            flight.on_done(flight.dst)
            landed += 1

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self.reap(block=True)


class ShardReader(threading.Thread):
    """Reads whole shard files into buffers and hands them over through a queue."""

    def __init__(self, pool: StagingPool, paths: List[str], out: "queue.Queue") -> None:
        super().__init__(daemon=True)
        self.pool = pool
        self.paths = paths
        self.out = out
        self.stop = threading.Event()
        self.short_reads = 0

    def run(self) -> None:
        for path in self.paths:
            if self.stop.is_set():
                break
            size = os.path.getsize(path)
            buf = self.pool.take(size, path)  # leak: after a short read the loop goes on to the next path with the buffer still out
            with open(path, "rb", buffering=0) as fh:  # clean: with
                got = fh.readinto(buf.view(size))
            if got != size:
                self.short_reads += 1
                logger.warning("%s: %d of %d bytes", path, got, size)
                continue
            self.out.put((path, buf, size))
        self.out.put(None)


class WeightLoader:
    def __init__(self, pool: StagingPool, engine: CopyEngine) -> None:
        self.pool = pool
        self.engine = engine
        self.weights: Dict[str, torch.Tensor] = {}
        self._staged: Dict[str, HostBuf] = {}

    def _landed(self, name: str) -> Callable[[torch.Tensor], None]:
        def done(t: torch.Tensor) -> None:
            self.weights[name] = t
        return done

    def pump(self, paths: List[str]) -> None:
        inbox: "queue.Queue" = queue.Queue(maxsize=4)
        reader = ShardReader(self.pool, paths, inbox)
        reader.start()
        while True:
            item = inbox.get()
            if item is None:
                break
            path, buf, size = item
            while not self.engine.submit(buf, size, self._landed(os.path.basename(path))):
                self.engine.reap()
        self.engine.reap(block=True)
        reader.join()

    def upload(self, name: str, blob: bytes) -> bool:
        buf = self.pool.take(len(blob), name, timeout=10.0)  # clean: near miss, the engine has it when submit() says yes, otherwise it is put back here
        buf.view(len(blob))[:] = blob
        if self.engine.submit(buf, len(blob), self._landed(name)):
            return True
        self.pool.put(buf)
        return False

    def prefetch(self, blobs: Dict[str, bytes]) -> None:
        for name, blob in blobs.items():
            buf = self.pool.try_take_direct(len(blob), name)  # leak: submit() returns False when the engine is full or closing and the answer is ignored
            if buf is None:
                logger.debug("prefetch stops at %s", name)
                return
            buf.view(len(blob))[:] = blob
            self.engine.submit(buf, len(blob), self._landed(name))

    def stage(self, name: str, blob: bytes) -> None:
        """Keep a weight on the host side, ready to be promoted."""
        buf = self.pool.take(len(blob), name)  # leak: the entry of an earlier stage() of the same name is overwritten
        buf.view(len(blob))[:] = blob
        self._staged[name] = buf

    def promote(self, name: str, size: int) -> bool:
        buf = self._staged.pop(name, None)
        if buf is None:
            return False
        if not self.engine.submit(buf, size, self._landed(name)):
            self._staged[name] = buf
            return False
        return True

    def gather(self, parts: Dict[str, int]) -> Dict[str, HostBuf]:
        held: Dict[str, HostBuf] = {}
        try:
            for name, nbytes in parts.items():
                held[name] = self.pool.take(nbytes, name, timeout=1.0)  # clean: near miss, what was taken before a failure is put back in the handler
        except (StagingTimeout, ValueError):
            for buf in held.values():
                self.pool.put(buf)
            raise
        return held

    def load_sharded(self, name: str, parts: Dict[str, int], read: Callable[[str, memoryview], int]) -> torch.Tensor:
        held = self.gather(parts)  # leak: an empty part raises below before the buffers are put back
        pieces = []
        for part, buf in held.items():
            n = read(part, buf.view(parts[part]))
            if n == 0:
                raise EOFError(f"{name}: part {part} is empty")
            pieces.append(buf.tensor[:n].to(self.engine.device))
        for buf in held.values():
            self.pool.put(buf)
        self.weights[name] = torch.cat(pieces)
        return self.weights[name]

    def checksum(self, path: str) -> int:
        size = min(os.path.getsize(path), 16 * MIB)
        buf = self.pool.take(size, path)  # clean: put back in the finally
        fd = -1
        try:
            fd = os.open(path, os.O_RDONLY)  # clean: closed in the finally when the open went through
            os.readv(fd, [buf.view(size)])
            return int(buf.tensor[:size].sum().item())
        finally:
            if fd >= 0:
                os.close(fd)
            self.pool.put(buf)

    def close(self) -> None:
        self.engine.close()
        for name in list(self._staged):
            self.pool.put(self._staged.pop(name))
