"""Registered buffers for custom all-reduce and expert all-to-all."""
from __future__ import annotations

import logging
from typing import Dict, List, Optional, Tuple

logger = logging.getLogger(__name__)


class CommError(RuntimeError):
    pass


class CommBuffer:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.data: List[float] = []
        self.handle: Optional[int] = None


class HandleRegistry:
    """IPC registration of buffers with the peers."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._live: Dict[int, CommBuffer] = {}
        self._next = 1

    def register(self, buf: CommBuffer) -> int:
        if len(self._live) >= self._limit:
            raise CommError("registration cache is full")
        handle, self._next = self._next, self._next + 1
        self._live[handle] = buf
        return handle

    def deregister(self, handle: int) -> None:
        self._live.pop(handle)


class CommBufferPool:
    def __init__(self, sizes: Dict[int, int]) -> None:
        self._bins: Dict[int, List[CommBuffer]] = {
            s: [CommBuffer(s) for _ in range(n)] for s, n in sorted(sizes.items())
        }

    def obtain(self, nbytes: int) -> Optional[CommBuffer]:
        for size, spare in self._bins.items():
            if size >= nbytes and spare:
                return spare.pop()
        return None

    def restore(self, buf: CommBuffer) -> None:
        buf.data = []
        self._bins[buf.nbytes].append(buf)


class CommManager:
    """Pairs a pooled buffer with its registration."""

    def __init__(self, pool: CommBufferPool, registry: HandleRegistry) -> None:
        self.pool = pool
        self.registry = registry

    def open_buffer(self, nbytes: int) -> Optional[CommBuffer]:
        buf = self.pool.obtain(nbytes)  # clean: near miss, restored where registration fails, else returned
        if buf is None:
            return None
        try:
            buf.handle = self.registry.register(buf)  # clean: kept in the buffer, close_buffer deregisters
        except CommError:
            self.pool.restore(buf)
            return None
        return buf

    def close_buffer(self, buf: CommBuffer) -> None:
        if buf.handle is not None:
            self.registry.deregister(buf.handle)
            buf.handle = None
        self.pool.restore(buf)

    def open_pair(self, send_bytes: int, recv_bytes: int) -> Optional[Tuple[CommBuffer, CommBuffer]]:
        send = self.open_buffer(send_bytes)  # clean: near miss, closed where there is no second
        recv = self.open_buffer(recv_bytes)  # leak: where there is no room to send but a smaller recv is found, recv is dropped
        if send is None or recv is None:
            if send is not None:
                self.close_buffer(send)
            return None
        return send, recv


class Communicator:
    def __init__(self, manager: CommManager, world: int) -> None:
        self.manager = manager
        self.world = world
        self.persistent: Dict[str, CommBuffer] = {}

    def _workspace(self, nbytes: int) -> CommBuffer:
        buf = self.manager.open_buffer(nbytes)  # clean: None raises, else returned
        if buf is None:
            raise CommError(f"no buffer of {nbytes} bytes")
        return buf

    def _reduce_into(self, values: List[float]) -> CommBuffer:
        ws = self._workspace(8 * len(values))  # clean: returned with the result in it
        ws.data = [v * self.world for v in values]
        return ws

    def all_reduce(self, values: List[float]) -> List[float]:
        ws = self._reduce_into(values)  # clean: copied, then closed
        out = list(ws.data)
        self.manager.close_buffer(ws)
        return out

    def all_reduce_mean(self, values: List[float]) -> List[float]:
        if self.world == 1:
            return values
        return [v / self.world for v in self._reduce_into(values).data]  # leak: the pooled result is read and dropped

    def fused_norm(self, values: List[float], eps: float) -> List[float]:
        ws = self._reduce_into(values)  # leak: the zero-norm shortcut returns before the close
        norm = sum(v * v for v in ws.data) ** 0.5
        if norm < eps:
            return [0.0] * len(values)
        out = [v / norm for v in ws.data]
        self.manager.close_buffer(ws)
        return out

    def try_all_reduce(self, values: List[float]) -> Optional[List[float]]:
        try:
            ws = self._workspace(8 * len(values))  # leak: the second CommError is caught, the first workspace is lost
            tmp = self._workspace(8 * len(values))  # clean: nothing fails after it
            tmp.data = list(values)
            ws.data = [v * self.world for v in tmp.data]
            out = list(ws.data)
            self.manager.close_buffer(tmp)
            self.manager.close_buffer(ws)
            return out
        except CommError:
            logger.warning("falling back to NCCL")
            return None

    def all_to_all(self, chunks: List[List[float]]) -> List[float]:
        out: List[float] = []
        for chunk in chunks:
            nbytes = 8 * max(len(chunk), 1)
            pair = self.manager.open_pair(nbytes, nbytes)  # clean: near miss, both closed before the continue
            if pair is None:
                break
            send, recv = pair
            if not chunk:
                self.manager.close_buffer(send)
                self.manager.close_buffer(recv)
                continue
            recv.data = list(chunk)
            out.extend(recv.data)
            for buf in pair:
                self.manager.close_buffer(buf)
        return out

    def reduce_scatter(self, values: List[float], rank: int) -> List[float]:
        share = len(values) // self.world
        pair = self.manager.open_pair(8 * len(values), 8 * share)  # leak: only the receiving buffer is closed
        if pair is None:
            return values[rank * share:(rank + 1) * share]
        send, recv = pair
        send.data = [v * self.world for v in values]
        recv.data = send.data[rank * share:(rank + 1) * share]
        out = list(recv.data)
        self.manager.close_buffer(recv)
        return out

    def capture(self, name: str, nbytes: int) -> CommBuffer:
        """Buffers seen by a captured graph stay registered until `close`."""
        buf = self.persistent.get(name)
        if buf is not None and buf.nbytes >= nbytes:
            return buf
        if buf is not None:
            self.manager.close_buffer(self.persistent.pop(name))
        self.persistent[name] = self._workspace(nbytes)  # clean: near miss, the smaller one was closed, close() closes all
        return self.persistent[name]

    def close(self) -> None:
        for buf in self.persistent.values():
            self.manager.close_buffer(buf)
        self.persistent.clear()
