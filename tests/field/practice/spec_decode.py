# Speculative decoding worker: draft proposals, target verification, scratch lanes
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple
import logging
import random

import torch

_log = logging.getLogger("spec")


class Lane:
    def __init__(self, idx: int, kv: torch.Tensor):
        self.idx = idx
        self.kv = kv
        self.tokens: List[int] = []


class LaneBank:
    def __init__(self, n: int, ctx: int, dim: int):
        kv = torch.zeros(n, 2, ctx, dim)
        self._lanes = [Lane(i, kv[i]) for i in range(n)]
        self._mask = (1 << n) - 1

    def grab(self) -> Optional[Lane]:
        if self._mask == 0:
            return None
        low = self._mask & -self._mask
        self._mask ^= low
        lane = self._lanes[low.bit_length() - 1]
        lane.tokens = []
        return lane

    def drop(self, lane: Lane) -> None:
        self._mask |= 1 << lane.idx


class Proposal(NamedTuple):
    lane: Lane
    tokens: List[int]
    probs: torch.Tensor


class DraftWorker:
    def __init__(self, model: Callable[[List[int], torch.Tensor], torch.Tensor], bank: LaneBank, k: int):
        self.model, self.bank, self.k = model, bank, k

    def propose(self, ctx: List[int]) -> Optional[Proposal]:
        lane = self.bank.grab()  # clean: travels to the caller in the proposal
        if lane is None:
            return None
        probs = []
        for _ in range(self.k):
            p = torch.softmax(self.model(ctx + lane.tokens, lane.kv), -1)
            lane.tokens.append(int(torch.multinomial(p, 1)))
            probs.append(p)
        return Proposal(lane, list(lane.tokens), torch.stack(probs))

    def propose_confident(self, ctx: List[int], thr: float) -> Optional[Proposal]:
        lane = self.bank.grab()  # leak: low confidence returns None with the lane grabbed
        if lane is None:
            return None
        p = torch.softmax(self.model(ctx, lane.kv), -1)
        if p.max() < thr:
            return None
        lane.tokens.append(int(p.argmax()))
        return Proposal(lane, list(lane.tokens), p.unsqueeze(0))


class Verifier:
    def __init__(self, target, draft: DraftWorker):
        self.target = target
        self.draft = draft
        self.kept: Dict[str, Proposal] = {}

    def _accept(self, prop: Proposal, logits: torch.Tensor) -> int:
        q = torch.softmax(logits, -1)
        for i, t in enumerate(prop.tokens):
            if random.random() > float(q[i, t] / prop.probs[i, t]):
                return i
        return len(prop.tokens)

    def step(self, ctx: List[int]) -> List[int]:
        prop = self.draft.propose(ctx)  # clean: near miss, unpacked by field and dropped
        if prop is None:
            return [int(self.target(ctx)[-1].argmax())]
        n = self._accept(prop, self.target(ctx + prop.tokens))
        self.draft.bank.drop(prop.lane)
        return prop.tokens[:n]

    def step_strict(self, ctx: List[int]) -> List[int]:
        prop = self.draft.propose(ctx)  # leak: full rejection returns without dropping the lane
        if prop is None:
            return []
        n = self._accept(prop, self.target(ctx + prop.tokens))
        if n == 0:
            return []
        self.draft.bank.drop(prop.lane)
        return prop.tokens[:n]

    def tree_step(self, ctx: List[int], width: int) -> List[int]:
        props = [self.draft.propose(ctx) for _ in range(width)]  # leak: only the best proposal's lane is dropped
        live = [p for p in props if p is not None]
        if not live:
            return []
        best = max(live, key=lambda p: float(p.probs.max(-1).values.prod()))
        self.draft.bank.drop(best.lane)
        return best.tokens

    def tree_step_all(self, ctx: List[int], width: int) -> List[int]:
        props = [self.draft.propose(ctx) for _ in range(width)]  # clean: near miss, filtered for None, every lane dropped
        live = [p for p in props if p is not None]
        best: List[int] = []
        for p in live:
            n = self._accept(p, self.target(ctx + p.tokens))
            if n > len(best):
                best = p.tokens[:n]
        for p in live:
            self.draft.bank.drop(p.lane)
        return best

    def keep(self, rid: str, ctx: List[int]) -> bool:
        if rid in self.kept:
            return True
        prop = self.draft.propose(ctx)  # clean: stored per request, forget() drops the lane
        if prop is None:
            return False
        self.kept[rid] = prop
        return True

    def forget(self, rid: str) -> None:
        prop = self.kept.pop(rid, None)
        if prop:
            self.draft.bank.drop(prop.lane)

    def acceptance_rate(self, ctxs: List[List[int]]) -> float:
        hits = tries = 0
        for ctx in ctxs:
            prop = self.draft.propose(ctx)  # clean: the lane is dropped in the same turn
            if prop is None:
                continue
            lane, tokens, _ = prop
            hits += self._accept(prop, self.target(ctx + tokens))
            tries += len(tokens)
            self.draft.bank.drop(lane)
        return hits / max(tries, 1)

    def compare(self, ctx: List[int]) -> Tuple[int, int]:
        a = self.draft.propose(ctx)  # leak: when b is None the function returns before a's lane is dropped
        b = self.draft.propose_confident(ctx, 0.5)  # leak: b's lane is never dropped
        if a is None or b is None:
            return 0, 0
        res = len(a.tokens), len(b.tokens)
        self.draft.bank.drop(a.lane)
        return res

    def calibrate(self, ctx: List[int], rounds: int) -> float:
        thr = 0.9
        prop = None
        while prop is None and rounds:
            prop = self.draft.propose_confident(ctx, thr)  # clean: near miss, the loop ends with the first one that is not None
            thr -= 0.1
            rounds -= 1
        if prop is not None:
            self.draft.bank.drop(prop.lane)
        return thr
