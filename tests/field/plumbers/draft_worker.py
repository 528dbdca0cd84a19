"""Draft-model side of speculative decoding: scratch buffers, proposals, scoring."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple


@dataclass(eq=False)
class Scratch:
    rows: int
    data: List[float] = field(default_factory=list)

    def clone(self) -> "Scratch":
        return Scratch(self.rows, list(self.data))


class ScratchPool:
    """Fixed set of activation buffers; `borrow` returns None when all are out."""

    def __init__(self, count: int, max_rows: int) -> None:
        self.max_rows = max_rows
        self._idle: List[Scratch] = [Scratch(max_rows) for _ in range(count)]

    def borrow(self, rows: int) -> Optional[Scratch]:
        if rows > self.max_rows:
            raise ValueError("batch exceeds scratch rows")
        if not self._idle:
            return None
        buf = self._idle.pop()
        buf.rows = rows
        buf.data = [0.0] * rows
        return buf

    def give_back(self, buf: Scratch) -> None:
        buf.data = []
        self._idle.append(buf)

    def __len__(self) -> int:
        return len(self._idle)


class DraftModel:
    def __init__(self, pool: ScratchPool) -> None:
        self.pool = pool

    def forward(self, hidden: Scratch) -> Scratch:
        out = self.pool.borrow(hidden.rows)  # clean: returned to the caller
        if out is None:
            raise RuntimeError("scratch exhausted")
        out.data = [x + 1.0 for x in hidden.data]
        return out

    def logits(self, hidden: Scratch) -> Scratch:
        normed = self.forward(hidden)  # clean: given back after the head
        out = self.pool.borrow(normed.rows)  # clean: returned to the caller
        if out is None:
            self.pool.give_back(normed)
            raise RuntimeError("scratch exhausted")
        out.data = [2 * x for x in normed.data]
        self.pool.give_back(normed)
        return out


class MultiStepProposer:
    def __init__(self, model: DraftModel, pool: ScratchPool, k: int) -> None:
        self.model = model
        self.pool = pool
        self.k = k
        self.saved: Dict[int, Scratch] = {}

    def propose(self, rows: int) -> List[float]:
        hidden = self.pool.borrow(rows)  # clean: near miss, each turn gives the previous one back
        if hidden is None:
            return []
        tokens: List[float] = []
        for _ in range(self.k):
            nxt = self.model.forward(hidden)  # clean: becomes hidden, given back on the next turn or after the loop
            self.pool.give_back(hidden)
            hidden = nxt
            tokens.append(sum(hidden.data))
        self.pool.give_back(hidden)
        return tokens

    def propose_greedy(self, rows: int, threshold: float) -> List[float]:
        hidden = self.pool.borrow(rows)  # leak: the first turn rebinds hidden
        if hidden is None:
            return []
        tokens: List[float] = []
        for _ in range(self.k):
            hidden = self.model.forward(hidden)  # leak: the next turn rebinds hidden
            score = sum(hidden.data)
            if score > threshold:
                break
            tokens.append(score)
        self.pool.give_back(hidden)
        return tokens

    def confidence(self, hidden: Scratch) -> List[float]:
        probs = self.model.logits(hidden).clone()  # leak: the pooled logits are copied and dropped
        total = sum(probs.data) or 1.0
        return [p / total for p in probs.data]

    def entropy(self, hidden: Scratch) -> float:
        logits = self.model.logits(hidden)  # clean: near miss, copied and then given back
        local = logits.clone()
        self.pool.give_back(logits)
        return -sum(local.data)

    def save_hidden(self, seq_id: int, rows: int) -> bool:
        """Keeps the target's last hidden state for the next draft (EAGLE)."""
        buf = self.pool.borrow(rows)  # clean: near miss, the displaced entry is given back first
        if buf is None:
            return False
        stale = self.saved.pop(seq_id, None)
        if stale is not None:
            self.pool.give_back(stale)
        self.saved[seq_id] = buf
        return True

    def drop_hidden(self, seq_ids: List[int]) -> None:
        for seq_id in seq_ids:
            buf = self.saved.pop(seq_id, None)
            if buf is not None:
                self.pool.give_back(buf)


class TreeMaskBuilder:
    """Attention masks for tree-shaped proposals."""

    def __init__(self, masks: ScratchPool) -> None:
        self.masks = masks
        self.current: Optional[Scratch] = None
        self.by_depth: Dict[int, Scratch] = {}

    def prepare(self, rows: int, depth: int) -> Optional[Scratch]:
        cached = self.by_depth.get(depth)
        if cached is not None and cached.rows == rows:
            return cached
        mask = self.masks.borrow(rows)  # leak: a mask of other rows at the same depth is overwritten
        if mask is None:
            return None
        self.by_depth[depth] = mask
        return mask

    def begin(self, rows: int, use_tree: bool) -> bool:
        if use_tree:
            self.current = self.masks.borrow(rows)  # clean: end gives it back
            return self.current is not None
        return True

    def end(self) -> None:
        if self.current is not None:
            self.masks.give_back(self.current)
            self.current = None

    def shutdown(self) -> None:
        for mask in self.by_depth.values():
            self.masks.give_back(mask)
        self.by_depth.clear()
        self.end()


class SpecDecodeWorker:
    def __init__(self, proposer: MultiStepProposer, pool: ScratchPool, masks: TreeMaskBuilder) -> None:
        self.proposer = proposer
        self.pool = pool
        self.masks = masks
        self.disabled_by_queue = 64

    def step(self, batch: List[int], queue_len: int) -> Tuple[int, int]:
        """(proposed, accepted) of one speculative step."""
        bonus = self.pool.borrow(len(batch))  # leak: the branch that falls back to normal decoding returns without it
        if bonus is None:
            return 0, 0
        if queue_len > self.disabled_by_queue:
            return 0, len(batch)
        draft = self.proposer.propose(len(batch))
        accepted = sum(1 for d in draft if d >= bonus.data[0])
        self.pool.give_back(bonus)
        return len(draft), accepted

    def score(self, batch: List[int], target: Optional[Scratch] = None) -> float:
        owned = target is None
        if owned:
            target = self.pool.borrow(len(batch))  # clean: near miss, given back under the same flag
        if target is None:
            return 0.0
        value = sum(target.data)
        if owned:
            self.pool.give_back(target)
        return value

    def rescore(self, batch: List[int], first: Scratch, rounds: int) -> float:
        current, total = first, 0.0
        for _ in range(rounds):
            total += sum(current.data)
            fresh = self.pool.borrow(len(batch))  # clean: near miss, replaces current, and all but the caller's are given back
            if fresh is None:
                break
            if current is not first:
                self.pool.give_back(current)
            current = fresh
        if current is not first:
            self.pool.give_back(current)
        return total

    def score_safe(self, batch: List[int]) -> float:
        try:
            target = self.pool.borrow(len(batch))  # leak: dividing by an empty proposal is caught and target stays out
            if target is None:
                return 0.0
            draft = self.proposer.propose(len(batch))
            value = sum(target.data) / len(draft)
            self.pool.give_back(target)
            return value
        except ZeroDivisionError:
            return 0.0
