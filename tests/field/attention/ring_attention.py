"""Ring attention over a sequence-parallel group."""
from typing import Dict, List, Optional, Tuple
import logging

import torch
import torch.distributed as dist

LOG = logging.getLogger(__name__)


class CommBuffers:
    def __init__(self, device="cpu"):
        self.device = device
        self._cache: Dict[Tuple, List[torch.Tensor]] = {}

    def get_buffer(self, shape, dtype):
        key = (tuple(shape), dtype)
        lst = self._cache.get(key)
        if lst:
            return lst.pop()
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def return_buffer(self, buf):
        self._cache.setdefault((tuple(buf.shape), buf.dtype), []).append(buf)


class RingComm:
    def __init__(self, group, buffers: CommBuffers):
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.buffers = buffers
        self._ops: List[dist.P2POp] = []
        self._reqs: Optional[list] = None

    def send_recv(self, to_send: torch.Tensor) -> torch.Tensor:
        recv = self.buffers.get_buffer(to_send.shape, to_send.dtype)  # clean: the caller owns the received tensor
        self._ops.append(dist.P2POp(dist.isend, to_send, (self.rank + 1) % self.world, self.group))
        self._ops.append(dist.P2POp(dist.irecv, recv, (self.rank - 1) % self.world, self.group))
        return recv

    def commit(self):
        self._reqs = dist.batch_isend_irecv(self._ops)

    def wait(self):
        for r in self._reqs:
            r.wait()
        self._reqs = None
        self._ops = []


def _merge(out, lse, blk_out, blk_lse):
    if out is None:
        return blk_out, blk_lse
    new_lse = torch.logaddexp(lse, blk_lse)
    out = torch.exp(lse - new_lse) * out + torch.exp(blk_lse - new_lse) * blk_out
    return out, new_lse


def _block(q, k, v, scale):
    s = torch.einsum("qhd,khd->hqk", q, k) * scale
    lse = s.logsumexp(-1)
    o = torch.einsum("hqk,khd->qhd", s.softmax(-1), v)
    return o, lse.transpose(0, 1).unsqueeze(-1)


def ring_forward(comm: RingComm, q, k, v, scale):
    out = lse = None
    for step in range(comm.world):
        if step + 1 < comm.world:
            next_k = comm.send_recv(k)  # leak: each round's received key tensor is overwritten by the next one
            next_v = comm.send_recv(v)  # leak: each round's received value tensor is overwritten by the next one
            comm.commit()
        o, l = _block(q, k, v, scale)
        out, lse = _merge(out, lse, o, l)
        if step + 1 < comm.world:
            comm.wait()
            k, v = next_k, next_v
    return out


def ring_forward_recycled(comm: RingComm, q, k, v, scale):
    out = lse = None
    borrowed = []
    for step in range(comm.world):
        if step + 1 < comm.world:
            nk = comm.send_recv(k)  # clean: near miss, k is rebound but the list still holds every received tensor
            nv = comm.send_recv(v)  # clean: near miss, the list holds it and all go back after the loop
            borrowed.append(nk)
            borrowed.append(nv)
            comm.commit()
        o, l = _block(q, k, v, scale)
        out, lse = _merge(out, lse, o, l)
        if step + 1 < comm.world:
            comm.wait()
            k, v = nk, nv
    for b in borrowed:
        comm.buffers.return_buffer(b)
    return out


def all_gather_kv(comm: RingComm, kv: torch.Tensor) -> torch.Tensor:
    parts = [comm.buffers.get_buffer(kv.shape, kv.dtype) for _ in range(comm.world)]  # clean: returned after the cat copied them
    dist.all_gather(parts, kv, group=comm.group)
    full = torch.cat(parts, dim=0)
    for p in parts:
        comm.buffers.return_buffer(p)
    return full


def reduce_scatter_grad(comm: RingComm, grad: torch.Tensor, average: bool) -> torch.Tensor:
    shard = grad.shape[0] // comm.world
    out = comm.buffers.get_buffer((shard,) + tuple(grad.shape[1:]), grad.dtype)  # clean: handed to the caller, averaged in place
    dist.reduce_scatter(out, list(grad.chunk(comm.world)), group=comm.group)
    if average:
        out.div_(comm.world)
    return out


def reduce_mean(comm: RingComm, grad: torch.Tensor) -> torch.Tensor:
    tmp = comm.buffers.get_buffer(grad.shape, grad.dtype)  # leak: divided into a new tensor, so the buffer itself is gone
    tmp.copy_(grad)
    dist.all_reduce(tmp, group=comm.group)
    tmp = tmp / comm.world
    result = tmp.clone()
    comm.buffers.return_buffer(tmp)
    return result


class SPGradSync:
    def __init__(self, comm: RingComm):
        self.comm = comm

    def sync(self, params, clip: float) -> bool:
        for p in params:
            if p.grad is None:
                continue
            g = reduce_scatter_grad(self.comm, p.grad, True)  # leak: a non-finite shard returns before the hand-back
            if not torch.isfinite(g).all():
                LOG.warning("non-finite gradient, step skipped")
                return False
            shard = p.grad.chunk(self.comm.world)[self.comm.rank]
            shard.copy_(g.clamp(-clip, clip))
            self.comm.buffers.return_buffer(g)
        return True

    def norm(self, params) -> float:
        total = 0.0
        for p in params:
            if p.grad is None:
                continue
            g = reduce_scatter_grad(self.comm, p.grad, False)  # clean: returned on each round
            total += g.pow(2).sum().item()
            self.comm.buffers.return_buffer(g)
        return total ** 0.5
