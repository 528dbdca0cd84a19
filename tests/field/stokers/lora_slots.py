from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Set, Tuple

import torch

logger = logging.getLogger(__name__)

Loader = Callable[[str], Optional[Dict[str, torch.Tensor]]]


class AdapterBank:
    """Stacked adapter weights; a slot is lent to one adapter, adapters are referenced by requests."""

    def __init__(self, slots: int, rank: int, hidden: int) -> None:
        self.a = torch.zeros(slots, rank, hidden)
        self.b = torch.zeros(slots, hidden, rank)
        self._vacant: List[int] = list(range(slots))

    def lend(self) -> Optional[int]:
        if not self._vacant:
            return None
        return self._vacant.pop(0)

    def reclaim(self, slot: int) -> None:
        self.a[slot].zero_()
        self.b[slot].zero_()
        self._vacant.append(slot)


@dataclass
class Resident:
    name: str
    slot: int
    refs: int = 0
    pinned: bool = False


class AdapterManager:
    def __init__(self, bank: AdapterBank, loader: Loader) -> None:
        self.bank = bank
        self.loader = loader
        self.residents: "OrderedDict[str, Resident]" = OrderedDict()
        self.pinned: List[Resident] = []
        self.failed: Set[str] = set()

    def _find_slot(self) -> Optional[int]:
        slot = self.bank.lend()  # clean: handed on to the caller
        if slot is not None:
            return slot
        for name, res in self.residents.items():
            if res.refs == 0:
                del self.residents[name]
                return res.slot
        return None

    def _fill(self, slot: int, weights: Dict[str, torch.Tensor]) -> None:
        self.bank.a[slot].copy_(weights["lora_a"])
        self.bank.b[slot].copy_(weights["lora_b"])

    def _load(self, name: str) -> Optional[Resident]:
        slot = self._find_slot()  # leak: an adapter the loader cannot find returns without reclaiming the slot
        if slot is None:
            return None
        weights = self.loader(name)
        if weights is None:
            self.failed.add(name)
            return None
        self._fill(slot, weights)
        res = Resident(name, slot)
        self.residents[name] = res
        return res

    def hold(self, name: str) -> Optional[Resident]:
        """References an adapter, loading it where needed."""
        res = self.residents.get(name) or self._load(name)
        if res is None:
            return None
        res.refs += 1
        self.residents.move_to_end(name)
        return res

    def let_go(self, res: Resident) -> None:
        res.refs -= 1

    def replace(self, name: str) -> bool:
        """Loads a new revision next to the old one and swaps the slots."""
        res = self.residents.get(name)
        if res is None:
            return False
        slot = self.bank.lend()  # clean: near miss, reclaimed without weights, swapped with the old slot otherwise
        if slot is None:
            return False
        weights = self.loader(name)
        if weights is None:
            self.bank.reclaim(slot)
            return False
        self._fill(slot, weights)
        res.slot, old = slot, res.slot
        self.bank.reclaim(old)
        return True

    def pin(self, name: str) -> bool:
        res = self.hold(name)  # leak: an adapter pinned already is referenced once more and unpin lets go once
        if res is None:
            return False
        if not res.pinned:
            res.pinned = True
            self.pinned.append(res)
        return True

    def unpin(self, name: str) -> None:
        for res in list(self.pinned):
            if res.name == name:
                self.pinned.remove(res)
                res.pinned = False
                self.let_go(res)

    def preload(self, names: List[str]) -> int:
        loaded = 0
        for name in names:
            res = self.hold(name)  # clean: near miss, only made resident and let go at once
            if res is None:
                continue
            self.let_go(res)
            loaded += 1
        return loaded

    def unload(self, name: str) -> bool:
        res = self.residents.get(name)
        if res is None or res.refs:
            return False
        del self.residents[name]
        self.bank.reclaim(res.slot)
        return True


@dataclass
class LoraRequest:
    ident: int
    tokens: List[int]
    adapter: Optional[Resident] = None
    fallback: Optional[Resident] = None


@dataclass
class LoraBatcher:
    manager: AdapterManager
    max_adapters: int
    base: str = "base"
    running: Dict[int, LoraRequest] = field(default_factory=dict)
    waiting: List[Tuple[int, str, List[int]]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def admit(self, ident: int, name: str, tokens: List[int]) -> bool:
        adapter = self.manager.hold(name)  # clean: near miss, let go where the batch is full, otherwise by finish or abort
        if adapter is None:
            self.waiting.append((ident, name, tokens))
            return False
        distinct = {r.adapter.slot for r in self.running.values() if r.adapter is not None}
        if adapter.slot not in distinct and len(distinct) >= self.max_adapters:
            self.manager.let_go(adapter)
            self.waiting.append((ident, name, tokens))
            return False
        self.running[ident] = LoraRequest(ident, tokens, adapter)
        return True

    def add_fallback(self, ident: int) -> bool:
        request = self.running.get(ident)
        if request is None or request.fallback is not None:
            return False
        request.fallback = self.manager.hold(self.base)  # leak: finish lets go of it, abort forgets it
        return request.fallback is not None

    def switch(self, ident: int, name: str) -> bool:
        request = self.running.get(ident)
        if request is None:
            return False
        fresh = self.manager.hold(name)  # clean: near miss, replaces the old adapter, which is let go
        if fresh is None:
            return False
        if request.adapter is not None:
            self.manager.let_go(request.adapter)
        request.adapter = fresh
        return True

    def finish(self, ident: int) -> None:
        request = self.running.pop(ident)
        if request.adapter is not None:
            self.manager.let_go(request.adapter)
        if request.fallback is not None:
            self.manager.let_go(request.fallback)

    def abort(self, ident: int) -> None:
        request = self.running.pop(ident, None)
        if request is not None and request.adapter is not None:
            self.manager.let_go(request.adapter)

    def merge_delta(self, names: List[str], scale: float) -> Optional[torch.Tensor]:
        held: List[Resident] = []
        try:
            for name in names:
                res = self.manager.hold(name)  # clean: near miss, the finally lets go of all held so far
                if res is None:
                    return None
                held.append(res)
            bank = self.manager.bank
            return scale * sum(bank.b[r.slot] @ bank.a[r.slot] for r in held)
        finally:
            for res in held:
                self.manager.let_go(res)

    def similarity(self, left: str, right: str) -> float:
        a = self.manager.hold(left)  # clean: near miss, let go behind the comparison and where the second is missing
        if a is None:
            return 0.0
        b = self.manager.hold(right)  # leak: two names of one slot return with only the first reference undone
        if b is None:
            self.manager.let_go(a)
            return 0.0
        if a.slot == b.slot:
            self.manager.let_go(a)
            return 1.0
        bank = self.manager.bank
        value = torch.cosine_similarity(bank.a[a.slot].flatten(), bank.a[b.slot].flatten(), dim=0).item()
        self.manager.let_go(b)
        self.manager.let_go(a)
        return value
