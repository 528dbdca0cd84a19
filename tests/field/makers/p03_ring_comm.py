"""Ring communication for sequence-parallel attention with recycled buffers."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Deque, List, Optional, Tuple

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class CommBuffer:
    data: torch.Tensor
    slot: int


class CommBufferRing:
    """Fixed number of slots, each with one flat buffer."""

    def __init__(self, slots: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._buffers = [CommBuffer(torch.empty(numel, dtype=dtype, device=device), i) for i in range(slots)]
        self._busy = [False] * slots
        self._ready: Deque[int] = deque(range(slots))

    def checkout(self) -> Optional[CommBuffer]:
        if not self._ready:
            return None
        slot = self._ready.popleft()  # clean: the slot goes out inside its CommBuffer
        self._busy[slot] = True
        return self._buffers[slot]

    def checkin(self, buf: CommBuffer) -> None:
        if not self._busy[buf.slot]:
            raise RuntimeError(f"slot {buf.slot} is not checked out")
        self._busy[buf.slot] = False
        self._ready.append(buf.slot)


class RingComm:
    def __init__(self, group: Optional[dist.ProcessGroup], ring: CommBufferRing) -> None:
        self.group = group
        self.ring = ring
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.send_to = (self.rank + 1) % self.world
        self.recv_from = (self.rank - 1) % self.world
        self._pending: List[Tuple[CommBuffer, CommBuffer, list]] = []

    def post(self, t: torch.Tensor) -> bool:
        send = self.ring.checkout()  # leak: lost when there is no buffer left for the receive side
        if send is None:
            return False
        recv = self.ring.checkout()  # clean: moved into _pending, which wait() drains
        if recv is None:
            logger.warning("rank %d: no receive buffer", self.rank)
            return False
        send.data[: t.numel()].copy_(t.reshape(-1))
        ops = [
            dist.P2POp(dist.isend, send.data, self.send_to, self.group),
            dist.P2POp(dist.irecv, recv.data, self.recv_from, self.group),
        ]
        self._pending.append((send, recv, dist.batch_isend_irecv(ops)))
        return True

    def wait(self) -> List[CommBuffer]:
        received = []
        while self._pending:
            send, recv, works = self._pending.pop(0)  # clean: send is checked in, recv goes to the caller
            for w in works:
                w.wait()
            self.ring.checkin(send)
            received.append(recv)
        return received

    def drain(self) -> None:
        for recv in self.wait():  # clean: every received buffer is checked in
            self.ring.checkin(recv)


def ring_attention(comm: RingComm, q, k, v, scale: float) -> torch.Tensor:
    acc = torch.zeros_like(q)
    lse = torch.full(q.shape[:-1], float("-inf"), device=q.device)
    cur = k
    held: Optional[CommBuffer] = None
    for step in range(comm.world):
        if step + 1 < comm.world:
            comm.post(cur)
        scores = torch.matmul(q, cur.transpose(-2, -1)) * scale
        new_lse = torch.logaddexp(lse, scores.logsumexp(-1))
        acc = acc * (lse - new_lse).exp().unsqueeze(-1)
        acc = acc + torch.matmul((scores - new_lse.unsqueeze(-1)).exp(), v)
        lse = new_lse
        if held is not None:
            comm.ring.checkin(held)
            held = None
        for buf in comm.wait():  # clean: near miss, post() leaves at most one, which the next step or the end checks in
            held = buf
            cur = buf.data[: k.numel()].view_as(k)
    if held is not None:
        comm.ring.checkin(held)
    return acc


def ring_attention_causal(comm: RingComm, q, k, v, scale: float) -> torch.Tensor:
    acc = torch.zeros_like(q)
    cur = k
    for step in range(comm.world):
        if step + 1 < comm.world:
            comm.post(cur)
        if step <= comm.rank:
            acc += torch.matmul((torch.matmul(q, cur.transpose(-2, -1)) * scale).softmax(-1), v)
        for buf in comm.wait():  # leak: the data is cloned and the buffer never checked in
            cur = buf.data[: k.numel()].view_as(k).clone()
    return acc


def all_gather_ring(comm: RingComm, x: torch.Tensor) -> List[torch.Tensor]:
    parts = [x]
    cur = x
    for _ in range(comm.world - 1):
        if not comm.post(cur):
            break
        for buf in comm.wait():  # clean: near miss, cloned and then checked in
            cur = buf.data[: x.numel()].view_as(x).clone()
            comm.ring.checkin(buf)
        parts.append(cur)
    return parts


def reduce_scatter_ring(comm: RingComm, chunks: List[torch.Tensor]) -> torch.Tensor:
    total = chunks[comm.rank]
    scratch = comm.ring.checkout()  # leak: the single-rank return keeps the scratch
    if scratch is None:
        raise RuntimeError("no scratch buffer")
    if comm.world == 1:
        return total
    work = scratch.data[: total.numel()].view_as(total)
    for i in range(1, comm.world):
        work.copy_(chunks[(comm.rank - i) % comm.world])
        dist.all_reduce(work, group=comm.group)
        total = total + work
    comm.ring.checkin(scratch)
    return total


def probe_bandwidth(comm: RingComm, repeats: int) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    buf = comm.ring.checkout()  # clean: near miss, both branches check in
    if buf is None:
        return 0.0
    if comm.world < 2:
        comm.ring.checkin(buf)
        return 0.0
    start.record()
    for _ in range(repeats):
        dist.broadcast(buf.data, src=0, group=comm.group)
    end.record()
    end.synchronize()
    elapsed = start.elapsed_time(end)
    comm.ring.checkin(buf)
    return buf.data.nbytes * repeats / max(elapsed, 1e-6)


def handshake(comm: RingComm, token: int) -> bool:
    out = comm.ring.checkout()  # leak: the timed-out branch checks in only the reply
    reply = comm.ring.checkout()  # clean: all branches check it in when it is there
    if out is None or reply is None:
        for b in (out, reply):
            if b is not None:
                comm.ring.checkin(b)
        return False
    out.data[0] = token
    req = dist.irecv(reply.data, comm.recv_from, comm.group)
    dist.send(out.data, comm.send_to, comm.group)
    if not req.wait():
        comm.ring.checkin(reply)
        return False
    ok = int(reply.data[0]) == token
    comm.ring.checkin(out)
    comm.ring.checkin(reply)
    return ok
