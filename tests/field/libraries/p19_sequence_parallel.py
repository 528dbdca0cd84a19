"""All-to-all sequence parallelism with optional pooled exchange buffers."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ExchangePool:
    def __init__(self, device: torch.device, keep: int = 16) -> None:
        self.device = device
        self.keep = keep
        self._ready: Deque[Tensor] = deque()
        self.claimed = 0

    def claim(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.claimed += 1
        for _ in range(len(self._ready)):
            cand = self._ready.popleft()  # clean: near miss, returned if it suits and queued again if not
            if cand.numel() == numel and cand.dtype == dtype:
                return cand
            self._ready.append(cand)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def surrender(self, buf: Tensor) -> None:
        self.claimed -= 1
        if len(self._ready) < self.keep:
            self._ready.append(buf.view(-1))


@dataclass
class Outgoing:
    data: Tensor
    owned: bool
    done: Optional[Callable[[Tensor], None]] = None


class SequenceExchange:
    def __init__(self, group=None, pool: Optional[ExchangePool] = None) -> None:
        self.group = group
        self.world = dist.get_world_size(group)
        self.pool = pool
        self.use_pool = pool is not None
        self._queue: List[Outgoing] = []
        self._works: List[Tuple[Any, Outgoing]] = []

    def enable_memory_pool(self, pool: ExchangePool) -> None:
        if self.pool is None:
            self.pool = pool
            self.use_pool = True

    def _packed(self, x: Tensor) -> Outgoing:
        if self.use_pool and not x.is_contiguous():
            flat = self.pool.claim(x.numel(), x.dtype)  # clean: moved into the message, which is marked as owned
            flat.view(x.shape).copy_(x)
            return Outgoing(flat.view(x.shape), owned=True)
        return Outgoing(x.contiguous(), owned=False)

    def _settle(self, msg: Outgoing) -> None:
        if msg.owned:
            self.pool.surrender(msg.data)
        if msg.done is not None:
            msg.done(msg.data)

    def scatter_heads(self, x: Tensor) -> Tensor:
        msg = self._packed(x)  # clean: near miss, _settle surrenders it when the flag says that it is owned
        out = torch.empty_like(msg.data)
        dist.all_to_all_single(out, msg.data, group=self.group)
        self._settle(msg)
        return out

    def gather_heads(self, x: Tensor) -> Tensor:
        msg = self._packed(x.transpose(1, 2))  # leak: in a world of one the packed data is cloned and the message is dropped
        if self.world == 1:
            return msg.data.clone()
        out = torch.empty_like(msg.data)
        dist.all_to_all_single(out, msg.data, group=self.group)
        self._settle(msg)
        return out

    def enqueue(self, x: Tensor, done: Optional[Callable[[Tensor], None]] = None) -> None:
        msg = self._packed(x)  # clean: near miss, queued, launched by kick and settled by drain
        msg.done = done
        self._queue.append(msg)

    def enqueue_owned(self, numel: int, dtype: torch.dtype, fill: Callable[[Tensor], None]) -> None:
        buf = self.pool.claim(numel, dtype)  # leak: the message is marked as not owned, so drain does not surrender it
        fill(buf)
        self._queue.append(Outgoing(buf, owned=False))

    def kick(self) -> None:
        queue, self._queue = self._queue, []
        for msg in queue:
            out = torch.empty_like(msg.data)
            work = dist.all_to_all_single(out, msg.data, group=self.group, async_op=True)
            self._works.append((work, msg))

    def drain(self) -> None:
        self.kick()
        while self._works:
            work, msg = self._works.pop(0)
            work.wait()
            self._settle(msg)

    def scratch_sum(self, parts: List[Tensor]) -> Tensor:
        acc = None
        if self.use_pool:
            acc = self.pool.claim(parts[0].numel(), parts[0].dtype)  # clean: near miss, the flag does not change in between and guards the surrender too
        total = (acc if acc is not None else torch.empty_like(parts[0]).view(-1)).zero_()
        for part in parts:
            total.add_(part.reshape(-1))
        result = total.clone().view_as(parts[0])
        if self.use_pool:
            self.pool.surrender(acc)
        return result

    def scratch_max(self, parts: List[Tensor]) -> Tensor:
        acc = None
        if self.use_pool:
            acc = self.pool.claim(parts[0].numel(), parts[0].dtype)  # leak: surrendered only when there is more than one part
        total = acc if acc is not None else torch.empty_like(parts[0]).view(-1)
        total.copy_(parts[0].reshape(-1))
        for part in parts[1:]:
            torch.maximum(total, part.reshape(-1), out=total)
        result = total.clone().view_as(parts[0])
        if self.use_pool and len(parts) > 1:
            self.pool.surrender(acc)
        return result


class CallbackSender:
    """Sends buffers whose ownership passes to a completion callback."""

    def __init__(self, pool: ExchangePool, group=None) -> None:
        self.pool = pool
        self.group = group
        self.pending: Dict[int, Tuple[Any, Tensor, Callable[[Tensor], None]]] = {}

    def send(self, dst: int, t: Tensor) -> None:
        self.flush(dst)
        buf = self.pool.claim(t.numel(), t.dtype)  # clean: near miss, surrendered by the callback, and flush runs before the entry is replaced
        buf.copy_(t.reshape(-1))
        work = dist.isend(buf, dst, self.group)
        self.pending[dst] = (work, buf, self.pool.surrender)

    def send_quiet(self, dst: int, t: Tensor) -> None:
        self.flush(dst)
        buf = self.pool.claim(t.numel(), t.dtype)  # leak: the callback it is stored with does nothing
        buf.copy_(t.reshape(-1))
        work = dist.isend(buf, dst, self.group)
        self.pending[dst] = (work, buf, lambda b: None)

    def flush(self, dst: int) -> None:
        entry = self.pending.pop(dst, None)
        if entry is not None:
            work, buf, done = entry
            work.wait()
            done(buf)

    def flush_all(self) -> None:
        for dst in list(self.pending):
            self.flush(dst)


class UlyssesAttention(nn.Module):
    def __init__(self, exchange: SequenceExchange, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.exchange = exchange
        self.heads = heads
        self.causal = causal

    def _mask(self, n: int, like: Tensor) -> Optional[Tensor]:
        if not self.causal:
            return None
        flat = self.exchange.pool.claim(n * n, like.dtype)  # clean: handed to the caller
        return flat.fill_(float("-inf")).view(n, n).triu_(1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (self.exchange.scatter_heads(t) for t in (q, k, v))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        mask = self._mask(q.shape[-2], q)  # clean: near miss, it is None exactly when there is nothing to surrender
        if mask is not None:
            scores = scores + mask
            self.exchange.pool.surrender(mask)
        return self.exchange.scatter_heads(torch.softmax(scores, dim=-1) @ v)

    def entropy(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        mask = self._mask(q.shape[-2], q)  # leak: added to the scores under another name and then dropped
        bias = mask if mask is not None else torch.zeros_like(scores)
        logp = torch.log_softmax(scores + bias, dim=-1)
        return -(logp.exp() * logp.nan_to_num(neginf=0.0)).sum(-1)
