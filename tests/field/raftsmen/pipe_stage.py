"""One stage of a 1F1B pipeline: activation slots per micro-batch.

The number of micro-batches in flight is bounded by a semaphore, the storage by
`StageSlots`.  Inputs that arrive early wait in `_early`.
"""
from __future__ import annotations

import threading
from typing import Callable, Dict, List, Optional, Tuple

import torch


class StageSlots:
    def __init__(self, depth: int, shape: Tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._bank = {i: torch.empty(shape, dtype=dtype, device=device) for i in range(depth)}
        self.depth = depth

    def lease(self) -> Optional[Tuple[int, torch.Tensor]]:
        return self._bank.popitem() if self._bank else None  # clean: handed to the caller

    def unlease(self, i: int, t: torch.Tensor) -> None:
        self._bank[i] = t


Live = Tuple[int, torch.Tensor]


class Stage:
    def __init__(self, fn: torch.nn.Module, slots: StageSlots, recv: Callable, send: Callable, max_inflight: int) -> None:
        self.fn = fn
        self.slots = slots
        self.recv = recv
        self.send = send
        self._flow = threading.BoundedSemaphore(max_inflight)
        self._live: Dict[int, Live] = {}
        self._early: Dict[int, Live] = {}
        self.dropped: List[int] = []

    def forward(self, mb: int) -> bool:
        if mb in self._live:
            return True
        if not self._flow.acquire(timeout=30):  # clean: near miss, released when no slot is free, else by backward() or flush()
            return False
        got = self._early.pop(mb, None) or self._receive(mb)  # clean: near miss, kept in _live, which backward() and flush() empty
        if got is None:
            self._flow.release()
            return False
        self._live[mb] = got
        x = got[1].detach().requires_grad_()
        self.send(mb, self.fn(x))
        return True

    def _receive(self, mb: int) -> Optional[Live]:
        got = self.slots.lease()  # leak: an aborted micro-batch returns None with the slot leased
        if got is None:
            return None
        if not self.recv(mb, got[1]):
            self.dropped.append(mb)
            return None
        return got

    def receive_early(self, mb: int) -> bool:
        if mb in self._early or mb in self._live:
            return True
        got = self._receive(mb)  # clean: waits in _early for forward() or flush()
        if got is None:
            return False
        self._early[mb] = got
        return True

    def backward(self, mb: int, grad: torch.Tensor) -> torch.Tensor:
        i, t = self._live.pop(mb)
        try:
            x = t.detach().requires_grad_()
            y = self.fn(x)
            y.backward(grad)
            return x.grad
        finally:
            self.slots.unlease(i, t)
            self._flow.release()

    def flush(self) -> None:
        for i, t in self._live.values():
            self.slots.unlease(i, t)
            self._flow.release()
        self._live.clear()
        for i, t in self._early.values():
            self.slots.unlease(i, t)
        self._early.clear()

    def evaluate(self, mb: int) -> Optional[torch.Tensor]:
        self._flow.acquire()  # leak: not released when nothing was received
        got = self._receive(mb)  # clean: unleased after the forward
        if got is None:
            return None
        with torch.no_grad():
            y = self.fn(got[1]).clone()
        self.slots.unlease(*got)
        self._flow.release()
        return y

    def warm_up(self, shape_probe: torch.Tensor) -> int:
        seen: List[Live] = []
        got = self.slots.lease()  # clean: near miss, each lease of the loop is in seen and unleased at the end
        while got is not None:
            seen.append(got)
            got = self.slots.lease()  # clean: near miss, put in seen on the next turn, None ends the loop
        for i, t in seen:
            t.zero_()
            self.fn(t)
            self.slots.unlease(i, t)
        return len(seen)

    def profile(self, rounds: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        got = self.slots.lease()  # leak: with rounds 0 the function returns without unlease
        if got is None or rounds == 0:
            return 0.0
        i, t = got
        start.record()
        for _ in range(rounds):
            self.fn(t)
        end.record()
        end.synchronize()
        self.slots.unlease(i, t)
        return start.elapsed_time(end) / rounds

    def resend(self, mbs: List[int]) -> int:
        """Sends the stored inputs of the listed micro-batches again, after the next rank came back."""
        n = 0
        for mb in mbs:
            self._flow.acquire()  # leak: an unknown micro-batch continues without a release
            if mb not in self._live:
                self.dropped.append(mb)
                continue
            with torch.no_grad():
                self.send(mb, self.fn(self._live[mb][1]))
            self._flow.release()
            n += 1
        return n
