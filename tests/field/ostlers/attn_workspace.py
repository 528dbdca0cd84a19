"""Host side of the attention kernels: workspaces by device, split-K decode, varlen prefill, backward."""
from __future__ import annotations

import bisect
import contextlib
import threading
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Tuple

import torch

ALIGN = 256


@dataclass(eq=False)
class Workspace:
    device: int
    nbytes: int
    storage: torch.Tensor

    def view(self, shape: Tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        numel = 1
        for s in shape:
            numel *= s
        width = torch.tensor([], dtype=dtype).element_size()
        return self.storage[: numel * width].view(dtype).view(shape)


_guard = threading.Lock()
_cached: Dict[int, List[Workspace]] = {}
_live: Dict[int, int] = {}
_limit = 8 << 30


def acquire_workspace(nbytes: int, device: int) -> Optional[Workspace]:
    """The smallest cached workspace that is large enough, or a new one; None above the limit."""
    nbytes = -(-nbytes // ALIGN) * ALIGN
    with _guard:
        cache = _cached.setdefault(device, [])
        at = bisect.bisect_left([w.nbytes for w in cache], nbytes)
        if at < len(cache):
            ws = cache.pop(at)
        elif _live.get(device, 0) + nbytes > _limit:
            return None
        else:
            ws = Workspace(device, nbytes, torch.empty(nbytes, dtype=torch.uint8, device=device))
        _live[device] = _live.get(device, 0) + ws.nbytes
        return ws


def release_workspace(ws: Workspace) -> None:
    with _guard:
        _live[ws.device] -= ws.nbytes
        cache = _cached[ws.device]
        cache.insert(bisect.bisect_left([w.nbytes for w in cache], ws.nbytes), ws)


def require_workspace(nbytes: int, device: int) -> Workspace:
    ws = acquire_workspace(nbytes, device)  # clean: returned, None raises
    if ws is None:
        raise MemoryError(f"workspace of {nbytes} bytes on cuda:{device} is over the limit")
    return ws


@contextlib.contextmanager
def scratch(nbytes: int, device: int) -> Iterator[Workspace]:
    ws = require_workspace(nbytes, device)  # clean: released in finally
    try:
        yield ws
    finally:
        release_workspace(ws)


def num_splits(batch: int, heads: int, kv_len: int, sms: int = 132) -> int:
    tiles = batch * heads
    if tiles >= 0.8 * sms:
        return 1
    return max(1, min(kv_len // 256, -(-sms // tiles)))


def decode_splitk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    batch, heads, dim = q.shape
    splits = num_splits(batch, heads, k.shape[2])
    partial = None
    if splits > 1:
        partial = require_workspace(splits * q.numel() * 4, q.device.index)  # clean: near miss, same guard
    out = torch.empty_like(q)
    for s in range(splits):
        rows = slice(s * k.shape[2] // splits, (s + 1) * k.shape[2] // splits)
        scores = torch.einsum("bhd,bhkd->bhk", q, k[:, :, rows]) / dim**0.5
        piece = torch.einsum("bhk,bhkd->bhd", scores.softmax(-1), v[:, :, rows])
        if splits > 1:
            partial.view((splits,) + q.shape)[s].copy_(piece)
        else:
            out.copy_(piece)
    if splits > 1:
        out.copy_(partial.view((splits,) + q.shape).mean(0))
        release_workspace(partial)
    return out


def decode_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, want_lse: bool
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    batch, heads, dim = q.shape
    splits = num_splits(batch, heads, k.shape[2])
    ws = require_workspace(batch * heads * k.shape[2] * 4, q.device.index)  # leak: kept if not want_lse
    scores = ws.view((batch, heads, k.shape[2]))
    torch.einsum("bhd,bhkd->bhk", q, k, out=scores)
    scores /= dim**0.5
    lse = None
    out = torch.einsum("bhk,bhkd->bhd", scores.softmax(-1), v)
    if want_lse:
        lse = torch.logsumexp(scores, dim=-1)
        if splits > 1:
            lse = lse.float()
        release_workspace(ws)
    return out, lse


def prefill_varlen(q: torch.Tensor, cu: List[int], workspace: Optional[Workspace] = None) -> torch.Tensor:
    """Packed causal self attention; uses the caller's workspace when there is one."""
    longest = max(b - a for a, b in zip(cu, cu[1:]))
    nbytes = q.shape[1] * longest * longest * 4
    own = workspace is None or workspace.nbytes < nbytes
    ws = require_workspace(nbytes, q.device.index) if own else workspace  # clean: near miss, released if own
    out = torch.empty_like(q)
    for a, b in zip(cu, cu[1:]):
        if a == b:
            continue
        rows = q[a:b].transpose(0, 1)
        scores = ws.view((q.shape[1], b - a, b - a))
        torch.bmm(rows, rows.transpose(1, 2), out=scores)
        mask = torch.ones(b - a, b - a, device=q.device).triu(1).bool()
        probs = scores.masked_fill(mask, float("-inf")).softmax(-1)
        out[a:b] = torch.bmm(probs, rows).transpose(0, 1)
    if own:
        release_workspace(ws)
    return out


def prefill_chunks(q: torch.Tensor, cu: List[int], budget: int) -> torch.Tensor:
    """As prefill_varlen, in chunks of at most `budget` bytes of scores."""
    outs = []
    ws: Optional[Workspace] = None
    for a, b in zip(cu, cu[1:]):
        need = q.shape[1] * (b - a) ** 2 * 4
        if need > budget:
            outs.append(prefill_varlen(q[a:b], [0, b - a]))
            continue
        if ws is None or ws.nbytes < need:
            ws = require_workspace(need, q.device.index)  # leak: growing drops the smaller workspace
        outs.append(prefill_varlen(q[a:b], [0, b - a], ws))
    if ws is not None:
        release_workspace(ws)
    return torch.cat(outs)


def prefill_grouped(q: torch.Tensor, groups: List[List[int]]) -> List[torch.Tensor]:
    outs = []
    ws: Optional[Workspace] = None
    for cu in groups:
        longest = max(b - a for a, b in zip(cu, cu[1:]))
        need = q.shape[1] * longest * longest * 4
        if ws is not None and ws.nbytes < need:
            release_workspace(ws)
            ws = None
        if ws is None:
            ws = require_workspace(need, q.device.index)  # clean: near miss, the smaller was released
        outs.append(prefill_varlen(q[cu[0] : cu[-1]], [c - cu[0] for c in cu], ws))
    if ws is not None:
        release_workspace(ws)
    return outs


class AttentionBackward:
    """dq is accumulated in fp32 over the key blocks, dk and dv in the dtype of the inputs."""

    def __init__(self, deterministic: bool, block: int = 128):
        self.deterministic = deterministic
        self.block = block
        self._delta: Optional[Workspace] = None

    def preprocess(self, out: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        self._delta = require_workspace(out.numel() * 4, out.device.index)  # clean: near miss, see finish
        delta = self._delta.view(out.shape)
        torch.mul(out.float(), grad.float(), out=delta)
        return delta.sum(-1, keepdim=True)

    def finish(self) -> None:
        if self._delta is not None:
            release_workspace(self._delta)
            self._delta = None

    def run(self, q, k, v, out, grad) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        delta = self.preprocess(out, grad)
        dev = q.device.index
        accum = require_workspace(q.numel() * 4, dev)  # clean: released before the return
        locks = None
        if self.deterministic:
            locks = require_workspace(4 * (q.shape[2] // self.block + 1), dev)  # leak: wrong guard below
            locks.storage.zero_()
        dq = accum.view(q.shape)
        dq.zero_()
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        probs = scores.softmax(-1)
        dv = probs.transpose(-1, -2) @ grad
        ds = probs * (grad @ v.transpose(-1, -2) - delta)
        dq += ds @ k
        dk = ds.transpose(-1, -2) @ q
        result = dq.to(q.dtype)
        if not self.deterministic and locks is not None:
            release_workspace(locks)
        release_workspace(accum)
        self.finish()
        return result, dk, dv


def fits_together(sizes: List[int], device: int) -> bool:
    got: List[Workspace] = []
    ok = True
    for nbytes in sizes:
        ws = acquire_workspace(nbytes, device)  # clean: near miss, all are released after the loop
        if ws is None:
            ok = False
            break
        got.append(ws)
    for ws in got:
        release_workspace(ws)
    return ok


def largest_fit(sizes: List[int], device: int) -> Optional[int]:
    for nbytes in sorted(sizes, reverse=True):
        if acquire_workspace(nbytes, device) is not None:  # leak: tested against None and dropped
            return nbytes
    return None


def softcap_scores(q: torch.Tensor, k: torch.Tensor, cap: float) -> torch.Tensor:
    with scratch(q.shape[0] * k.shape[0] * 4, q.device.index) as ws:  # clean: the context manager releases
        scores = ws.view((q.shape[0], k.shape[0]))
        torch.mm(q, k.t(), out=scores)
        if cap <= 0:
            return scores.clone()
        return torch.tanh(scores / cap) * cap
