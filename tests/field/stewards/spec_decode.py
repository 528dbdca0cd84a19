from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Optional, Protocol

import torch


class Model(Protocol):
    def forward(self, tokens: torch.Tensor, slots: torch.Tensor) -> torch.Tensor: ...


class TokenSlots:
    def __init__(self, size: int, name: str) -> None:
        self.name = name
        self._free: deque[int] = deque(range(size))

    def alloc(self, n: int) -> Optional[list[int]]:
        if n > len(self._free):
            return None
        return [self._free.popleft() for _ in range(n)]

    def alloc_aligned(self, n: int, page: int) -> Optional[list[int]]:
        want = -(-n // page) * page
        out: list[int] = []
        while len(out) < want:
            if not self._free:
                return None
            out.append(self._free.popleft())  # leak: the slots taken before the shortage are lost with the local list
        return out

    def alloc_upto(self, n: int) -> list[int]:
        out: list[int] = []
        while len(out) < n and self._free:
            out.append(self._free.popleft())  # clean: near miss, a short list is returned all the same
        return out

    def free(self, slots: list[int]) -> None:
        self._free.extend(slots)


class TreeMaskPool:
    def __init__(self, count: int, size: int) -> None:
        self._masks = [torch.zeros(size, size, dtype=torch.bool) for _ in range(count)]

    def take(self) -> Optional[torch.Tensor]:
        return self._masks.pop() if self._masks else None

    def give_back(self, mask: torch.Tensor) -> None:
        mask.zero_()
        self._masks.append(mask)


@dataclass
class SpecRequest:
    rid: str
    tokens: list[int]
    target_slots: list[int] = field(default_factory=list)
    draft_slots: list[int] = field(default_factory=list)
    mask: Optional[torch.Tensor] = None
    disabled: bool = False


class SpecWorker:
    def __init__(self, draft: Model, target: Model, draft_slots: TokenSlots, target_slots: TokenSlots,
                 masks: TreeMaskPool, k: int, eos: int) -> None:
        self.draft = draft
        self.target = target
        self.draft_slots = draft_slots
        self.target_slots = target_slots
        self.masks = masks
        self.k = k
        self.eos = eos
        self.live: dict[str, SpecRequest] = {}

    def start(self, req: SpecRequest) -> bool:
        target = self.target_slots.alloc(len(req.tokens))  # clean: near miss, freed below where the draft pool is short
        if target is None:
            return False
        draft = self.draft_slots.alloc(len(req.tokens))  # leak: finish() leaves the draft slots of a disabled request alone
        if draft is None:
            self.target_slots.free(target)
            return False
        req.target_slots, req.draft_slots = target, draft
        self.live[req.rid] = req
        return True

    def disable(self, req: SpecRequest) -> None:
        req.disabled = True

    def step(self, req: SpecRequest) -> list[int]:
        if req.disabled:
            return self._plain(req)
        slots = self.draft_slots.alloc(self.k)  # leak: a shortage of target slots falls back to plain decoding with these in a local
        if slots is None:
            return self._plain(req)
        proposal = self._propose(req, slots)
        verify = self.target_slots.alloc(self.k + 1)  # clean: near miss, the accepted part stays with the request, the tail is freed
        if verify is None:
            return self._plain(req)
        accepted = self._verify(req, proposal, verify)
        n = len(accepted)
        req.target_slots.extend(verify[:n])
        self.target_slots.free(verify[n:])
        req.draft_slots.extend(slots[:n])
        self.draft_slots.free(slots[n:])
        req.tokens.extend(accepted)
        return accepted

    def _plain(self, req: SpecRequest) -> list[int]:
        slots = self.target_slots.alloc(1)  # clean: added to the request's own slots
        if slots is None:
            return []
        logits = self.target.forward(torch.tensor(req.tokens[-1:]), torch.tensor(slots))
        req.target_slots.extend(slots)
        token = int(logits[-1].argmax())
        req.tokens.append(token)
        return [token]

    def _propose(self, req: SpecRequest, slots: list[int]) -> list[int]:
        out, last = [], req.tokens[-1]
        for slot in slots:
            last = int(self.draft.forward(torch.tensor([last]), torch.tensor([slot]))[-1].argmax())
            out.append(last)
        return out

    def _verify(self, req: SpecRequest, proposal: list[int], slots: list[int]) -> list[int]:
        logits = self.target.forward(torch.tensor(req.tokens[-1:] + proposal), torch.tensor(slots))
        best = logits.argmax(-1).tolist()
        n = 0
        while n < len(proposal) and proposal[n] == best[n]:
            n += 1
        return proposal[:n] + [best[n]]

    def build_tree(self, req: SpecRequest, parents: list[int]) -> bool:
        mask = self.masks.take()  # leak: parents out of range return with the mask neither stored nor given back
        if mask is None:
            return False
        for i, parent in enumerate(parents):
            if parent >= i:
                return False
            mask[i].copy_(mask[parent]) if parent >= 0 else None
            mask[i, i] = True
        self.drop_tree(req)
        req.mask = mask
        return True

    def drop_tree(self, req: SpecRequest) -> None:
        if req.mask is not None:
            self.masks.give_back(req.mask)
            req.mask = None

    def chain_tree(self, req: SpecRequest, depth: int) -> bool:
        if req.mask is None:
            req.mask = self.masks.take()  # clean: near miss, only where the request has none, finish drops it
        if req.mask is None:
            return False
        req.mask[:depth, :depth] = torch.tril(torch.ones(depth, depth, dtype=torch.bool))
        return True

    def finish(self, rid: str) -> None:
        req = self.live.pop(rid)
        self.drop_tree(req)
        self.target_slots.free(req.target_slots)
        req.target_slots = []
        if not req.disabled:
            self.draft_slots.free(req.draft_slots)
            req.draft_slots = []

    def measure(self, tokens: list[int], page: int) -> Optional[float]:
        slots = self.target_slots.alloc_aligned(len(tokens), page)  # leak: only the unpadded head of the list is freed
        if slots is None:
            return None
        logits = self.target.forward(torch.tensor(tokens), torch.tensor(slots[:len(tokens)]))
        self.target_slots.free(slots[:len(tokens)])
        return float(logits.max())

    def measure_short(self, tokens: list[int]) -> Optional[float]:
        slots = self.target_slots.alloc_upto(len(tokens))  # clean: near miss, the length is whatever came and all of it is freed
        if not slots:
            return None
        logits = self.target.forward(torch.tensor(tokens[:len(slots)]), torch.tensor(slots))
        self.target_slots.free(slots)
        return float(logits.max())
