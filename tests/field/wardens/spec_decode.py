from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Optional

import torch

logger = logging.getLogger(__name__)


class TokenSlotPool:
    def __init__(self, size: int) -> None:
        self.size = size
        self._free = torch.arange(size)

    def alloc(self, n: int) -> Optional[torch.Tensor]:
        if n > self._free.numel():
            return None
        out, self._free = self._free[:n], self._free[n:]
        return out

    def free(self, slots: torch.Tensor) -> None:
        self._free = torch.cat([self._free, slots])


class ReqSlotPool:
    def __init__(self, size: int) -> None:
        self._free = list(range(size))

    def alloc_req(self) -> int:
        return self._free.pop() if self._free else -1

    def free_req(self, idx: int) -> None:
        self._free.append(idx)


class TreeMaskPool:
    def __init__(self, count: int, width: int) -> None:
        self.width = width
        self._masks = [torch.zeros(width, width, dtype=torch.bool) for _ in range(count)]

    def checkout(self) -> torch.Tensor:
        return self._masks.pop()

    def restore(self, mask: torch.Tensor) -> None:
        mask.zero_()
        self._masks.append(mask)


@dataclass(eq=False)
class SpecRequest:
    rid: str
    tokens: list[int]
    draft_idx: int = -1
    target_slots: list[torch.Tensor] = field(default_factory=list)
    draft_slots: Optional[torch.Tensor] = None
    extra_slots: list[torch.Tensor] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] == 2


class DraftWorker:
    def __init__(self, slots: TokenSlotPool, reqs: ReqSlotPool, masks: TreeMaskPool) -> None:
        self.slots = slots
        self.reqs = reqs
        self.masks = masks
        self.requests: dict[str, SpecRequest] = {}

    def attach(self, req: SpecRequest) -> bool:
        idx = self.reqs.alloc_req()  # clean: near miss, negative means none, freed when the slots are refused, else by detach
        if idx < 0:
            return False
        slots = self.slots.alloc(len(req.tokens))  # leak: cancel() resets the request's draft_slots without freeing them
        if slots is None:
            self.reqs.free_req(idx)
            return False
        req.draft_idx = idx
        req.draft_slots = slots
        self.requests[req.rid] = req
        return True

    def detach(self, req: SpecRequest) -> None:
        self.requests.pop(req.rid, None)
        if req.draft_slots is not None:
            self.slots.free(req.draft_slots)
            req.draft_slots = None
        self._free_extra(req)
        if req.draft_idx >= 0:
            self.reqs.free_req(req.draft_idx)
            req.draft_idx = -1

    def cancel(self, rid: str) -> bool:
        req = self.requests.pop(rid, None)
        if req is None:
            return False
        self._free_extra(req)
        self.reqs.free_req(req.draft_idx)
        req.draft_idx = -1
        req.draft_slots = None
        return True

    def _free_extra(self, req: SpecRequest) -> None:
        while req.extra_slots:
            self.slots.free(req.extra_slots.pop())

    def propose(self, req: SpecRequest, width: int) -> Optional[list[int]]:
        mask = self.masks.checkout()  # leak: the request without draft slots returns before restore
        if req.draft_slots is None:
            return None
        mask[:width, :width] = torch.tril(torch.ones(width, width, dtype=torch.bool))
        tokens = [int(mask[i].sum()) + req.tokens[-1] for i in range(width)]
        self.masks.restore(mask)
        return tokens

    def extend(self, req: SpecRequest, n: int) -> bool:
        more = self.slots.alloc(n)  # clean: near miss, None-checked and kept in extra_slots, which detach and cancel free
        if more is None:
            return False
        req.extra_slots.append(more)
        return True


class Verifier:
    def __init__(self, slots: TokenSlotPool, masks: TreeMaskPool) -> None:
        self.slots = slots
        self.masks = masks

    def verify(self, req: SpecRequest, proposed: list[int], accept: int) -> int:
        slots = self.slots.alloc(len(proposed))  # clean: near miss, the accepted part is kept by the request, the rest is freed
        if slots is None:
            return 0
        if accept == 0:
            self.slots.free(slots)
            return 0
        req.target_slots.append(slots[:accept])
        self.slots.free(slots[accept:])
        req.tokens.extend(proposed[:accept])
        return accept

    def verify_greedy(self, req: SpecRequest, proposed: list[int], logits: torch.Tensor) -> int:
        slots = self.slots.alloc(len(proposed) + 1)  # leak: the slot of the bonus token is neither kept nor freed
        if slots is None:
            return 0
        best = logits.argmax(-1).tolist()
        accept = 0
        while accept < len(proposed) and best[accept] == proposed[accept]:
            accept += 1
        req.target_slots.append(slots[:accept])
        self.slots.free(slots[accept : len(proposed)])
        req.tokens.extend(proposed[:accept])
        return accept

    def score_tree(self, parents: list[int]) -> Optional[torch.Tensor]:
        mask = self.masks.checkout()  # clean: near miss, the refusal restores it and the result is a copy
        if len(parents) > self.masks.width:
            self.masks.restore(mask)
            return None
        for i, parent in enumerate(parents):
            mask[i, i] = True
            if parent < 0:
                continue
            mask[i] |= mask[parent]
        scores = mask.float().sum(-1)
        self.masks.restore(mask)
        return scores

    def finish(self, req: SpecRequest) -> None:
        for slots in req.target_slots:
            self.slots.free(slots)
        req.target_slots.clear()

    def verify_batch(self, reqs: list[SpecRequest], width: int) -> list[SpecRequest]:
        ready: list[SpecRequest] = []
        for req in reqs:
            slots = self.slots.alloc(width)  # leak: finished requests are skipped with their slots taken
            if slots is None:
                break
            if req.done:
                logger.debug("%s finished before verification", req.rid)
                continue
            req.target_slots.append(slots)
            ready.append(req)
        return ready

    def replay(self, req: SpecRequest) -> Optional[float]:
        scratch = self.slots.alloc(len(req.tokens))  # clean: near miss, freed in finally after any return
        if scratch is None:
            return None
        try:
            if req.done:
                return 0.0
            return float(scratch.float().mean())
        finally:
            self.slots.free(scratch)


class SpecDecoder:
    def __init__(self, draft: DraftWorker, verifier: Verifier) -> None:
        self.draft = draft
        self.verifier = verifier

    def run(self, req: SpecRequest, width: int, rounds: int) -> list[int]:
        if not self.draft.attach(req):  # clean: near miss, refused means nothing attached, every break leads to detach
            return req.tokens
        for _ in range(rounds):
            proposed = self.draft.propose(req, width)
            if proposed is None or not self.draft.extend(req, width):
                break
            if self.verifier.verify(req, proposed, accept=max(1, width // 2)) == 0:
                break
            if req.done:
                break
        self.draft.detach(req)
        self.verifier.finish(req)
        return req.tokens
