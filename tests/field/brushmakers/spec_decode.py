"""Draft token slots and tree buffers for speculative decoding."""
from __future__ import annotations

import heapq
from typing import Dict, List, NamedTuple, Optional

import torch


class DraftSlots:
    """KV slots of the draft model. Slots are ints; the smallest goes first."""

    def __init__(self, size: int) -> None:
        self._avail = list(range(size))
        self.epoch = 0

    def pop_slot(self) -> int:
        if not self._avail:
            raise MemoryError("draft slots exhausted")
        return heapq.heappop(self._avail)  # clean: returned to the caller

    def pop_slots(self, n: int) -> List[int]:
        if n > len(self._avail):
            return []
        return [heapq.heappop(self._avail) for _ in range(n)]  # clean: returned to the caller as a list

    def push_slot(self, slot: int) -> None:
        heapq.heappush(self._avail, slot)

    def push_slots(self, slots: List[int]) -> None:
        for s in slots:
            heapq.heappush(self._avail, s)

    def __len__(self) -> int:
        return len(self._avail)


class TreeBuf(NamedTuple):
    mask: torch.Tensor
    pos: torch.Tensor


class TreeBufs:
    """Two stacks of tensors; a TreeBuf takes one of each."""

    def __init__(self, n: int, width: int) -> None:
        self.masks = [torch.zeros(width, width, dtype=torch.bool) for _ in range(n)]
        self.poss = [torch.zeros(width, dtype=torch.long) for _ in range(n)]

    def get(self) -> Optional[TreeBuf]:
        if not self.masks or not self.poss:
            return None
        return TreeBuf(self.masks.pop(), self.poss.pop())  # clean: both returned in the tuple

    def get_mask(self) -> Optional[torch.Tensor]:
        return self.masks.pop() if self.masks else None  # clean: returned to the caller

    def put(self, buf: TreeBuf) -> None:
        self.masks.append(buf.mask)
        self.poss.append(buf.pos)

    def put_mask(self, mask: torch.Tensor) -> None:
        self.masks.append(mask)


class DraftState:
    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.slots: List[int] = []
        self.tree: Optional[TreeBuf] = None


class SpecWorker:
    def __init__(self, slots: DraftSlots, trees: TreeBufs, draft, target, k: int, use_tree: bool) -> None:
        self.slots = slots
        self.trees = trees
        self.draft = draft
        self.target = target
        self.k = k
        self.use_tree = use_tree
        self.states: Dict[str, DraftState] = {}

    def prepare(self, rid: str) -> Optional[DraftState]:
        if rid in self.states:
            return self.states[rid]
        st = DraftState(rid)
        st.slots = self.slots.pop_slots(self.k)  # clean: kept in the state, retire() pushes them
        if not st.slots:
            return None
        if self.use_tree:
            st.tree = self.trees.get()  # clean: near miss, retire() puts it under the same flag
        self.states[rid] = st
        return st

    def retire(self, rid: str) -> None:
        st = self.states.pop(rid, None)
        if st is None:
            return
        self.slots.push_slots(st.slots)
        if self.use_tree and st.tree is not None:
            self.trees.put(st.tree)

    def propose_linear(self, tokens: List[int]) -> List[int]:
        mine = self.slots.pop_slots(self.k)  # clean: pushed in the finally
        if not mine:
            return []
        out = []
        try:
            for s in mine:
                nxt = self.draft.step(tokens + out, s)
                if nxt is None:
                    break
                out.append(nxt)
        finally:
            self.slots.push_slots(mine)
        return out

    def propose_tree(self, tokens: List[int]) -> Optional[torch.Tensor]:
        buf = self.trees.get()  # leak: no slots, and the buffers are not put
        if buf is None:
            return None
        mine = self.slots.pop_slots(self.k)  # clean: pushed in the finally
        if not mine:
            return None
        try:
            return self.draft.expand(tokens, mine, buf.mask, buf.pos).clone()
        finally:
            self.slots.push_slots(mine)
            self.trees.put(buf)

    def propose_topk(self, tokens: List[int], width: int) -> List[int]:
        mine = self.slots.pop_slots(width)  # leak: only the accepted slots are pushed, the others go with the list
        out = []
        for s in mine:
            tok = self.draft.step(tokens, s)
            if tok < 0:
                continue
            out.append(tok)
            self.slots.push_slot(s)
        return out

    def verify(self, st: DraftState, proposed: List[int]) -> List[int]:
        scratch = self.slots.pop_slot()  # leak: an empty proposal returns early
        if not proposed:
            return [self.target.sample(st.rid)]
        accepted = self.target.verify(st.rid, proposed, scratch)
        self.slots.push_slot(scratch)
        return accepted

    def verify_tree(self, st: DraftState, proposed: torch.Tensor) -> torch.Tensor:
        mask = self.trees.get_mask() if st.tree is None else st.tree.mask  # clean: near miss, put below on the same condition
        if mask is None:
            return proposed[:0]
        try:
            return self.target.verify_tree(st.rid, proposed, mask)
        finally:
            if st.tree is None:
                self.trees.put_mask(mask)

    def trim(self, st: DraftState, accepted: int) -> None:
        keep, rest = st.slots[:accepted], st.slots[accepted:]
        self.slots.push_slots(rest)
        st.slots = keep

    def reset(self, st: DraftState) -> bool:
        old = st.slots
        st.slots = self.slots.pop_slots(self.k)  # clean: near miss, the old slots are pushed from the local
        self.slots.push_slots(old)
        return bool(st.slots)

    def pick_two(self) -> Optional[tuple]:
        a = self.slots.pop_slot()  # leak: the second pop_slot's MemoryError returns None without pushing the first
        try:
            b = self.slots.pop_slot()  # clean: returned in the pair
        except MemoryError:
            return None
        return a, b
