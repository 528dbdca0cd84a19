"""Layer-wise weight offload with copy streams and timing events (CUDA in production, stubs on CPU)."""
from __future__ import annotations

import logging
import threading
import time
from typing import Any, List, Optional

try:
    import torch
    _HAS_CUDA = torch.cuda.is_available()
except ImportError:
    torch = None
    _HAS_CUDA = False

log = logging.getLogger("offload")


class _CpuStream:
    def synchronize(self) -> None:
        pass


def _new_stream() -> Any:
    return torch.cuda.Stream() if _HAS_CUDA else _CpuStream()


class StreamPool:
    """Streams are costly to create, so they are kept; ``grab`` blocks, ``grab_nowait`` does not."""

    def __init__(self, count: int):
        self._slots = threading.BoundedSemaphore(count)
        self._mu = threading.Lock()
        self._streams = [_new_stream() for _ in range(count)]

    def grab(self) -> Any:
        self._slots.acquire()  # clean: near miss, the permit goes with the stream and drop gives both back
        with self._mu:
            return self._streams.pop()

    def grab_nowait(self) -> Optional[Any]:
        if not self._slots.acquire(blocking=False):  # clean: as in grab
            return None
        with self._mu:
            return self._streams.pop()

    def grab_warm(self) -> Optional[Any]:
        """A stream that has been used before, if there is one."""
        self._slots.acquire()  # leak: the permit is kept when no warm stream is found
        with self._mu:
            for i, s in enumerate(self._streams):
                if getattr(s, "warm", False):
                    return self._streams.pop(i)
        return None

    def drop(self, stream: Any) -> None:
        with self._mu:
            self._streams.append(stream)
        self._slots.release()

    @property
    def idle(self) -> int:
        return len(self._streams)


class HostSlot:
    def __init__(self, ident: int):
        self.ident = ident
        self.payload: Any = None


class HostSlots:
    def __init__(self, count: int):
        self._open = [HostSlot(i) for i in range(count)]

    def claim(self) -> Optional[HostSlot]:
        return self._open.pop() if self._open else None

    def unclaim(self, slot: HostSlot) -> None:
        slot.payload = None
        self._open.append(slot)


class Layer:
    def __init__(self, name: str, weight: Any):
        self.name = name
        self.weight = weight
        self.slot: Optional[HostSlot] = None
        self.dirty = False


class LayerOffloader:
    def __init__(self, streams: StreamPool, slots: HostSlots):
        self.streams = streams
        self.slots = slots

    def offload(self, layer: Layer) -> bool:
        if layer.slot is not None:
            return True
        slot = self.slots.claim()  # clean: near miss, moves onto the layer, load unclaims it
        if slot is None:
            return False
        stream = self.streams.grab()  # clean: dropped after the copy
        slot.payload = layer.weight
        stream.synchronize()
        self.streams.drop(stream)
        layer.slot, layer.weight = slot, None
        return True

    def load(self, layer: Layer) -> None:
        slot = layer.slot
        if slot is None:
            return
        stream = self.streams.grab()  # clean: finally
        try:
            layer.weight = slot.payload
            stream.synchronize()
        finally:
            self.streams.drop(stream)
        layer.slot = None
        self.slots.unclaim(slot)

    def offload_dirty(self, layers: List[Layer]) -> int:
        n = 0
        for layer in layers:
            stream = self.streams.grab_nowait()  # leak: continue for a layer that is not dirty
            if stream is None:
                break
            if not layer.dirty:
                continue
            stream.synchronize()
            layer.dirty = False
            self.streams.drop(stream)
            n += 1
        return n

    def refresh(self, layers: List[Layer]) -> int:
        stream = None
        n = 0
        for layer in layers:
            if layer.weight is None:
                continue
            if stream is None:
                stream = self.streams.grab()  # clean: near miss, grabbed at most once and dropped after the loop
            stream.synchronize()
            n += 1
        if stream is not None:
            self.streams.drop(stream)
        return n

    def replace_weight(self, layer: Layer, weight: Any) -> bool:
        slot = self.slots.claim()  # leak: not unclaimed when there is no stream
        stream = self.streams.grab_nowait()  # leak: not dropped when there is no slot
        if slot is None or stream is None:
            log.debug("no room to replace %s", layer.name)
            return False
        slot.payload = weight
        stream.synchronize()
        self.streams.drop(stream)
        old, layer.slot, layer.weight = layer.slot, slot, None
        if old is not None:
            self.slots.unclaim(old)
        return True


def grab_with_retry(pool: StreamPool, attempts: int, pause: float = 0.0) -> Optional[Any]:
    stream = None
    for _ in range(attempts):
        stream = pool.grab_nowait()  # clean: near miss, rebound only when it is None
        if stream is not None:
            break
        time.sleep(pause)
    return stream


def grab_two(pool: StreamPool, attempts: int) -> Optional[tuple]:
    for _ in range(attempts):
        h2d = pool.grab_nowait()  # leak: the next attempt rebinds it when the second was not to be had
        if h2d is None:
            continue
        d2h = grab_with_retry(pool, 2)  # clean: returned with the first
        if d2h is not None:
            return h2d, d2h
    return None
