"""Activation offloading for training: saved tensors travel to host buffers on side streams."""
from __future__ import annotations

import functools
import itertools
from collections import deque
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Deque, Iterator, Optional

try:
    import torch
except ImportError:
    torch = None


class HostArena:
    def __init__(self, n: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._stack = [bytearray(nbytes) for _ in range(n)]

    def borrow(self, nbytes: int) -> Optional[bytearray]:
        if nbytes > self.nbytes or not self._stack:
            return None
        return self._stack.pop()

    def give_back(self, buf: bytearray) -> None:
        self._stack.append(buf)

    def available(self) -> int:
        return len(self._stack)


class SideStream:
    def __init__(self, index: int) -> None:
        self.index = index
        self.raw = torch.cuda.Stream() if torch is not None and torch.cuda.is_available() else None
        self._callbacks: list[Callable[[], None]] = []

    def add_callback(self, fn: Callable[[], None]) -> None:
        self._callbacks.append(fn)

    def synchronize(self) -> None:
        if self.raw is not None:
            self.raw.synchronize()
        cbs, self._callbacks = self._callbacks, []
        for fn in cbs:
            fn()


class StreamPool:
    def __init__(self, n: int) -> None:
        self._ready: Deque[SideStream] = deque(SideStream(i) for i in range(n))

    def lease(self) -> SideStream:
        if not self._ready:
            raise RuntimeError("side streams exhausted")
        return self._ready.popleft()

    def end_lease(self, s: SideStream) -> None:
        self._ready.append(s)

    @contextmanager
    def on_side(self) -> Iterator[SideStream]:
        s = self.lease()  # clean: finally ends the lease
        try:
            yield s
        finally:
            s.synchronize()
            self.end_lease(s)


class SavedActivation:
    __slots__ = ("key", "buf", "length", "original")

    def __init__(self, key: int, buf: Optional[bytearray], length: int, original: Any) -> None:
        self.key = key
        self.buf = buf
        self.length = length
        self.original = original


class OffloadHooks:
    """pack/unpack pair for torch.autograd.graph.saved_tensors_hooks."""

    def __init__(self, arena: HostArena, streams: StreamPool, min_bytes: int = 64) -> None:
        self.arena = arena
        self.streams = streams
        self.min_bytes = min_bytes
        self._ids = itertools.count()
        self.live: dict[int, SavedActivation] = {}
        self._scratch: Optional[bytearray] = None

    def pack(self, t: bytes) -> SavedActivation:
        key = next(self._ids)
        if len(t) < self.min_bytes:
            return SavedActivation(key, None, len(t), t)
        buf = self.arena.borrow(len(t))  # clean: near miss, None falls back to the original; else unpack or reset gives it back
        if buf is None:
            return SavedActivation(key, None, len(t), t)
        with self.streams.on_side() as s:  # clean: context manager
            s.add_callback(lambda: buf.__setitem__(slice(0, len(t)), t))
        sa = SavedActivation(key, buf, len(t), None)
        self.live[key] = sa
        return sa

    def unpack(self, sa: SavedActivation) -> bytes:
        if sa.buf is None:
            return sa.original
        out = bytes(sa.buf[:sa.length])
        self.live.pop(sa.key, None)
        self.arena.give_back(sa.buf)
        sa.buf = None
        sa.original = out
        return out

    def reset(self) -> None:
        for sa in self.live.values():
            self.arena.give_back(sa.buf)
            sa.buf = None
        self.live.clear()
        if self._scratch is not None:
            self.arena.give_back(self._scratch)
            self._scratch = None

    def pack_quantised(self, t: bytes, scale: int) -> Optional[SavedActivation]:
        buf = self.arena.borrow(len(t))  # leak: a zero scale gives None back and the buffer is lost
        if buf is None:
            return None
        if scale == 0:
            return None
        buf[:len(t)] = bytes(b // scale for b in t)
        sa = SavedActivation(next(self._ids), buf, len(t), None)
        self.live[sa.key] = sa
        return sa

    def scratch(self, nbytes: int) -> bytearray:
        if self._scratch is None or len(self._scratch) < nbytes:
            if self._scratch is not None:
                self.arena.give_back(self._scratch)
            self._scratch = self.arena.borrow(nbytes)  # clean: near miss, the former scratch goes back before the field is set
        if self._scratch is None:
            raise MemoryError("arena exhausted")
        return self._scratch


class LayerOffloader:
    def __init__(self, arena: HostArena, streams: StreamPool, num_layers: int) -> None:
        self.arena = arena
        self.streams = streams
        self.num_layers = num_layers
        self.copy_stream = streams.lease()  # clean: close() ends the lease
        self.by_layer: dict[int, list[bytearray]] = {}
        self.micro: dict[int, list[bytearray]] = {}
        self.reload_stream: Optional[SideStream] = None

    def offload(self, layer: int, acts: list[bytes]) -> int:
        moved = 0
        for a in acts:
            buf = self.arena.borrow(len(a))  # clean: kept in by_layer, drop_layer gives back
            if buf is None:
                break
            buf[:len(a)] = a
            self.by_layer.setdefault(layer, []).append(buf)
            moved += 1
        return moved

    def offload_microbatch(self, layer: int, acts: list[bytes]) -> None:
        bufs = [self.arena.borrow(len(a)) for a in acts]  # leak: the layer's list of an earlier microbatch is overwritten
        got = [b for b in bufs if b is not None]
        for b, a in zip(bufs, acts):
            if b is not None:
                b[:len(a)] = a
        self.micro[layer] = got

    def drop_layer(self, layer: int) -> None:
        for b in self.by_layer.pop(layer, ()):
            self.arena.give_back(b)
        for b in self.micro.pop(layer, ()):
            self.arena.give_back(b)

    def begin_reload(self, layer: int) -> None:
        self.reload_stream = self.streams.lease()  # leak: finish_reload returns early for a layer without buffers, and the next begin overwrites it
        self.reload_stream.add_callback(lambda: None)

    def finish_reload(self, layer: int) -> list[bytes]:
        bufs = self.by_layer.get(layer)
        if not bufs:
            return []
        self.reload_stream.synchronize()
        out = [bytes(b) for b in bufs]
        self.streams.end_lease(self.reload_stream)
        self.reload_stream = None
        return out

    def copy_async(self, act: bytes, sink: Callable[[bytes], None]) -> bool:
        buf = self.arena.borrow(len(act))  # clean: near miss, the stream callback gives it back
        if buf is None:
            return False
        buf[:len(act)] = act

        def done() -> None:
            sink(bytes(buf[:len(act)]))
            self.arena.give_back(buf)

        self.copy_stream.add_callback(done)
        return True

    def copy_async_partial(self, act: bytes) -> bool:
        buf = self.arena.borrow(len(act))  # clean: near miss, give_back is bound by partial as the callback
        if buf is None:
            return False
        buf[:len(act)] = act
        self.copy_stream.add_callback(functools.partial(self.arena.give_back, buf))
        return True

    def mirror(self, act: bytes, sinks: list[Callable[[bytes], None]]) -> int:
        buf = self.arena.borrow(len(act))  # leak: with no sink there is no callback and nobody gives it back
        if buf is None:
            return 0
        buf[:len(act)] = act
        for i, sink in enumerate(sinks):
            self.copy_stream.add_callback(functools.partial(sink, bytes(buf)))
            if i == len(sinks) - 1:
                self.copy_stream.add_callback(functools.partial(self.arena.give_back, buf))
        return len(sinks)

    def reduce_pair(self, a: bytes, b: bytes) -> Optional[bytes]:
        with ExitStack() as stack:
            x = self.arena.borrow(len(a))  # clean: the exit stack gives it back
            if x is None:
                return None
            stack.callback(self.arena.give_back, x)
            y = self.arena.borrow(len(b))  # clean: near miss, None leaves through the stack, which gives x back
            if y is None:
                return None
            stack.callback(self.arena.give_back, y)
            x[:len(a)], y[:len(b)] = a, b
            return bytes((p + q) & 255 for p, q in zip(x, y))

    def checksum(self, act: bytes) -> int:
        s = self.streams.lease()  # leak: an empty activation returns before end_lease
        if not act:
            return 0
        s.synchronize()
        total = sum(act) & 0xFFFF
        self.streams.end_lease(s)
        return total

    def close(self) -> None:
        self.copy_stream.synchronize()
        self.streams.end_lease(self.copy_stream)
        for layer in range(self.num_layers):
            self.drop_layer(layer)
