"""Offloading activations through pinned host buffers and side streams."""
from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from typing import Any, Dict, Iterator, List, Optional, Tuple

try:
    import torch
except ImportError:  # pragma: no cover
    torch = None

log = logging.getLogger("offload")


class PinnedBuffer:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        if torch is not None and torch.cuda.is_available():
            self.storage: Any = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        else:
            self.storage = bytearray(nbytes)

    def copy_from(self, src: bytes) -> None:
        self.storage[: len(src)] = src

    def read(self, n: int) -> bytes:
        return bytes(self.storage[:n])


class PinnedPool:
    """Size classes of powers of two; get may be refused, put never is."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.live = 0
        self._bins: Dict[int, List[PinnedBuffer]] = {}

    @staticmethod
    def _class(nbytes: int) -> int:
        return 1 << max(6, (nbytes - 1).bit_length())

    def get(self, nbytes: int) -> Optional[PinnedBuffer]:
        size = self._class(nbytes)
        bucket = self._bins.setdefault(size, [])
        if not bucket:
            if self.live + size > self.budget:
                return None
            bucket.append(PinnedBuffer(size))
        self.live += size
        return bucket.pop()

    def put(self, buf: PinnedBuffer) -> None:
        self.live -= buf.nbytes
        self._bins[buf.nbytes].append(buf)


class Lane:
    """Stands for a CUDA stream."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.pending: List[str] = []
        self.failed = False

    def synchronize(self) -> None:
        if self.failed:
            raise RuntimeError(f"lane {self.index}: copy failed")
        self.pending.clear()


class LanePool:
    def __init__(self, n: int) -> None:
        self._ready = OrderedDict((i, Lane(i)) for i in range(n))

    def get_lane(self) -> Lane:
        _, lane = self._ready.popitem(last=False)
        return lane

    def put_lane(self, lane: Lane) -> None:
        self._ready[lane.index] = lane

    @contextlib.contextmanager
    def on_lane(self) -> Iterator[Lane]:
        lane = self.get_lane()  # clean: put back in finally
        try:
            yield lane
            lane.synchronize()
        finally:
            self.put_lane(lane)

    def __len__(self) -> int:
        return len(self._ready)


class Saved:
    """What pack leaves in the autograd graph and unpack takes out."""

    def __init__(self, buf: Optional[PinnedBuffer], n: int, raw: Optional[bytes], on_host: bool) -> None:
        self.buf = buf
        self.n = n
        self.raw = raw
        self.on_host = on_host


class ActivationOffload:
    def __init__(self, pool: PinnedPool, lanes: LanePool, threshold: int) -> None:
        self.pool = pool
        self.lanes = lanes
        self.threshold = threshold
        self.prefetched: Dict[int, PinnedBuffer] = {}
        self.inflight: List[Tuple[Lane, PinnedBuffer]] = []

    def pack(self, data: bytes) -> Saved:
        buf = None
        if len(data) >= self.threshold:
            buf = self.pool.get(len(data))  # clean: near miss, on_host goes with buf, unpack puts it back under that flag
        if buf is None:
            return Saved(None, len(data), data, False)
        buf.copy_from(data)
        return Saved(buf, len(data), None, True)

    def unpack(self, saved: Saved) -> bytes:
        if not saved.on_host:
            assert saved.raw is not None
            return saved.raw
        buf, saved.buf = saved.buf, None
        assert buf is not None
        data = buf.read(saved.n)
        self.pool.put(buf)
        return data

    def roundtrip(self, data: bytes) -> bytes:
        buf = self.pool.get(len(data))  # leak: the failed copy is caught, data returned without the put
        if buf is None:
            return data
        try:
            with self.lanes.on_lane() as lane:  # clean: with statement
                lane.pending.append("d2h")
                buf.copy_from(data)
        except RuntimeError:
            log.warning("offload of %d bytes failed", len(data))
            return data
        out = buf.read(len(data))
        self.pool.put(buf)
        return out

    def copy_async(self, data: bytes) -> bool:
        lane = self.lanes.get_lane()  # leak: pinned budget used up, False returned with the lane
        buf = self.pool.get(len(data))  # clean: moved to inflight, drain puts it back
        if buf is None:
            return False
        lane.pending.append("d2h")
        buf.copy_from(data)
        self.inflight.append((lane, buf))
        return True

    def drain(self) -> int:
        n = 0
        while self.inflight:
            lane, buf = self.inflight.pop()
            try:
                lane.synchronize()
                n += 1
            except RuntimeError:
                log.exception("drain")
            finally:
                self.pool.put(buf)
                self.lanes.put_lane(lane)
        return n

    def prefetch(self, layer: int, data: bytes) -> None:
        buf = self.pool.get(len(data))  # leak: a layer prefetched twice overwrites its buffer in the table
        if buf is None:
            return
        buf.copy_from(data)
        self.prefetched[layer] = buf

    def take_prefetched(self, layer: int, n: int) -> Optional[bytes]:
        buf = self.prefetched.pop(layer, None)
        if buf is None:
            return None
        data = buf.read(n)
        self.pool.put(buf)
        return data

    def chunked(self, data: bytes, step: int) -> List[bytes]:
        out: List[bytes] = []
        buf = self.pool.get(step)  # clean: near miss, the loop's continue stays within the one buffer, put behind the loop
        if buf is None:
            return [data]
        for i in range(0, len(data), step):
            part = data[i:i + step]
            if not any(part):
                continue
            buf.copy_from(part)
            out.append(buf.read(len(part)))
        self.pool.put(buf)
        return out

    def chunked_grow(self, parts: List[bytes]) -> int:
        buf = self.pool.get(64)  # leak: rebound to a larger buffer when a part does not fit
        total = 0
        for part in parts:
            if buf is None or len(part) > buf.nbytes:
                buf = self.pool.get(len(part))  # leak: rebound again by the next larger part
                if buf is None:
                    return total
            buf.copy_from(part)
            total += len(part)
        if buf is not None:
            self.pool.put(buf)
        return total

    def regrow(self, parts: List[bytes]) -> int:
        buf = self.pool.get(64)  # clean: near miss, put before it is rebound
        for part in parts:
            if buf is not None and len(part) > buf.nbytes:
                self.pool.put(buf)
                buf = self.pool.get(len(part))  # clean: put before the next rebinding or at the end
            if buf is None:
                return 0
            buf.copy_from(part)
        if buf is not None:
            self.pool.put(buf)
        return len(parts)

    def stage(self, items: List[bytes]) -> Iterator[PinnedBuffer]:
        for item in items:
            buf = self.pool.get(len(item))  # clean: near miss, handed to the consumer, flush puts every one back
            if buf is None:
                return
            buf.copy_from(item)
            yield buf

    def flush(self, items: List[bytes]) -> int:
        total = 0
        for buf in self.stage(items):  # clean: each one put back in the loop
            total += buf.nbytes
            self.pool.put(buf)
        return total


def main() -> None:
    pool, lanes = PinnedPool(4096), LanePool(2)
    off = ActivationOffload(pool, lanes, 16)
    small, big = off.pack(b"x"), off.pack(b"y" * 40)
    print(off.unpack(small), len(off.unpack(big)), off.roundtrip(b"abc"), off.copy_async(b"q" * 100), off.drain())
    off.prefetch(1, b"pf")
    print(off.take_prefetched(1, 2), off.chunked(b"ab\0\0cd", 2), off.regrow([b"z" * 100, b"w" * 300]), off.flush([b"a", b"b"]))
    print(pool.live, len(lanes))


if __name__ == "__main__":
    main()
