"""1F1B pipeline stage runner. P2P buffers come from a per-stage ring, in-flight microbatches from a credit gate."""
from __future__ import annotations

import enum
import threading
import time
from collections import deque
from typing import Callable, Iterator, Optional

import torch
import torch.distributed as dist


class Op(enum.Enum):
    FWD = "f"
    BWD = "b"
    FLUSH = "x"


class CreditGate:
    """Bounded number of microbatches in flight on a stage."""

    def __init__(self, credits: int):
        self._credits = credits
        self._cond = threading.Condition()

    def enter(self, timeout: Optional[float] = None) -> bool:
        with self._cond:
            if not self._cond.wait_for(lambda: self._credits > 0, timeout):
                return False
            self._credits -= 1
            return True

    def leave(self) -> None:
        with self._cond:
            self._credits += 1
            self._cond.notify()


class P2PRing:
    def __init__(self, depth: int, shape, dtype=torch.bfloat16):
        self._slots = [torch.empty(shape, dtype=dtype, device="cuda") for _ in range(depth)]
        self._idle = deque(range(depth))

    def claim(self) -> int:
        """Index of a free slot, or -1."""
        return self._idle.popleft() if self._idle else -1

    def tensor(self, idx: int) -> torch.Tensor:
        return self._slots[idx]

    def unclaim(self, idx: int) -> None:
        self._idle.append(idx)


class Microbatch:
    def __init__(self, mb_id: int):
        self.mb_id = mb_id
        self.in_idx = -1
        self.out_idx = -1
        self.loss = None
        self.on_done: list[Callable[[], None]] = []

    def finish(self) -> None:
        for cb in self.on_done:
            cb()
        self.on_done.clear()


class Stage:
    def __init__(self, module, ring: P2PRing, gate: CreditGate, prev: int, nxt: int):
        self.module = module
        self.ring = ring
        self.gate = gate
        self.prev = prev
        self.next = nxt
        self.live: dict[int, Microbatch] = {}
        self.sent: deque = deque()
        self.first = prev < 0
        self.last = nxt < 0

    # -- receive side ----------------------------------------------------------------------

    def recv_activation(self) -> int:
        idx = self.ring.claim()  # clean: the index is handed to the caller
        if idx < 0:
            return -1
        dist.recv(self.ring.tensor(idx), src=self.prev)
        return idx

    def forward(self, mb_id: int) -> bool:
        if not self.gate.enter(timeout=5.0):  # clean: left again when there is no slot, else by backward
            return False
        mb = Microbatch(mb_id)
        if not self.first:
            mb.in_idx = self.recv_activation()  # clean: kept in the microbatch, backward unclaims it
            if mb.in_idx < 0:
                self.gate.leave()
                return False
        x = None if self.first else self.ring.tensor(mb.in_idx)
        y = self.module(mb_id, x)
        if self.last:
            mb.loss = y
        self.live[mb_id] = mb
        return True

    def backward(self, mb_id: int, grad: Optional[torch.Tensor]) -> None:
        mb = self.live.pop(mb_id)
        if self.last:
            mb.loss.backward()
        else:
            self.module.backward_from(mb_id, grad)
        if not self.first:
            self.ring.unclaim(mb.in_idx)
        mb.finish()
        self.gate.leave()

    def probe_forward(self, mb_id: int) -> Optional[torch.Tensor]:
        """Forward without backward, used by the shape inference pass."""
        if not self.gate.enter(timeout=1.0):  # leak: the return for an empty ring keeps the credit
            return None
        idx = self.recv_activation()  # clean: unclaimed right after the module ran
        if idx < 0:
            return None
        with torch.no_grad():
            y = self.module(mb_id, self.ring.tensor(idx))
        self.ring.unclaim(idx)
        self.gate.leave()
        return y

    def peek_norm(self) -> float:
        idx = self.recv_activation()  # leak: only the norm leaves the function, the slot stays claimed
        if idx < 0:
            return -1.0
        return self.ring.tensor(idx).float().norm().item()

    # -- send side -------------------------------------------------------------------------

    def send_async(self, y: torch.Tensor) -> bool:
        idx = self.ring.claim()  # clean: waits in `sent` and reap unclaims it
        if idx < 0:
            return False
        buf = self.ring.tensor(idx)
        buf.copy_(y)
        self.sent.append((dist.isend(buf, dst=self.next), idx))
        return True

    def reap(self, block: bool = False) -> int:
        n = 0
        while self.sent:
            work, idx = self.sent[0]
            if block:
                work.wait()
            elif not work.is_completed():
                break
            self.sent.popleft()
            self.ring.unclaim(idx)
            n += 1
        return n

    def send_with_callback(self, mb: Microbatch, y: torch.Tensor) -> None:
        idx = self.ring.claim()  # clean: near miss, the microbatch's finish callback unclaims it
        if idx < 0:
            dist.send(y, dst=self.next)
            return
        self.ring.tensor(idx).copy_(y)
        dist.isend(self.ring.tensor(idx), dst=self.next)
        mb.out_idx = idx
        mb.on_done.append(lambda: self.ring.unclaim(idx))

    def broadcast_bwd(self, grads: list[torch.Tensor]) -> int:
        sent = 0
        for g in grads:
            idx = self.ring.claim()  # leak: slots of zero-sized gradients are skipped by the continue
            if idx < 0:
                self.reap(block=True)
                continue
            if g.numel() == 0:
                continue
            self.ring.tensor(idx).copy_(g)
            dist.send(self.ring.tensor(idx), dst=self.prev)
            self.ring.unclaim(idx)
            sent += 1
        return sent

    def exchange(self, y: torch.Tensor, want_reply: bool) -> Optional[torch.Tensor]:
        out = self.ring.claim()  # leak: stays claimed when the second claim fails
        if out < 0:
            return None
        back = self.ring.claim()  # clean: unclaimed after the optional reply was cloned
        if back < 0:
            return None
        self.ring.tensor(out).copy_(y)
        dist.send(self.ring.tensor(out), dst=self.next)
        reply = None
        if want_reply:
            dist.recv(self.ring.tensor(back), src=self.next)
            reply = self.ring.tensor(back).clone()
        self.ring.unclaim(back)
        self.ring.unclaim(out)
        return reply


