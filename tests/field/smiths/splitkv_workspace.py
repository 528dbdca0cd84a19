"""Scratch workspaces for the split-KV decode kernels."""
from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence

try:
    import torch
except ImportError:  # CPU-only CI
    torch = None

_ALIGN = 256


def _round_up(n: int, align: int = _ALIGN) -> int:
    return (n + align - 1) // align * align


def _new_buffer(size: int, device: str):
    if torch is not None and device != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    return bytearray(size)


@dataclass
class Workspace:
    nbytes: int
    buf: object
    live: bool = False


class WorkspacePool:
    """Size-bucketed scratch memory. Every acquire() is paired with a release()."""

    def __init__(self, device: str = "cpu", max_cached: int = 32) -> None:
        self.device = device
        self.max_cached = max_cached
        self._free: Dict[int, List[Workspace]] = defaultdict(list)
        self._mu = threading.Lock()
        self.live = 0

    def acquire(self, nbytes: int) -> Workspace:
        size = _round_up(nbytes)
        with self._mu:
            bucket = self._free.get(size)
            ws = bucket.pop() if bucket else Workspace(size, _new_buffer(size, self.device))
            ws.live = True
            self.live += 1
        return ws

    def release(self, ws: Workspace) -> None:
        with self._mu:
            if not ws.live:
                raise RuntimeError("workspace released twice")
            ws.live = False
            self.live -= 1
            if len(self._free[ws.nbytes]) < self.max_cached:
                self._free[ws.nbytes].append(ws)

    def grow(self, ws: Workspace, nbytes: int) -> Workspace:
        if ws.nbytes >= nbytes:
            return ws
        bigger = self.acquire(nbytes)  # clean: returned in place of the old one
        bigger.buf[: ws.nbytes] = ws.buf[: ws.nbytes]
        self.release(ws)
        return bigger


class SplitKVDecode:
    def __init__(self, pool: WorkspacePool, heads: int, head_dim: int, max_splits: int = 8) -> None:
        self.pool = pool
        self.heads = heads
        self.head_dim = head_dim
        self.max_splits = max_splits
        self.launches = 0

    def _splits(self, seqlen: int) -> int:
        return max(1, min(self.max_splits, seqlen // 256))

    def _partials(self, splits: int) -> Workspace:
        return self.pool.acquire(splits * self.heads * self.head_dim * 4)  # clean: wrapper, the caller gets it

    def _launch(self, q, ws: Optional[Workspace], aux: Optional[Workspace], out) -> None:
        self.launches += 1
        out[:1] = q[:1]

    def decode(self, q, seqlen: int, out):
        splits = self._splits(seqlen)
        partial = self._partials(splits)  # leak: the single-split return skips the release
        if splits == 1:
            self._launch(q, None, None, out)
            return out
        lse = self.pool.acquire(splits * self.heads * 4)  # clean: released below on the only way out
        self._launch(q, partial, lse, out)
        self.pool.release(lse)
        self.pool.release(partial)
        return out

    def decode_varlen(self, q, seqlens: Sequence[int], outs) -> None:
        ws = self._partials(1)  # leak: rebound when a longer row needs more
        for row, seqlen in enumerate(seqlens):
            need = self._splits(seqlen) * self.heads * self.head_dim * 4
            if need > ws.nbytes:
                ws = self.pool.acquire(need)  # leak: rebound by the next longer row
            self._launch(q, ws, None, outs[row])
        self.pool.release(ws)

    def decode_ragged(self, q, seqlens: Sequence[int], outs) -> None:
        ws = self._partials(1)  # clean: near miss, grow() gives the old one back
        for row, seqlen in enumerate(seqlens):
            need = self._splits(seqlen) * self.heads * self.head_dim * 4
            ws = self.pool.grow(ws, need)  # clean: near miss, each rebinding consumes the one before
            self._launch(q, ws, None, outs[row])
        self.pool.release(ws)

    def prefill(self, q, seqlen: int, out, causal: bool = True):
        mask_ws: Optional[Workspace] = None
        if not causal:
            mask_ws = self.pool.acquire(max(1, seqlen * seqlen // 8))  # clean: near miss, released under its own None check
        ws = self.pool.acquire(seqlen * 4)  # clean: finally
        try:
            self._launch(q, ws, mask_ws, out)
            if seqlen <= 16:
                return out
            self._launch(q, ws, mask_ws, out)
            return out
        finally:
            self.pool.release(ws)
            if mask_ws is not None:
                self.pool.release(mask_ws)

    def _reduce(self, rows: Sequence[float]) -> Workspace:
        red = self.pool.acquire(len(rows))  # clean: returned to the caller
        for i, r in enumerate(rows):
            red.buf[i] = int(r) & 0xFF
        return red

    def lse_snapshot(self, rows: Sequence[float]) -> bytes:
        return bytes(self._reduce(rows).buf[: len(rows)])  # leak: the bytes are copied out, the workspace is dropped

    def lse_into(self, rows: Sequence[float], dst: bytearray) -> None:
        red = self._reduce(rows)  # clean: released after the copy
        dst[:] = red.buf[: len(dst)]
        self.pool.release(red)

    def merge_states(self, left: Sequence[float], right: Sequence[float]) -> Optional[bytes]:
        a = self._reduce(left)  # clean: released on both ways out
        b = self._reduce(right)  # leak: the length mismatch return releases only the left one
        if len(left) != len(right):
            self.pool.release(a)
            return None
        merged = bytes(max(x, y) for x, y in zip(a.buf[: len(left)], b.buf[: len(right)]))
        self.pool.release(a)
        self.pool.release(b)
        return merged


class PerStreamWorkspaces:
    """One persistent workspace for each stream; the kernels borrow it between launches."""

    def __init__(self, pool: WorkspacePool) -> None:
        self.pool = pool
        self._by_stream: Dict[int, Workspace] = {}

    def get(self, stream: int, nbytes: int) -> Workspace:
        ws = self._by_stream.get(stream)
        if ws is not None and ws.nbytes >= nbytes:
            return ws
        if ws is not None:
            self.pool.release(ws)
        ws = self.pool.acquire(nbytes)  # clean: near miss, the table owns it and the old one went back first
        self._by_stream[stream] = ws
        return ws

    def drop(self, stream: int) -> None:
        ws = self._by_stream.pop(stream, None)
        if ws is not None:
            self.pool.release(ws)

    def clear(self) -> None:
        for stream in list(self._by_stream):
            self.drop(stream)


def main() -> None:
    pool = WorkspacePool()
    attn = SplitKVDecode(pool, heads=8, head_dim=64)
    q, out = bytearray(16), bytearray(16)
    attn.decode(q, 4096, out)
    attn.decode_ragged(q, [128, 700, 4096], [bytearray(4) for _ in range(3)])
    attn.prefill(q, 64, out, causal=False)
    attn.lse_into([1.0, 2.0], bytearray(2))
    streams = PerStreamWorkspaces(pool)
    streams.get(0, 1024)
    streams.get(0, 4096)
    streams.clear()
    print("live workspaces:", pool.live)


if __name__ == "__main__":
    main()
