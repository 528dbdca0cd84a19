"""Speculative decoding worker: draft, verify, accept."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch


class SlotExhausted(Exception):
    """No draft slot is free."""


class DraftSlots:
    """Rows of the draft model's KV buffer, tracked in a bitmap."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._bitmap = (1 << num_slots) - 1

    def claim(self) -> int:
        """Lowest free slot, or -1."""
        if self._bitmap == 0:
            return -1
        slot = (self._bitmap & -self._bitmap).bit_length() - 1
        self._bitmap &= ~(1 << slot)  # clean: the bit's index goes to the caller
        return slot

    def drop(self, slot: int) -> None:
        self._bitmap |= 1 << slot


class LogitsBuffers:
    """Preallocated [k, vocab] buffers for draft probabilities."""

    def __init__(self, count: int, k: int, vocab: int, device: str = "cuda") -> None:
        self._bufs = [torch.empty(k, vocab, device=device) for _ in range(count)]

    def checkout(self) -> torch.Tensor | None:
        return self._bufs.pop() if self._bufs else None  # clean: to the caller

    def checkin(self, buf: torch.Tensor) -> None:
        self._bufs.append(buf)

    @contextlib.contextmanager
    def scoped(self) -> Iterator[torch.Tensor]:
        buf = self.checkout()  # clean: near miss, the raise happens only when nothing was taken
        if buf is None:
            raise SlotExhausted("no logits buffer")
        try:
            yield buf
        finally:
            self.checkin(buf)


@dataclass
class SpecRequest:
    rid: str
    tokens: list[int]
    k: int = 4
    temperature: float = 1.0
    slot: int = -1
    proposals: list[int] = field(default_factory=list)
    probs: torch.Tensor | None = None
    accept_ema: float = 1.0


class SpecWorker:
    """Runs the draft model for a set of requests."""

    def __init__(self, draft, target, slots: DraftSlots, buffers: LogitsBuffers, min_accept: float = 0.2) -> None:
        self.draft = draft
        self.target = target
        self.slots = slots
        self.buffers = buffers
        self.min_accept = min_accept
        self.active: dict[str, SpecRequest] = {}

    def admit(self, req: SpecRequest) -> bool:
        """Give the request a draft slot, or let it run without drafting."""
        slot = self.slots.claim()  # clean: near miss, -1 is no slot; otherwise the active request holds it until finish()
        if slot < 0:
            return False
        req.slot = slot
        self.active[req.rid] = req
        self.draft.prefill(slot, req.tokens)
        return True

    def admit_batch(self, reqs: list[SpecRequest]) -> list[SpecRequest]:
        """Admit as many requests as possible, in order."""
        admitted: list[SpecRequest] = []
        for req in reqs:
            slot = self.slots.claim()  # leak: the check of the acceptance rate comes after the claim and skips the request
            if slot < 0:
                break
            if req.accept_ema < self.min_accept:
                continue
            req.slot = slot
            self.active[req.rid] = req
            admitted.append(req)
        return admitted

    def propose(self, req: SpecRequest) -> list[int]:
        """Sample k draft tokens; keeps the probabilities for verification."""
        if req.probs is not None:
            return req.proposals
        probs = self.buffers.checkout()  # clean: near miss, a short draft checks it in, otherwise verify() or finish() does
        if probs is None:
            req.proposals = []
            return []
        last = req.tokens[-1]
        req.proposals = []
        for i in range(req.k):
            logits = self.draft.step(req.slot, last)
            probs[i].copy_(torch.softmax(logits / max(req.temperature, 1e-5), dim=-1))
            last = int(torch.multinomial(probs[i], 1))
            if last == self.draft.eos_id:
                break
            req.proposals.append(last)
        if not req.proposals:
            self.buffers.checkin(probs)
            return []
        req.probs = probs
        return req.proposals

    def verify(self, req: SpecRequest) -> int:
        """Compare with the target model; returns the number of accepted tokens."""
        if req.probs is None:
            return 0
        with self.buffers.scoped() as target_probs:  # clean: scoped
            self.target.score(req.tokens, req.proposals, out=target_probs)
            accepted = 0
            for i, tok in enumerate(req.proposals):
                ratio = target_probs[i, tok] / req.probs[i, tok].clamp_min(1e-8)
                if torch.rand(()) > ratio:
                    break
                accepted += 1
        req.tokens += req.proposals[:accepted]
        req.accept_ema = 0.9 * req.accept_ema + 0.1 * accepted / max(1, len(req.proposals))
        self.buffers.checkin(req.probs)
        req.probs = None
        return accepted

    def calibrate(self, req: SpecRequest) -> float:
        """Mean entropy of the draft distribution on this prompt."""
        scratch = self.buffers.checkout()  # leak: the early return for an empty prompt keeps the buffer
        if scratch is None:
            return 0.0
        n = min(len(req.tokens), scratch.shape[0])
        if n == 0:
            return 0.0
        self.draft.score(req.tokens[:n], out=scratch[:n])
        entropy = -(scratch[:n] * scratch[:n].clamp_min(1e-8).log()).sum(-1).mean()
        self.buffers.checkin(scratch)
        return float(entropy)

    def compare_drafts(self, req: SpecRequest, other) -> torch.Tensor | None:
        """KL between two draft models, one value per position."""
        ours = self.buffers.checkout()  # leak: not checked in when the second buffer is missing
        if ours is None:
            return None
        theirs = self.buffers.checkout()  # clean: None is nothing taken, otherwise checked in below
        if theirs is None:
            return None
        self.draft.score(req.tokens, out=ours)
        other.score(req.tokens, out=theirs)
        kl = (ours * (ours.clamp_min(1e-8).log() - theirs.clamp_min(1e-8).log())).sum(-1)
        self.buffers.checkin(theirs)
        self.buffers.checkin(ours)
        return kl

    def move_slot(self, req: SpecRequest) -> int:
        """Compact the draft buffer: move the request to the lowest slot."""
        slot = self.slots.claim()  # leak: a slot above the current one is not dropped
        if slot < 0 or slot > req.slot:
            return req.slot
        self.draft.copy_row(req.slot, slot)
        self.slots.drop(req.slot)
        req.slot = slot
        return slot

    def finish(self, rid: str) -> None:
        req = self.active.pop(rid)
        if req.probs is not None:
            self.buffers.checkin(req.probs)
            req.probs = None
        self.slots.drop(req.slot)
        req.slot = -1
