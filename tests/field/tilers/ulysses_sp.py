"""Ulysses-style sequence parallelism: all-to-all exchange through a table of registered buffers."""
from __future__ import annotations

import time
from typing import Any, Dict, List, Optional, Sequence, Tuple


class A2ABufferTable:
    """Registered exchange buffers, addressed by small integers from 0; -1 means none is free."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._slabs = [bytearray(nbytes) for _ in range(count)]
        self._busy = [False] * count

    def reserve(self, nbytes: int) -> int:
        if nbytes > self.nbytes:
            return -1
        for i, busy in enumerate(self._busy):
            if not busy:
                self._busy[i] = True
                return i
        return -1

    def unreserve(self, handle: int) -> None:
        if not self._busy[handle]:
            raise ValueError(f"buffer {handle} is not reserved")
        self._busy[handle] = False

    def slab(self, handle: int) -> bytearray:
        return self._slabs[handle]

    def reserve_wait(self, nbytes: int, poll: float = 0.001) -> int:
        while True:
            handle = self.reserve(nbytes)  # clean: near miss, only a refused -1 is ever rebound
            if handle >= 0:
                return handle
            time.sleep(poll)


class HeadScatter:
    """Sequence-sharded to head-sharded; overlaps the exchange with the QKV projection."""

    def __init__(self, table: A2ABufferTable, overlap: bool) -> None:
        self.table = table
        self.overlap = overlap
        self._handle = -1

    def begin(self, x: bytes) -> None:
        if self.overlap:
            self._handle = self.table.reserve_wait(len(x))  # clean: near miss, finish() has the same guard
            self.table.slab(self._handle)[: len(x)] = x

    def finish(self, x: bytes) -> bytes:
        if self.overlap:
            out = bytes(self.table.slab(self._handle)[: len(x)])
            self.table.unreserve(self._handle)
            self._handle = -1
            return out
        return bytes(x)


class HeadGather:
    """Head-sharded back to sequence-sharded."""

    def __init__(self, table: A2ABufferTable, world_size: int) -> None:
        self.table = table
        self.world_size = world_size
        self._handle = -1
        self._work: Optional[Tuple[str, int]] = None

    def begin(self, x: bytes) -> None:
        self._handle = self.table.reserve_wait(len(x))  # leak: with one rank there is no work and finish() returns early
        self.table.slab(self._handle)[: len(x)] = x
        self._work = ("all_to_all", self._handle) if self.world_size > 1 else None

    def finish(self, x: bytes) -> bytes:
        if self._work is None:
            return bytes(x)
        out = bytes(self.table.slab(self._handle)[: len(x)])
        self.table.unreserve(self._handle)
        self._work = None
        return out


class UlyssesLayer:
    def __init__(self, table: A2ABufferTable, world_size: int, training: bool = True) -> None:
        self.table = table
        self.world_size = world_size
        self.training = training

    def pad_and_exchange(self, x: bytes) -> bytes:
        pad = -len(x) % self.world_size
        if pad:
            h = self.table.reserve_wait(len(x) + pad)  # clean: near miss, pad does not change before the second test
            slab = self.table.slab(h)
            slab[: len(x)] = x
            x = bytes(slab[: len(x) + pad])
        out = self._exchange(x)
        if pad:
            self.table.unreserve(h)
            out = out[:-pad]
        return out

    def exchange_with_bias(self, x: bytes, bias: Optional[bytes]) -> bytes:
        hb = -1
        if bias is not None:
            hb = self.table.reserve_wait(len(bias))  # leak: released under self.training, taken under bias
            self.table.slab(hb)[: len(bias)] = bias
        out = self._exchange(x)
        if self.training and hb >= 0:
            self.table.unreserve(hb)
        return out

    def exchange_qkv(self, qkv: Sequence[bytes]) -> Optional[List[bytes]]:
        handles: List[int] = []
        for t in qkv:
            h = self.table.reserve(len(t))  # clean: near miss, a refusal unreserves those already taken
            if h < 0:
                for taken in handles:
                    self.table.unreserve(taken)
                return None
            self.table.slab(h)[: len(t)] = t
            handles.append(h)
        outs = [bytes(self.table.slab(h)[: len(t)]) for h, t in zip(handles, qkv)]
        for h in handles:
            self.table.unreserve(h)
        return outs

    def exchange_kv(self, k: bytes, v: bytes) -> Optional[Tuple[bytes, bytes]]:
        hk = self.table.reserve(len(k))  # leak: kept when the buffer for v is refused
        if hk < 0:
            return None
        hv = self.table.reserve(len(v))  # clean: refusal tested, unreserved below
        if hv < 0:
            return None
        self.table.slab(hk)[: len(k)] = k
        self.table.slab(hv)[: len(v)] = v
        out = bytes(self.table.slab(hk)[: len(k)]), bytes(self.table.slab(hv)[: len(v)])
        self.table.unreserve(hv)
        self.table.unreserve(hk)
        return out

    def probe_bandwidth(self, nbytes: int) -> float:
        handle = self.table.reserve(nbytes)  # leak: handle 0 fails the > 0 test and stays reserved
        try:
            if handle < 0:
                return 0.0
            t0 = time.perf_counter()
            self._exchange(bytes(self.table.slab(handle)[:nbytes]))
            return nbytes / max(time.perf_counter() - t0, 1e-9)
        finally:
            if handle > 0:
                self.table.unreserve(handle)

    def reshard(self, chunks: Dict[int, bytes], groups: Sequence[Sequence[int]]) -> int:
        pending: Dict[int, int] = {}
        sent = 0
        for group in groups:
            for peer in group:
                pending[peer] = self.table.reserve_wait(len(chunks[peer]))  # leak: a peer of two groups overwrites its handle
                self.table.slab(pending[peer])[: len(chunks[peer])] = chunks[peer]
                sent += 1
        for handle in pending.values():
            self.table.unreserve(handle)
        return sent

    def reshard_grouped(self, chunks: Dict[int, bytes], groups: Sequence[Sequence[int]]) -> int:
        sent = 0
        for group in groups:
            pending: Dict[int, int] = {}
            for peer in set(group):
                pending[peer] = self.table.reserve_wait(len(chunks[peer]))  # clean: near miss, distinct peers, emptied per group
                sent += 1
            for peer in list(pending):
                self.table.unreserve(pending.pop(peer))
        return sent

    @staticmethod
    def _exchange(x: Any) -> bytes:
        return bytes(x)


if __name__ == "__main__":
    tbl = A2ABufferTable(8, 1 << 10)
    layer = UlyssesLayer(tbl, 4)
    sc = HeadScatter(tbl, overlap=True)
    sc.begin(b"abcd")
    print(sc.finish(b"abcd"), layer.pad_and_exchange(b"abcde"), layer.exchange_qkv([b"q", b"k", b"v"]))
    print(layer.exchange_kv(b"k", b"v"), layer.reshard_grouped({0: b"x", 1: b"y"}, [[0, 1], [1]]))
    ga = HeadGather(tbl, 2)
    ga.begin(b"zz")
    print(ga.finish(b"zz"), layer.exchange_with_bias(b"x", b"b"), layer.reshard({0: b"x"}, [[0], [0]]))
    print(layer.probe_bandwidth(16) > 0)
