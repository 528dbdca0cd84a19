"""Speculative decoding: draft slots, proposal buffers and verification."""
from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import contextmanager
from typing import Iterator, Optional

import torch

log = logging.getLogger("draft")


class SlotRing:
    """Slots of the draft model's batch. hand_out() gives None if all are busy."""

    def __init__(self, n: int):
        self._idle = deque(range(n))
        self._lock = threading.Lock()

    def hand_out(self) -> Optional[int]:
        with self._lock:
            return self._idle.popleft() if self._idle else None

    def hand_in(self, slot: int) -> None:
        with self._lock:
            self._idle.append(slot)


class LogitBuffers:
    """Pool of (k, vocab) tensors keyed by k; grows when empty."""

    def __init__(self, vocab: int, device: str = "cuda"):
        self.vocab = vocab
        self.device = device
        self._spare: dict[int, list[torch.Tensor]] = {}

    def checkout(self, k: int) -> torch.Tensor:
        stack = self._spare.setdefault(k, [])
        if stack:
            return stack.pop()
        return torch.empty(k, self.vocab, device=self.device)

    def checkin(self, t: torch.Tensor) -> None:
        self._spare.setdefault(t.shape[0], []).append(t)

    @contextmanager
    def lent(self, k: int) -> Iterator[torch.Tensor]:
        t = self.checkout(k)  # clean: checked in by the finally of the context manager
        try:
            yield t
        finally:
            self.checkin(t)


class Proposal:
    def __init__(self, req_id: str, slot: int, logits: torch.Tensor):
        self.req_id = req_id
        self.slot = slot
        self.logits = logits
        self.tokens: list[int] = []


class DraftRunner:
    def __init__(self, model, slots: SlotRing, buffers: LogitBuffers, k: int):
        self.model = model
        self.slots = slots
        self.buffers = buffers
        self.k = k
        self.open: dict[str, Proposal] = {}

    def _forward(self, tokens: torch.Tensor, k: int) -> torch.Tensor:
        out = self.buffers.checkout(k)  # clean: returned to the caller
        self.model(tokens, out=out)
        return out

    def propose(self, req_id: str, tokens: torch.Tensor) -> Optional[Proposal]:
        slot = self.slots.hand_out()  # clean: kept in self.open, which retire() empties
        if slot is None:
            return None
        logits = self._forward(tokens, self.k)  # clean: kept by the proposal until retire()
        prop = Proposal(req_id, slot, logits)
        prop.tokens = logits.argmax(-1).tolist()
        self.open[req_id] = prop
        return prop

    def propose_tree(self, req_id: str, tokens: torch.Tensor, width: int) -> Optional[Proposal]:
        logits = self.buffers.checkout(self.k * width)  # leak: not checked in when no slot is idle
        slot = self.slots.hand_out()  # clean: kept in self.open
        if slot is None:
            log.debug("tree draft of %s deferred", req_id)
            return None
        self.model(tokens, out=logits)
        prop = self.open[req_id] = Proposal(req_id, slot, logits)
        prop.tokens = logits.topk(width).indices.flatten().tolist()
        return prop

    def retire(self, req_id: str) -> None:
        prop = self.open.pop(req_id, None)
        if prop is None:
            return
        self.slots.hand_in(prop.slot)
        self.buffers.checkin(prop.logits)

    def greedy_tokens(self, tokens: torch.Tensor) -> list[int]:
        return self._forward(tokens, self.k).argmax(-1).tolist()  # leak: the pooled logits are dropped after argmax

    def snapshot(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self._forward(tokens, self.k)  # leak: the clone is returned and the pooled tensor forgotten
        return logits.clone()

    def accept(self, req_id: str, target: torch.Tensor) -> int:
        prop = self.open[req_id]
        with self.buffers.lent(self.k) as ratio:  # clean: the with block checks it in
            torch.div(target, prop.logits, out=ratio)
            for i, tok in enumerate(prop.tokens):
                if float(ratio[i, tok]) < 1.0:
                    return i
        return len(prop.tokens)

    def relogit(self, req_id: str, tokens: torch.Tensor) -> None:
        prop = self.open[req_id]
        old = prop.logits
        prop.logits = self._forward(tokens, self.k)  # clean: near miss, rebinds the field but old is checked in below
        self.buffers.checkin(old)
        prop.tokens = prop.logits.argmax(-1).tolist()

    def warmup(self, shapes: list[int]) -> None:
        for k in shapes:
            buf = self.buffers.checkout(k)  # clean: checked in on each turn, skipped or not
            if k > self.k:
                self.buffers.checkin(buf)
                continue
            self.model(torch.zeros(1, dtype=torch.long), out=buf)
            self.buffers.checkin(buf)

    def shrink_k(self, tokens: torch.Tensor, floor: float) -> int:
        k = self.k
        logits = self._forward(tokens, k)  # leak: rebound in the loop before it is checked in
        while k > 1 and float(logits.max()) < floor:
            k //= 2
            logits = self._forward(tokens, k)  # leak: rebound by the next turn of the loop
        self.buffers.checkin(logits)
        return k

    def grow_k(self, tokens: torch.Tensor, floor: float, top: int) -> int:
        k = 1
        logits = self._forward(tokens, k)  # clean: near miss, checked in before each rebind
        while k < top and float(logits.max()) >= floor:
            self.buffers.checkin(logits)
            k *= 2
            logits = self._forward(tokens, k)  # clean: near miss, checked in by the next turn or after the loop
        self.buffers.checkin(logits)
        return k

    def stream(self, prompts: Iterator[torch.Tensor]) -> Iterator[list[int]]:
        for tokens in prompts:
            slot = self.slots.hand_out()  # clean: finally runs even if the consumer closes the generator
            if slot is None:
                return
            try:
                yield self.model.decode(tokens, slot)
            finally:
                self.slots.hand_in(slot)
