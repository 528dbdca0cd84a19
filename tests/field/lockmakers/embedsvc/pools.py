"""Pools of the embedding service.

ArenaPool   token and activation tensors by (rows, cols)
ClientPool  gRPC-like clients of the index shards
"""
from __future__ import annotations

import contextlib
import threading

import torch


class PoolDry(RuntimeError):
    pass


class ArenaPool:
    def __init__(self, per_shape: int = 8):
        self.per_shape = per_shape
        self._cached: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._out: dict[tuple[int, int], int] = {}

    def lend(self, rows: int, cols: int) -> torch.Tensor | None:
        key = (rows, cols)
        if self._out.get(key, 0) >= self.per_shape:
            return None
        self._out[key] = self._out.get(key, 0) + 1
        cached = self._cached.get(key)
        if cached:
            return cached.pop()  # clean: returned to the caller
        return torch.empty(rows, cols)

    def lend_or_raise(self, rows: int, cols: int) -> torch.Tensor:
        buf = self.lend(rows, cols)  # clean: returned to the caller, None raises
        if buf is None:
            raise PoolDry(f"{rows}x{cols}")
        return buf

    def lend_best(self, rows: int, widths: list[int]) -> torch.Tensor | None:
        best = None
        for cols in widths:
            buf = self.lend(rows, cols)  # leak: a wider buffer replaces best without the narrower one coming back
            if buf is None:
                continue
            if best is None or buf.shape[1] > best.shape[1]:
                best = buf
            else:
                self.repay(buf)
        return best

    def repay(self, buf: torch.Tensor) -> None:
        key = tuple(buf.shape)
        self._out[key] -= 1
        self._cached.setdefault(key, []).append(buf)


class ShardClient:
    def __init__(self, addr: str):
        self.addr = addr
        self.dead = False

    def add(self, ids: list[int], vecs: torch.Tensor) -> bool:
        return not self.dead

    def query(self, vec: torch.Tensor, k: int) -> list[int]:
        return [] if self.dead else list(range(k))


class ClientPool:
    def __init__(self, addrs: list[str], per_addr: int):
        self._mu = threading.Lock()
        self._idle = {a: [ShardClient(a) for _ in range(per_addr)] for a in addrs}
        self.addrs = addrs

    def dial(self, addr: str) -> ShardClient | None:
        with self._mu:
            stack = self._idle[addr]
            return stack.pop() if stack else None  # clean: returned to the caller

    def dial_live(self, addr: str) -> ShardClient | None:
        c = self.dial(addr)  # leak: a dead client is not hung up before None is returned
        if c is None or c.dead:
            return None
        return c

    def hang_up(self, c: ShardClient) -> None:
        with self._mu:
            self._idle[c.addr].append(c)

    @contextlib.contextmanager
    def dialed(self, addr: str):
        c = self.dial(addr)  # clean: hung up in finally
        if c is None:
            raise PoolDry(addr)
        try:
            yield c
        finally:
            self.hang_up(c)


def open_pools(addrs: list[str]) -> tuple[ArenaPool, ClientPool]:
    return ArenaPool(), ClientPool(addrs, per_addr=4)
