"""Draft slots of speculative decoding."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Tuple


class DraftSlots:
    def __init__(self, n: int) -> None:
        self.free_slots = list(range(n))

    def occupy(self) -> Optional[int]:
        return self.free_slots.pop() if self.free_slots else None

    def vacate(self, slot: int) -> None:
        self.free_slots.append(slot)


@dataclass
class SpecRequest:
    rid: int
    n_draft: int
    slot: Optional[int] = None
    tree: List[int] = field(default_factory=list)
    owns_slot: bool = False


class SpecWorker:
    def __init__(self, slots: DraftSlots, accept: Callable[[int], bool]) -> None:
        self.slots = slots
        self.accept = accept
        self.running: Dict[int, SpecRequest] = {}
        self.shared_slot = slots.occupy()  # clean: held for the worker's life, vacated in shutdown

    def shutdown(self) -> None:
        if self.shared_slot is not None:
            self.slots.vacate(self.shared_slot)
            self.shared_slot = None

    def attach(self, req: SpecRequest, private: bool) -> bool:
        """Give the request a slot of its own or the shared one."""
        if private:
            slot = self.slots.occupy()  # clean: near miss, detach vacates it where owns_slot is set
            if slot is None:
                return False
            req.owns_slot = True
        else:
            slot = self.shared_slot
            req.owns_slot = False
        req.slot = slot
        self.running[req.rid] = req
        return True

    def detach(self, rid: int) -> None:
        req = self.running.pop(rid)
        if req.owns_slot:
            self.slots.vacate(req.slot)
        req.slot = None

    def attach_draft(self, req: SpecRequest) -> bool:
        slot = self.slots.occupy()  # leak: owns_slot is not set, so detach passes it over
        if slot is None:
            return False
        req.slot = slot
        self.running[req.rid] = req
        return True

    def grow_tree(self, req: SpecRequest, width: int) -> int:
        for _ in range(width):
            node = self.slots.occupy()  # clean: in the tree, vacated in prune
            if node is None:
                break
            req.tree.append(node)
        return len(req.tree)

    def prune(self, req: SpecRequest) -> None:
        for node in req.tree:
            self.slots.vacate(node)
        req.tree = []

    def verify(self, n: int) -> Tuple[int, List[int]]:
        """Slots of the accepted drafts; the caller vacates them."""
        kept: List[int] = []
        for _ in range(n):
            slot = self.slots.occupy()  # clean: near miss, a rejected one is vacated and the others returned
            if slot is None:
                break
            if not self.accept(slot):
                self.slots.vacate(slot)
                continue
            kept.append(slot)
        return len(kept), kept

    def count_accepted(self, n: int) -> int:
        count, _ = self.verify(n)  # leak: the slots in the second part are ignored
        return count

    def commit(self, n: int) -> int:
        count, kept = self.verify(n)  # clean: vacated
        for slot in kept:
            self.slots.vacate(slot)
        return count

    def verify_strict(self, n: int) -> List[int]:
        kept: List[int] = []
        for _ in range(n):
            slot = self.slots.occupy()  # leak: a rejection clears those kept without vacating them
            if slot is None:
                break
            if not self.accept(slot):
                self.slots.vacate(slot)
                kept.clear()
                break
            kept.append(slot)
        return kept

    def bonus(self, req: SpecRequest) -> Optional[int]:
        use_own = req.n_draft > 0
        slot = self.slots.occupy() if use_own else self.shared_slot  # clean: near miss, vacated under the flag that chose it
        if slot is None:
            return None
        token = slot * 10
        if use_own:
            self.slots.vacate(slot)
        return token

    def bonus_once(self, req: SpecRequest) -> Optional[int]:
        use_own = req.n_draft > 0
        slot = self.slots.occupy() if use_own else self.shared_slot  # leak: n_draft is counted down before it decides about vacate
        if slot is None:
            return None
        req.n_draft -= 1
        if req.n_draft > 0:
            self.slots.vacate(slot)
        return slot * 10

    def try_tree(self, req: SpecRequest, width: int) -> bool:
        nodes = []
        for _ in range(width):
            node = self.slots.occupy()  # leak: too narrow a tree vacates all but the first
            if node is None:
                for other in nodes[1:]:
                    self.slots.vacate(other)
                return False
            nodes.append(node)
        req.tree.extend(nodes)
        return True


if __name__ == "__main__":
    w = SpecWorker(DraftSlots(6), lambda s: s % 2 == 0)
    r = SpecRequest(1, 2)
    w.attach(r, True); w.grow_tree(r, 2); w.prune(r); w.detach(1)
    print(w.commit(2), w.bonus(r)); w.shutdown(); print(len(w.slots.free_slots))