def one_f_one_b(n_micro: int, n_warm: int) -> Iterator[tuple[Op, int]]:
    for i in range(min(n_warm, n_micro)):
        yield Op.FWD, i
    f, b = min(n_warm, n_micro), 0
    while b < n_micro:
        if f < n_micro:
            yield Op.FWD, f
            f += 1
        yield Op.BWD, b
        b += 1
    yield Op.FLUSH, -1


def run_step(stage: Stage, n_micro: int, n_warm: int) -> int:
    ran = 0
    for op, mb_id in one_f_one_b(n_micro, n_warm):
        if op is Op.FWD:
            while not stage.forward(mb_id):
                stage.reap(block=False)
                time.sleep(0.001)
        elif op is Op.BWD:
            stage.backward(mb_id, None)
            ran += 1
        else:
            stage.reap(block=True)
    return ran


def grad_slots(ring: P2PRing, n: int) -> Iterator[torch.Tensor]:
    """Yield up to n scratch tensors, each valid until the next is asked for."""
    for _ in range(n):
        idx = ring.claim()  # clean: unclaimed when the generator is resumed or closed
        if idx < 0:
            return
        try:
            yield ring.tensor(idx)
        finally:
            ring.unclaim(idx)


def warm_up_ring(ring: P2PRing, n: int) -> int:
    touched = 0
    for buf in grad_slots(ring, n):  # clean: near miss, the generator is run to its end
        buf.zero_()
        touched += 1
    return touched


def wait_for_slot(ring: P2PRing, stage: Stage, tries: int) -> int:
    idx = ring.claim()  # clean: handed to the caller as soon as it is valid
    while idx < 0 and tries > 0:
        stage.reap()
        idx = ring.claim()  # clean: near miss, overwrites only an index that is -1
        tries -= 1
    return idx


def send_embeddings(stage: Stage, rows: torch.Tensor, tied: bool) -> bool:
    idx = wait_for_slot(stage.ring, stage, tries=8)  # leak: given back only when the embeddings are tied
    if idx < 0:
        return False
    buf = stage.ring.tensor(idx)
    buf.copy_(rows)
    if tied:
        dist.all_reduce(buf)
        rows.copy_(buf)
        stage.ring.unclaim(idx)
    else:
        dist.send(buf, dst=stage.next)
    return True


def drain(stage: Stage, deadline: float) -> bool:
    """Take every credit once, so that nothing is in flight, then open the gate again."""
    taken = 0
    while time.monotonic() < deadline and taken < 4:
        if stage.gate.enter(timeout=0.1):  # clean: near miss, as many leaves as enters below
            taken += 1
        stage.reap()
    idle = taken == 4
    for _ in range(taken):
        stage.gate.leave()
    return idle
