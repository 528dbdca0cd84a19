"""LRU over resident experts."""
from __future__ import annotations

from collections import OrderedDict
from typing import List, Mapping, Optional, Tuple

import torch

from .lease import SlotLease, acquire_lease
from .slots import SlotTable


class ExpertSwapper:
    def __init__(self, table: SlotTable, host: Mapping[int, torch.Tensor]):
        self.table = table
        self.host = host
        self.resident: "OrderedDict[int, SlotLease]" = OrderedDict()

    def evict_one(self) -> bool:
        if not self.resident:
            return False
        _, lease = self.resident.popitem(last=False)
        lease.let_go()
        return True

    def get(self, expert: int) -> Optional[SlotLease]:
        """A lease of the caller's own, in addition to the resident one."""
        lease = self.resident.get(expert)
        if lease is None:
            lease = acquire_lease(self.table, expert, self.host[expert])  # clean: near miss, a None is retried, otherwise it becomes the resident one
            while lease is None:
                if not self.evict_one():
                    return None
                lease = acquire_lease(self.table, expert, self.host[expert])  # clean: stored as resident
            self.resident[expert] = lease
        self.resident.move_to_end(expert)
        return lease.share()  # clean: the extra hold is the caller's

    def preload(self, experts: List[int]) -> int:
        loaded = 0
        for e in experts:
            lease = acquire_lease(self.table, e, self.host[e])  # leak: an expert that is resident already is overwritten
            if lease is None:
                break
            self.resident[e] = lease
            loaded += 1
        return loaded

    def get_pair(self, a: int, b: int) -> Optional[Tuple[SlotLease, SlotLease]]:
        first = self.get(a)  # leak: kept when the second expert cannot be had
        if first is None:
            return None
        second = self.get(b)  # clean: returned with the first
        if second is None:
            return None
        return first, second

    def flush(self) -> None:
        while self.evict_one():
            pass
