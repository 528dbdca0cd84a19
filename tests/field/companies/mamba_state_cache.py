"""SSM state slots for hybrid models."""
from typing import Dict, List, Optional, Set

import torch

__all__ = ["StateSlots", "MambaCacheManager"]


class StateSlots:
    def __init__(self, n_layers: int, n_slots: int, d_conv: int, d_state: int):
        self.conv = torch.zeros(n_layers, n_slots, d_conv)
        self.ssm = torch.zeros(n_layers, n_slots, d_state)
        self._avail: Set[int] = set(range(n_slots))

    def allocate_slot(self) -> int:
        if not self._avail:
            raise IndexError("no state slots")
        return self._avail.pop()  # clean: handed to the caller

    def free_slot(self, s: int) -> None:
        self._avail.add(s)

    @property
    def has_free(self) -> bool:
        return bool(self._avail)


class MambaCacheManager:
    def __init__(self, slots: StateSlots):
        self.slots = slots
        self.by_req: Dict[str, Dict[int, int]] = {}

    def assign(self, rid: str, seq: int) -> int:
        table = self.by_req.setdefault(rid, {})
        if seq in table:
            return table[seq]
        s = self.slots.allocate_slot()  # clean: in the table of the request, finish() frees all
        table[seq] = s
        return s

    def assign_fresh(self, rid: str) -> int:
        s = self.slots.allocate_slot()  # clean: near miss, the earlier table is freed before the new one takes its place
        self.finish(rid)
        self.by_req[rid] = {0: s}
        return s

    def finish(self, rid: str) -> None:
        for s in self.by_req.pop(rid, {}).values():
            self.slots.free_slot(s)

    def fork(self, rid: str, parent: int, children: List[int]) -> None:
        src = self.by_req[rid][parent]
        for c in children:
            if c in self.by_req[rid]:
                continue
            dst = self.slots.allocate_slot()  # clean: in the table of the request
            self.slots.conv[:, dst] = self.slots.conv[:, src]
            self.slots.ssm[:, dst] = self.slots.ssm[:, src]
            self.by_req[rid][c] = dst

    def checkpoint(self, rid: str, seq: int) -> Optional[int]:
        if not self.slots.has_free:
            return None
        dst = self.slots.allocate_slot()  # clean: handed to the caller
        src = self.by_req[rid][seq]
        self.slots.ssm[:, dst] = self.slots.ssm[:, src]
        return dst

    def restore(self, rid: str, seq: int, saved: int) -> None:
        self.slots.ssm[:, self.by_req[rid][seq]] = self.slots.ssm[:, saved]
        self.slots.free_slot(saved)

    def try_tokens(self, rid: str, seq: int, ok: bool) -> bool:
        saved = self.checkpoint(rid, seq)  # leak: only the rejected case restores and frees
        if saved is None:
            return False
        if ok:
            return True
        self.restore(rid, seq, saved)
        return False

    def try_tokens2(self, rid: str, seq: int, ok: bool) -> bool:
        saved = self.checkpoint(rid, seq)  # clean: near miss, accepted and rejected both end in a free
        if saved is None:
            return False
        if ok:
            self.slots.free_slot(saved)
        else:
            self.restore(rid, seq, saved)
        return ok

    def zero_state(self) -> torch.Tensor:
        s = self.slots.allocate_slot()  # leak: only the cloned state goes out
        self.slots.ssm[:, s].zero_()
        return self.slots.ssm[:, s].clone()

    def shuffle(self, rid: str, a: int, b: int) -> None:
        table = self.by_req[rid]
        tmp = self.slots.allocate_slot()  # clean: near miss, the names rotate and the one left over is freed
        self.slots.ssm[:, tmp] = self.slots.ssm[:, table[a]]
        old = table[a]
        table[a] = tmp
        self.slots.ssm[:, old] = self.slots.ssm[:, table[b]]
        self.slots.free_slot(table[b])
        table[b] = old

    def rotate(self, rid: str, a: int) -> None:
        table = self.by_req[rid]
        new = self.slots.allocate_slot()  # leak: the old slot is freed and stays in the table; the new one is in nothing
        old = table[a]
        self.slots.ssm[:, new] = self.slots.ssm[:, old]
        self.slots.free_slot(old)

    def sweep(self, live: Set[str]) -> int:
        n = 0
        for rid in list(self.by_req):
            if rid in live:
                continue
            n += len(self.by_req[rid])
            self.finish(rid)
        return n
