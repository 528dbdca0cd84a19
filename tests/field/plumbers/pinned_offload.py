"""Offloads KV and activations to pinned host memory and brings them back."""
from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Dict, Iterable, List, Optional

try:
    import torch
except ImportError:  # CPU-only unit tests
    torch = None

logger = logging.getLogger(__name__)


class PinnedBuffer:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        if torch is not None and torch.cuda.is_available():
            self.view = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        else:
            self.view = bytearray(nbytes)

    def tobytes(self) -> bytes:
        return bytes(self.view)


class PinnedPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._q: "queue.Queue[PinnedBuffer]" = queue.Queue()
        for _ in range(count):
            self._q.put(PinnedBuffer(nbytes))

    def checkout(self, timeout: Optional[float] = None) -> PinnedBuffer:
        return self._q.get(timeout=timeout)  # clean: the pool's own queue, handed to the caller

    def try_checkout(self) -> Optional[PinnedBuffer]:
        try:
            return self._q.get_nowait()  # clean: the pool's own queue, handed to the caller
        except queue.Empty:
            return None

    def checkin(self, buf: PinnedBuffer) -> None:
        self._q.put(buf)

    def idle(self) -> int:
        return self._q.qsize()


class KVOffloader:
    """Block-wise device to host copies on a background thread."""

    def __init__(self, pool: PinnedPool) -> None:
        self.pool = pool
        self.store: Dict[int, PinnedBuffer] = {}
        self.partial: Dict[int, PinnedBuffer] = {}
        self.pending: Dict[int, "Future[PinnedBuffer]"] = {}
        self._exec = ThreadPoolExecutor(max_workers=1)
        self._lock = threading.Lock()

    def _copy(self, block: bytes, buf: PinnedBuffer) -> PinnedBuffer:
        buf.view[: len(block)] = block
        return buf

    def offload_partial(self, seq_id: int, block: bytes) -> bool:
        """The unfilled last block of a sequence, which has no hash yet."""
        buf = self.pool.try_checkout()  # leak: a sequence offloaded again before take_partial overwrites its entry
        if buf is None:
            return False
        self._copy(block, buf)
        self.partial[seq_id] = buf
        return True

    def take_partial(self, seq_id: int) -> Optional[bytes]:
        buf = self.partial.pop(seq_id, None)
        if buf is None:
            return None
        data = buf.tobytes()
        self.pool.checkin(buf)
        return data

    def offload_once(self, block_hash: int, block: bytes) -> bool:
        with self._lock:
            if block_hash in self.store:
                return True
            buf = self.pool.try_checkout()  # clean: stored under a hash that is absent
            if buf is None:
                return False
            self.store[block_hash] = self._copy(block, buf)
        return True

    def offload_async(self, block_hash: int, block: bytes) -> None:
        if block_hash in self.pending:
            return
        buf = self.pool.checkout()  # clean: the future's result, drain moves it on
        self.pending[block_hash] = self._exec.submit(self._copy, block, buf)

    def drain(self) -> int:
        done = [h for h, f in self.pending.items() if f.done()]
        for h in done:
            buf = self.pending.pop(h).result()
            with self._lock:
                if h in self.store:
                    self.pool.checkin(buf)
                else:
                    self.store[h] = buf
        return len(done)

    def restore(self, block_hash: int) -> Optional[bytes]:
        with self._lock:
            buf = self.store.pop(block_hash, None)
        if buf is None:
            return None
        data = buf.tobytes()
        self.pool.checkin(buf)
        return data

    def evict(self, hashes: Iterable[int]) -> int:
        n = 0
        for h in hashes:
            with self._lock:
                buf = self.store.pop(h, None)
            if buf is None:
                continue
            self.pool.checkin(buf)
            n += 1
        return n

    def stage(self, blocks: List[bytes]) -> List[bytes]:
        """Round-trips blocks through pinned memory, skipping empty ones."""
        out: List[bytes] = []
        for block in blocks:
            buf = self.pool.checkout()  # leak: `continue` on an empty block
            if not block:
                out.append(b"")
                continue
            self._copy(block, buf)
            out.append(buf.tobytes()[: len(block)])
            self.pool.checkin(buf)
        return out

    def stage_all(self, blocks: List[bytes]) -> Optional[List[PinnedBuffer]]:
        taken: List[PinnedBuffer] = []
        for block in blocks:
            buf = self.pool.try_checkout()  # clean: near miss, rolled back by while-pop, else the list goes to the caller
            if buf is None:
                while taken:
                    self.pool.checkin(taken.pop())
                return None
            taken.append(self._copy(block, buf))
        return taken

    def flush_to(self, sink: Callable[[bytes], bool], blocks: List[bytes]) -> bool:
        staged = self.stage_all(blocks)  # leak: a refusing sink returns with the remaining buffers
        if staged is None:
            return False
        for buf in staged:
            if not sink(buf.tobytes()):
                return False
            self.pool.checkin(buf)
        return True

    def checksum(self, blocks: List[bytes]) -> int:
        staged = self.stage_all(blocks)  # clean: all go back in the loop
        total = 0
        for buf in staged or []:
            total += sum(buf.tobytes())
            self.pool.checkin(buf)
        return total


