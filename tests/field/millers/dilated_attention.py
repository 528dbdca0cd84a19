"""LongNet-style dilated attention with a workspace pool shared by all layers."""
from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

try:
    import torch
    from torch import nn
    import torch.nn.functional as F
except ImportError:
    torch = None
    F = None

    class nn:  # type: ignore[no-redef]
        class Module:
            def __init__(self) -> None:
                self.training = True


class Workspace(NamedTuple):
    key: int
    tensor: Any


class WorkspacePool:
    """Byte buffers rounded to 2 MiB; at most ``limit`` bytes are lent at any time."""

    GRAIN = 2 << 20

    def __init__(self, limit: int, device: str = "cuda") -> None:
        self.limit = limit
        self.device = device
        self.lent = 0
        self._idle: Dict[int, List[Workspace]] = {}

    def alloc(self, nbytes: int) -> Optional[Workspace]:
        size = -(-nbytes // self.GRAIN) * self.GRAIN
        if self.lent + size > self.limit:
            return None
        self.lent += size
        idle = self._idle.get(size)
        if idle:
            return idle.pop()
        return Workspace(size, torch.empty(size, dtype=torch.uint8, device=self.device))

    def free(self, ws: Workspace) -> None:
        self.lent -= ws.key
        self._idle.setdefault(ws.key, []).append(ws)

    @contextlib.contextmanager
    def workspace(self, nbytes: int) -> Iterator[Workspace]:
        ws = self.alloc(nbytes)  # clean: freed in finally, None raises
        if ws is None:
            raise MemoryError(nbytes)
        try:
            yield ws
        finally:
            self.free(ws)


def carve(ws: Workspace, shape: Sequence[int], dtype: Any) -> "torch.Tensor":
    n = 1
    for d in shape:
        n *= d
    width = torch.empty((), dtype=dtype).element_size()
    return ws.tensor[: n * width].view(dtype).view(*shape)


def gather_dilated(x: "torch.Tensor", segment: int, rate: int, offset: int, out: "torch.Tensor") -> "torch.Tensor":
    b, s, h, d = x.shape
    return out.copy_(x.view(b, s // segment, segment, h, d)[:, :, offset::rate].flatten(1, 2))


class DilatedBranch(nn.Module):
    def __init__(self, pool: WorkspacePool, segment: int, rate: int) -> None:
        super().__init__()
        self.pool = pool
        self.segment = segment
        self.rate = rate
        self._saved: Optional[Workspace] = None

    def _nbytes(self, q: "torch.Tensor") -> int:
        return 3 * q.numel() * q.element_size() // self.rate

    def forward(self, q, k, v, offset: int):
        ws = self.pool.alloc(self._nbytes(q))  # leak: training keeps only the output; the early return skips free
        if ws is None:
            return self._dense(q, k, v)
        b, s, h, d = q.shape
        packed = carve(ws, (3, b, s // self.rate, h, d), q.dtype)
        for i, x in enumerate((q, k, v)):
            gather_dilated(x, self.segment, self.rate, offset, packed[i])
        out = self._dense(packed[0], packed[1], packed[2])
        if self.training:
            return out
        self.pool.free(ws)
        return out

    @staticmethod
    def _dense(q, k, v):
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    def hold(self, nbytes: int) -> bool:
        """Workspace that stays with the branch over a chunked prefill."""
        if self._saved is None:
            self._saved = self.pool.alloc(nbytes)  # clean: near miss, kept on the branch until drop()
        return self._saved is not None

    def grow(self, nbytes: int) -> bool:
        bigger = self.pool.alloc(nbytes)  # clean: replaces _saved, which drop() frees; None otherwise
        if bigger is None:
            return False
        self.drop()
        self._saved = bigger
        return True

    def drop(self) -> None:
        if self._saved is not None:
            self.pool.free(self._saved)
            self._saved = None


class DilatedAttention(nn.Module):
    def __init__(self, pool: WorkspacePool, segments: Sequence[int], rates: Sequence[int]) -> None:
        super().__init__()
        self.pool = pool
        self.branches = [DilatedBranch(pool, s, r) for s, r in zip(segments, rates)]
        self._mix: Optional[Workspace] = None
        self._decode: Dict[int, Workspace] = {}

    def forward(self, q, k, v):
        acc = None
        for i, branch in enumerate(self.branches):
            with self.pool.workspace(q.numel() * q.element_size()) as ws:  # clean: context manager
                part = carve(ws, q.shape, q.dtype)
                part.copy_(branch(q, k, v, i % branch.rate))
                acc = part.clone() if acc is None else acc + part
        return acc

    def _mix_workspace(self, nbytes: int) -> Optional[Workspace]:
        if self._mix is not None and self._mix.key < nbytes:
            self._mix = None
        if self._mix is None:
            self._mix = self.pool.alloc(nbytes)  # leak: a too small one is set to None above without free
        return self._mix

    def mix(self, outs, lses):
        ws = self._mix_workspace(sum(o.numel() * o.element_size() for o in outs))  # clean: stays in self._mix, not the caller's
        if ws is None:
            return sum(outs)
        weights = torch.stack(lses).softmax(0)
        dst = carve(ws, outs[0].shape, outs[0].dtype)
        dst.zero_()
        for w, o in zip(weights, outs):
            dst.addcmul_(o, w.unsqueeze(-1))
        return dst.clone()

    def begin_decode(self, seq_id: int, nbytes: int) -> bool:
        ws = self.pool.alloc(nbytes)  # clean: near miss, freed again when the sequence already has one
        if ws is None:
            return False
        if seq_id in self._decode:
            self.pool.free(ws)
            return True
        self._decode[seq_id] = ws
        return True

    def end_decode(self, seq_id: int) -> None:
        ws = self._decode.pop(seq_id, None)
        if ws is not None:
            self.pool.free(ws)

    def reset(self) -> None:
        for seq_id in list(self._decode):
            self.end_decode(seq_id)
        for branch in self.branches:
            branch.drop()
        if self._mix is not None:
            self.pool.free(self._mix)
            self._mix = None


class ChunkedPrefill:
    """Runs prefill in chunks; scores and output each need a workspace."""

    def __init__(self, attn: DilatedAttention, chunk: int) -> None:
        self.attn = attn
        self.pool = attn.pool
        self.chunk = chunk

    def _two(self, score_bytes: int, out_bytes: int) -> Optional[Tuple[Workspace, Workspace]]:
        a = self.pool.alloc(score_bytes)  # clean: freed when b is missing, else returned
        b = self.pool.alloc(out_bytes)  # leak: when the scores do not fit but the output does, only a is looked at
        if a is None or b is None:
            if a is not None:
                self.pool.free(a)
            return None
        return a, b

    def run(self, q, k, v) -> List[Any]:
        outs: List[Any] = []
        for start in range(0, q.shape[1], self.chunk):
            stop = min(start + self.chunk, q.shape[1])
            pair = self._two((stop - start) * stop * 4, q[:, start:stop].numel() * 4)  # leak: a chunk that is only padding continues with the pair held
            if pair is None:
                outs.append(self.attn(q[:, start:stop], k, v))
                continue
            scores, out = pair
            if not k[:, :stop].any():
                continue
            dst = carve(out, q[:, start:stop].shape, q.dtype)
            dst.copy_(self.attn(q[:, start:stop], k[:, :stop], v[:, :stop]))
            outs.append(dst.clone())
            self.pool.free(scores)
            self.pool.free(out)
        return outs

    def largest(self, nbytes: int) -> Optional[int]:
        size = nbytes
        best = None
        while size >= WorkspacePool.GRAIN:
            ws = self.pool.alloc(size)  # leak: the probe that succeeds is only measured
            if ws is not None:
                best = ws.key
                break
            size //= 2
        return best
