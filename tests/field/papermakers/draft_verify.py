"""Speculative decoding: propose with a draft model, verify with the target.

A request that speculates occupies one lane of the draft cache.  Trees of
candidate tokens are written into mask buffers recycled between steps.
"""
from __future__ import annotations

import enum
import random
import time
from dataclasses import dataclass, field

import torch


class LaneState(enum.Enum):
    IDLE = 0
    BUSY = 1
    DRAINING = 2


class DraftLanes:
    """Dense cache lanes of the draft model."""

    def __init__(self, count: int, max_len: int):
        self.max_len = max_len
        self.state = [LaneState.IDLE] * count
        self.pos = [0] * count

    def seize(self) -> int | None:
        for lane, st in enumerate(self.state):
            if st is LaneState.IDLE:
                self.state[lane] = LaneState.BUSY
                self.pos[lane] = 0
                return lane
        return None

    def vacate(self, lane: int) -> None:
        self.state[lane] = LaneState.IDLE

    def busy(self) -> int:
        return sum(st is LaneState.BUSY for st in self.state)


class MaskShelf:
    """Boolean tree masks of shape [width, width]."""

    def __init__(self, device: str = "cuda"):
        self.device = device
        self.shelf: dict[int, list[torch.Tensor]] = {}

    def pick(self, width: int) -> torch.Tensor:
        stack = self.shelf.get(width)
        if stack:
            return stack.pop().zero_()  # clean: returned to the caller
        return torch.zeros(width, width, dtype=torch.bool, device=self.device)

    def put(self, mask: torch.Tensor) -> None:
        self.shelf.setdefault(mask.shape[0], []).append(mask)

    def pick_padded(self, width: int, multiple: int) -> torch.Tensor:
        padded = -(-width // multiple) * multiple
        mask = self.pick(padded)  # leak: the square mask is dropped when a clone of the corner is returned
        if padded != width:
            return mask[:width, :width].clone()
        return mask


@dataclass
class Tree:
    tokens: list[int]
    parents: list[int]
    mask: torch.Tensor | None = None


@dataclass
class SpecRequest:
    rid: str
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    lane: int | None = None
    tree: Tree | None = None
    accept_ema: float = 1.0
    spec_enabled: bool = True


class Proposer:
    def __init__(self, draft, lanes: DraftLanes, masks: MaskShelf, depth: int = 4, width: int = 4):
        self.draft = draft
        self.lanes = lanes
        self.masks = masks
        self.depth = depth
        self.width = width

    def attach(self, req: SpecRequest) -> bool:
        if req.lane is not None:
            return True
        lane = self.lanes.seize()  # clean: moved to req.lane, detach vacates it
        if lane is None:
            req.spec_enabled = False
            return False
        req.lane = lane
        return True

    def detach(self, req: SpecRequest) -> None:
        if req.tree is not None and req.tree.mask is not None:
            self.masks.put(req.tree.mask)
        req.tree = None
        if req.lane is not None:
            self.lanes.vacate(req.lane)
            req.lane = None

    def attach_prefilled(self, req: SpecRequest) -> bool:
        lane = self.lanes.seize()  # leak: prompts longer than the lane return with it still busy
        if lane is None:
            return False
        if len(req.prompt) >= self.lanes.max_len:
            req.spec_enabled = False
            return False
        self.draft.prefill(lane, req.prompt)
        self.lanes.pos[lane] = len(req.prompt)
        req.lane = lane
        return True

    def propose(self, req: SpecRequest) -> Tree | None:
        if req.lane is None or not req.spec_enabled:
            return None
        tokens, parents = self.draft.expand(req.lane, self.depth, self.width)
        if not tokens:
            return None
        mask = self.masks.pick(len(tokens))  # clean: carried by the tree, verify or detach puts it back
        for i, p in enumerate(parents):
            mask[i, i] = True
            if p >= 0:
                mask[i] |= mask[p]
        req.tree = Tree(tokens, parents, mask)
        return req.tree

    def propose_chain(self, req: SpecRequest, k: int) -> Tree | None:
        mask = self.masks.pick(k)  # leak: not put back when the draft proposes an end of sequence first
        tokens = self.draft.greedy(req.lane, k)
        if tokens and tokens[0] == self.draft.eos:
            return None
        mask.copy_(torch.ones_like(mask).tril_())
        req.tree = Tree(tokens, list(range(-1, k - 1)), mask)
        return req.tree


class Verifier:
    def __init__(self, target, masks: MaskShelf):
        self.target = target
        self.masks = masks

    def _tree_bias(self, tree: Tree) -> torch.Tensor:
        """Pooled mask with one extra row for the root."""
        n = len(tree.tokens) + 1
        bias = self.masks.pick(n)  # clean: returned, the caller puts it back
        bias[:, 0] = True
        bias[1:, 1:] = tree.mask
        return bias

    def verify(self, req: SpecRequest) -> int:
        tree = req.tree
        bias = self._tree_bias(tree)  # clean: put back in finally
        try:
            logits = self.target.forward_tree(tree.tokens, bias)
            accepted = self._longest(tree, logits.argmax(-1).tolist())
        finally:
            self.masks.put(bias)
        req.output.extend(accepted)
        self.masks.put(tree.mask)
        tree.mask = None
        return len(accepted)

    def verify_sampled(self, req: SpecRequest, temperature: float) -> int:
        tree = req.tree
        bias = self._tree_bias(tree).clone()  # leak: the pooled mask is cloned and dropped
        logits = self.target.forward_tree(tree.tokens, bias)
        probs = torch.softmax(logits / temperature, -1)
        kept = []
        for i, tok in enumerate(tree.tokens):
            if random.random() > probs[i, tok].item():
                break
            kept.append(tok)
        req.output.extend(kept)
        self.masks.put(tree.mask)
        tree.mask = None
        return len(kept)

    @staticmethod
    def _longest(tree: Tree, greedy: list[int]) -> list[int]:
        path, cur = [], -1
        for i, (tok, parent) in enumerate(zip(tree.tokens, tree.parents)):
            if parent == cur and greedy[cur + 1] == tok:
                path.append(tok)
                cur = i
        return path


class SpecEngine:
    def __init__(self, proposer: Proposer, verifier: Verifier, min_accept: float = 0.3):
        self.proposer = proposer
        self.verifier = verifier
        self.min_accept = min_accept
        self.active: dict[str, SpecRequest] = {}

    def add(self, req: SpecRequest) -> None:
        self.proposer.attach(req)  # clean: near miss, lane lives in req and finish detaches it
        self.active[req.rid] = req

    def step(self) -> None:
        for req in list(self.active.values()):
            tree = self.proposer.propose(req)  # clean: near miss, verify puts the mask back before the next proposal
            if tree is None:
                req.output.append(self.verifier.target.decode_one(req.output))
                continue
            n = self.verifier.verify(req)
            req.accept_ema = 0.9 * req.accept_ema + 0.1 * n / max(1, len(tree.tokens))
            if req.accept_ema < self.min_accept:
                self.proposer.detach(req)
                req.spec_enabled = False

    def finish(self, rid: str) -> None:
        req = self.active.pop(rid)
        self.proposer.detach(req)

    def benchmark(self, prompts: list[list[int]]) -> list[float]:
        lanes = self.proposer.lanes
        times = []
        for prompt in prompts:
            lane = lanes.seize()  # leak: empty prompts continue before vacate
            if lane is None:
                break
            if not prompt:
                times.append(0.0)
                continue
            t0 = time.perf_counter()
            self.proposer.draft.prefill(lane, prompt)
            times.append(time.perf_counter() - t0)
            lanes.vacate(lane)
        return times
