"""Ring attention: K/V chunks travel round the ranks in registered buffers."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
import torch.distributed as dist


@dataclass
class CommBuffer:
    tag: int
    data: torch.Tensor
    next: Optional["CommBuffer"] = None


class BufferChain:
    """Registered buffers threaded on an intrusive singly linked list."""

    def __init__(self, count: int, shape: tuple[int, ...], device: torch.device) -> None:
        self._head: Optional[CommBuffer] = None
        for tag in range(count):
            self._head = CommBuffer(tag, torch.empty(shape, device=device), self._head)

    def pull(self) -> CommBuffer:
        if self._head is None:
            raise RuntimeError("ring buffers exhausted")
        buf = self._head
        self._head = buf.next  # clean: unlinked head is given to the caller
        buf.next = None
        return buf

    def try_pull(self) -> Optional[CommBuffer]:
        return self.pull() if self._head is not None else None  # clean: handed through

    def push(self, buf: CommBuffer) -> None:
        buf.next = self._head
        self._head = buf


class RingExchange:
    def __init__(self, chain: BufferChain, group: dist.ProcessGroup) -> None:
        self.chain = chain
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._pending: list[tuple[dist.Work, CommBuffer]] = []

    def post_send(self, chunk: torch.Tensor) -> None:
        buf = self.chain.pull()  # clean: held in _pending, drain pushes it
        buf.data.copy_(chunk)
        work = dist.isend(buf.data, (self.rank + 1) % self.world, group=self.group, tag=buf.tag)
        self._pending.append((work, buf))

    def drain(self) -> None:
        while self._pending:
            work, buf = self._pending.pop()
            work.wait()
            self.chain.push(buf)

    def receive(self) -> Optional[CommBuffer]:
        buf = self.chain.try_pull()  # clean: near miss, a single-rank ring pushes it back before returning None
        if buf is None:
            return None
        if self.world == 1:
            self.chain.push(buf)
            return None
        dist.recv(buf.data, (self.rank - 1) % self.world, group=self.group)
        return buf

    def shift(self, chunk: torch.Tensor) -> torch.Tensor:
        self.post_send(chunk)
        got = self.receive()  # leak: its contents are cloned and the buffer itself is forgotten
        self.drain()
        if got is None:
            return chunk
        return got.data.clone()


def ring_attention(q: torch.Tensor, kv: torch.Tensor, ring: RingExchange, causal: bool) -> torch.Tensor:
    acc = torch.zeros_like(q)
    current = kv
    held: Optional[CommBuffer] = None
    for step in range(ring.world):
        ring.post_send(current)
        incoming = ring.receive()  # clean: near miss, becomes held and is pushed one step later or after the loop
        owner = (ring.rank - step) % ring.world
        if not causal or owner <= ring.rank:
            acc += torch.softmax(q @ current.transpose(-1, -2), -1) @ current
        ring.drain()
        if held is not None:
            ring.chain.push(held)
        held = incoming
        current = incoming.data if incoming is not None else current
    if held is not None:
        ring.chain.push(held)
    return acc


def ring_attention_masked(q: torch.Tensor, kv: torch.Tensor, ring: RingExchange, lens: list[int]) -> torch.Tensor:
    acc = torch.zeros_like(q)
    for step in range(ring.world):
        ring.post_send(kv)
        incoming = ring.receive()  # leak: steps whose owner has no tokens continue without the push
        ring.drain()
        if incoming is None:
            break
        if lens[(ring.rank - step) % ring.world] == 0:
            continue
        acc += torch.softmax(q @ incoming.data.transpose(-1, -2), -1) @ incoming.data
        ring.chain.push(incoming)
    return acc


def backward_ring(dout: torch.Tensor, kv: torch.Tensor, ring: RingExchange) -> tuple[torch.Tensor, torch.Tensor]:
    dk = ring.chain.pull()  # clean: near miss, pushed on the frozen path and at the end
    dv = ring.chain.pull()  # leak: with frozen keys only dk is pushed before the return
    if not kv.requires_grad:
        ring.chain.push(dk)
        return torch.zeros_like(kv), torch.zeros_like(kv)
    dk.data.zero_()
    dv.data.zero_()
    for _ in range(ring.world):
        dk.data.add_(dout * kv)
        dv.data.add_(dout)
    out = dk.data.clone(), dv.data.clone()
    ring.chain.push(dv)
    ring.chain.push(dk)
    return out


def sync_lengths(ring: RingExchange, length: int) -> list[int]:
    lens = [length] * ring.world
    for i in range(ring.world):
        buf = ring.chain.try_pull()  # leak: the early stop on an equal length returns with the buffer
        if buf is None:
            raise RuntimeError("no buffer for length sync")
        buf.data.fill_(length)
        dist.broadcast(buf.data, src=i, group=ring.group)
        lens[i] = int(buf.data.flatten()[0])
        if i == ring.world - 1 and len(set(lens)) == 1:
            return lens
        ring.chain.push(buf)
    return lens


def double_buffer(ring: RingExchange, chunks: list[torch.Tensor]) -> int:
    front = ring.chain.pull()  # clean: both are pushed after the loop, whichever name they have by then
    back = ring.chain.try_pull()  # clean: near miss, swapped with front and pushed when there is one
    sent = 0
    for chunk in chunks:
        front.data.copy_(chunk)
        dist.send(front.data, (ring.rank + 1) % ring.world, group=ring.group)
        sent += 1
        if back is not None:
            front, back = back, front
    ring.chain.push(front)
    if back is not None:
        ring.chain.push(back)
    return sent