class ActivationOffload:
    """saved_tensors_hooks pair that parks activations on the host."""

    def __init__(self, pool: PinnedPool, min_bytes: int) -> None:
        self.pool = pool
        self.min_bytes = min_bytes
        self._live: Dict[int, PinnedBuffer] = {}
        self._next = 0

    def pack(self, tensor: bytes) -> object:
        if len(tensor) < self.min_bytes:
            return tensor
        buf = self.pool.checkout()  # clean: near miss, found by its key in unpack
        buf.view[: len(tensor)] = tensor
        key = self._next
        self._next += 1
        self._live[key] = buf
        return ("offloaded", key, len(tensor))

    def unpack(self, packed: object) -> bytes:
        if isinstance(packed, bytes):
            return packed
        _, key, n = packed
        buf = self._live.pop(key)
        data = buf.tobytes()[:n]
        self.pool.checkin(buf)
        return data

    def discard_step(self) -> None:
        """Forward-only steps never unpack."""
        for buf in self._live.values():
            self.pool.checkin(buf)
        self._live.clear()


class WeightStreamer:
    """Double-buffered streaming of layer weights."""

    def __init__(self, pool: PinnedPool) -> None:
        self.pool = pool

    def _read(self, layer: bytes) -> PinnedBuffer:
        buf = self.pool.checkout()  # clean: returned to the caller
        buf.view[: len(layer)] = layer
        return buf

    def run(self, layers: List[bytes], compute: Callable[[bytes], None]) -> None:
        if not layers:
            return
        ahead = self._read(layers[0])  # clean: near miss, becomes current and is given back
        for i in range(len(layers)):
            current = ahead
            if i + 1 < len(layers):
                ahead = self._read(layers[i + 1])  # clean: near miss, becomes current on the next turn
            compute(current.tobytes())
            self.pool.checkin(current)

    def run_until(self, layers: List[bytes], compute: Callable[[bytes], bool]) -> bool:
        if not layers:
            return True
        ahead = self._read(layers[0])  # clean: always current on the first turn
        for i in range(len(layers)):
            current = ahead
            if i + 1 < len(layers):
                ahead = self._read(layers[i + 1])  # leak: an early exit leaves the prefetched layer
            stop = compute(current.tobytes())
            self.pool.checkin(current)
            if stop:
                return False
        return True

    def peek(self, layer: bytes, n: int) -> bytes:
        return self._read(layer).tobytes()[:n]  # leak: the buffer is copied and dropped

    def warm(self, layers: List[bytes], verify: Callable[[bytes], None]) -> int:
        done = 0
        for layer in layers:
            buf = self._read(layer)  # clean: near miss, finally checks it in also where the verification fails and is caught
            try:
                verify(buf.tobytes())
                done += 1
            except ValueError:
                logger.warning("layer of %d bytes failed verification", len(layer))
                continue
            finally:
                self.pool.checkin(buf)
        return done
