"""Credit-based flow control for point-to-point sends between stages."""
from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Dict, List, Optional

import torch
import torch.distributed as dist

log = logging.getLogger("p2p")


class Credits:
    """A counter per peer. spend() answers whether the credits were taken."""

    def __init__(self, peers: List[int], each: int) -> None:
        self._left = {p: each for p in peers}
        self._mu = threading.Lock()

    def spend(self, peer: int, n: int = 1) -> bool:
        with self._mu:
            if self._left[peer] < n:
                return False
            self._left[peer] -= n
            return True

    def refund(self, peer: int, n: int = 1) -> None:
        with self._mu:
            self._left[peer] += n


class MessageSlots:
    def __init__(self, count: int, nbytes: int) -> None:
        self._slots = deque(torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(count))

    def dequeue(self) -> Optional[torch.Tensor]:
        return self._slots.popleft() if self._slots else None

    def enqueue(self, t: torch.Tensor) -> None:
        self._slots.append(t)


class Kind(enum.Enum):
    ACT = 0
    GRAD = 1
    META = 2


@dataclass
class Envelope:
    kind: Kind
    peer: int
    slot: Optional[torch.Tensor]
    work: Optional[dist.Work] = None
    on_done: Optional[Callable[["Envelope"], None]] = None


class Endpoint:
    def __init__(self, credits: Credits, slots: MessageSlots) -> None:
        self.credits = credits
        self.slots = slots
        self.outbox: Deque[Envelope] = deque()
        self.parked: Dict[int, List[Envelope]] = {}
        self.rejected = 0

    def send(self, kind: Kind, peer: int, x: torch.Tensor) -> bool:
        if not self.credits.spend(peer):  # clean: near miss, refunded when no slot is there and else by progress()
            return False
        slot = self.slots.dequeue()  # clean: near miss, moved into the outbox, which progress() empties
        if slot is None:
            self.credits.refund(peer)
            return False
        slot[:x.numel()].copy_(x.view(torch.uint8).view(-1))
        env = Envelope(kind, peer, slot, on_done=self._finish)
        env.work = dist.isend(slot, peer)
        self.outbox.append(env)
        return True

    def _finish(self, env: Envelope) -> None:
        self.slots.enqueue(env.slot)
        self.credits.refund(env.peer)

    def progress(self) -> int:
        done = 0
        for _ in range(len(self.outbox)):
            env = self.outbox.popleft()
            if not env.work.is_completed():
                self.outbox.append(env)
                continue
            env.on_done(env)
            done += 1
        return done

    def send_meta(self, peer: int, words: List[int]) -> bool:
        if not self.credits.spend(peer):  # leak: not refunded when the message does not fit into a slot
            return False
        slot = self.slots.dequeue()  # clean: enqueued on both ways
        if slot is None:
            self.credits.refund(peer)
            return False
        msg = torch.tensor(words, dtype=torch.int64, device="cuda").view(torch.uint8)
        if msg.numel() > slot.numel():
            self.slots.enqueue(slot)
            return False
        slot[:msg.numel()].copy_(msg)
        dist.send(slot, peer)
        self.slots.enqueue(slot)
        self.credits.refund(peer)
        return True

    def park(self, peer: int, x: torch.Tensor) -> bool:
        slot = self.slots.dequeue()  # leak: unpark() drops the envelopes of a peer that has no credit
        if slot is None:
            return False
        slot[:x.numel()].copy_(x.view(torch.uint8).view(-1))
        self.parked.setdefault(peer, []).append(Envelope(Kind.ACT, peer, slot))
        return True

    def unpark(self, peer: int) -> int:
        sent = 0
        for env in self.parked.pop(peer, []):
            if not self.credits.spend(peer):  # clean: near miss, refunded by the on_done that progress() calls
                self.rejected += 1
                continue
            env.on_done = self._finish
            env.work = dist.isend(env.slot, peer)
            self.outbox.append(env)
            sent += 1
        return sent

    def recv(self, peer: int, numel: int) -> Optional[torch.Tensor]:
        slot = self.slots.dequeue()  # clean: enqueued after the copy
        if slot is None:
            return None
        dist.recv(slot, peer)
        out = slot[:numel].clone()
        self.slots.enqueue(slot)
        return out

    def recv_any(self, peers: List[int]) -> Optional[torch.Tensor]:
        slot = self.slots.dequeue()  # leak: not enqueued when the sender is not a known peer
        if slot is None:
            return None
        src = dist.recv(slot)
        if src not in peers:
            log.warning("message from %d ignored", src)
            return None
        out = slot.clone()
        self.slots.enqueue(slot)
        return out

    def recv_then(self, peer: int, fn: Callable[[torch.Tensor], None]) -> bool:
        slot = self.slots.dequeue()  # clean: near miss, the callback enqueues it
        if slot is None:
            return False

        def landed(_fut: torch.futures.Future) -> None:
            try:
                fn(slot)
            finally:
                self.slots.enqueue(slot)

        dist.irecv(slot, peer).get_future().add_done_callback(landed)
        return True

    def recv_filtered(self, peer: int, want: Kind, fn: Callable[[torch.Tensor], None]) -> bool:
        slot = self.slots.dequeue()  # leak: the callback returns without enqueueing it for another kind
        if slot is None:
            return False

        def landed(_fut: torch.futures.Future) -> None:
            if int(slot[0]) != want.value:
                return
            fn(slot[1:])
            self.slots.enqueue(slot)

        dist.irecv(slot, peer).get_future().add_done_callback(landed)
        return True

    def burst(self, peer: int, xs: List[torch.Tensor]) -> bool:
        n = len(xs)
        if not self.credits.spend(peer, n):  # leak: one credit is refunded though n were spent
            return False
        for x in xs:
            dist.send(x, peer)
        self.credits.refund(peer)
        return True

    def burst_checked(self, peer: int, xs: List[torch.Tensor]) -> int:
        n = len(xs)
        if not self.credits.spend(peer, n):  # clean: the same n is refunded in finally
            return 0
        try:
            for i, x in enumerate(xs):
                if x.numel() == 0:
                    return i
                dist.send(x, peer)
            return n
        finally:
            self.credits.refund(peer, n)
