from __future__ import annotations

import math
from collections import deque
from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor


class CommBufferPool:
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, capacity: int):
        self.shape = shape
        self.capacity = capacity
        self._free: deque[Tensor] = deque(torch.empty(shape, dtype=dtype, device=device) for _ in range(capacity))

    def acquire(self) -> Tensor:
        if not self._free:
            raise RuntimeError("comm buffer pool exhausted")
        return self._free.popleft()

    def try_acquire(self) -> Optional[Tensor]:
        if not self._free:
            return None
        return self._free.popleft()

    def release(self, buf: Tensor) -> None:
        self._free.append(buf)

    @property
    def available(self) -> int:
        return len(self._free)


class RingExchange:
    def __init__(self, pool: CommBufferPool, group: dist.ProcessGroup):
        self.pool = pool
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._reqs: list = []
        self._k_recv: Optional[Tensor] = None
        self._v_recv: Optional[Tensor] = None

    def _post(self, k: Tensor, v: Tensor, k_recv: Tensor, v_recv: Tensor) -> None:
        nxt, prv = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        ops = [
            dist.P2POp(dist.isend, k, nxt, self.group),
            dist.P2POp(dist.isend, v, nxt, self.group),
            dist.P2POp(dist.irecv, k_recv, prv, self.group),
            dist.P2POp(dist.irecv, v_recv, prv, self.group),
        ]
        self._reqs = dist.batch_isend_irecv(ops)
        self._k_recv, self._v_recv = k_recv, v_recv

    def start(self, k: Tensor, v: Tensor) -> None:
        k_recv = self.pool.acquire()  # clean: parked in _k_recv by _post, finish() hands it out
        v_recv = self.pool.acquire()  # clean: parked in _v_recv by _post, finish() hands it out
        self._post(k, v, k_recv, v_recv)

    def try_start(self, k: Tensor, v: Tensor) -> bool:
        k_recv = self.pool.try_acquire()  # leak: returns False with k_recv still held when the second buffer is not there
        if k_recv is None:
            return False
        v_recv = self.pool.try_acquire()  # clean: near miss, the early return happens only when nothing came
        if v_recv is None:
            return False
        self._post(k, v, k_recv, v_recv)
        return True

    def finish(self) -> tuple[Tensor, Tensor]:
        if self._k_recv is None or self._v_recv is None:
            raise RuntimeError("finish() without start()")
        for req in self._reqs:
            req.wait()
        k, v = self._k_recv, self._v_recv
        self._k_recv = self._v_recv = None
        self._reqs = []
        return k, v


class RingAttention:
    def __init__(self, pool: CommBufferPool, group: dist.ProcessGroup, causal: bool = True):
        self.pool = pool
        self.ring = RingExchange(pool, group)
        self.causal = causal

    def _block(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        lse = torch.logsumexp(scores, dim=-1, keepdim=True)
        return torch.exp(scores - lse) @ v, lse

    @staticmethod
    def _merge(out: Optional[Tensor], lse: Optional[Tensor], o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        if out is None or lse is None:
            return o, s
        new = torch.logaddexp(lse, s)
        return torch.exp(lse - new) * out + torch.exp(s - new) * o, new

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        cur_k, cur_v, owned = k, v, False
        out: Optional[Tensor] = None
        lse: Optional[Tensor] = None
        for step in range(self.ring.world):
            more = step + 1 < self.ring.world
            if more:
                self.ring.start(cur_k, cur_v)
            if not self.causal or step <= self.ring.rank:
                out, lse = self._merge(out, lse, *self._block(q, cur_k, cur_v))
            if more:
                nxt_k, nxt_v = self.ring.finish()  # clean: near miss, the previous pair goes back before the rebind and the last one after the loop
                if owned:
                    self.pool.release(cur_k)
                    self.pool.release(cur_v)
                cur_k, cur_v, owned = nxt_k, nxt_v, True
        if owned:
            self.pool.release(cur_k)
            self.pool.release(cur_v)
        assert out is not None and lse is not None
        return out, lse

    def backward_kv(self, q: Tensor, dout: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dq = torch.zeros_like(q)
        cur_k, cur_v = k, v
        for step in range(self.ring.world - 1):
            self.ring.start(cur_k, cur_v)
            dq += (dout @ cur_v.transpose(-1, -2)) @ cur_k
            cur_k, cur_v = self.ring.finish()  # leak: the pair of the previous step is rebound, only the last pair is released
        dq += (dout @ cur_v.transpose(-1, -2)) @ cur_k
        if self.ring.world > 1:
            self.pool.release(cur_k)
            self.pool.release(cur_v)
        return dq

    def reduce_lse(self, lse: Tensor) -> Tensor:
        scratch = self.pool.acquire()  # leak: the single-rank early return keeps the scratch
        flat = scratch.view(-1)[: lse.numel()].view_as(lse)
        flat.copy_(lse)
        if self.ring.world == 1:
            return lse
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=self.ring.group)
        result = flat.clone()
        self.pool.release(scratch)
        return result

    def all_gather_kv(self, k: Tensor) -> Tensor:
        parts: list[Tensor] = []
        for _ in range(self.ring.world):
            parts.append(self.pool.acquire())  # clean: near miss, the finally walks parts
        try:
            dist.all_gather(parts, k.contiguous(), group=self.ring.group)
            return torch.cat(parts, dim=-2)
        finally:
            for part in parts:
                self.pool.release(part)

    def probe_bandwidth(self, nbytes: int) -> Optional[float]:
        send = self.pool.try_acquire()  # clean: near miss, the missing second buffer sends this one back
        if send is None:
            return None
        recv = self.pool.try_acquire()  # leak: the handled RuntimeError returns None and gives back only send
        if recv is None:
            self.pool.release(send)
            return None
        t0, t1 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        try:
            t0.record()
            peer = self.ring.rank ^ 1
            ops = [dist.P2POp(dist.isend, send, peer, self.ring.group), dist.P2POp(dist.irecv, recv, peer, self.ring.group)]
            for req in dist.batch_isend_irecv(ops):
                req.wait()
            t1.record()
        except RuntimeError:
            self.pool.release(send)
            return None
        t1.synchronize()
        self.pool.release(send)
        self.pool.release(recv)
        return nbytes / max(t0.elapsed_time(t1), 1e-3)
