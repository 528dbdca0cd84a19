"""LoRA adapter residency: device slots and reference counted host copies."""
from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional

logger = logging.getLogger("serve.lora")


class SlotTable:
    """Rows of the stacked A/B weight tensors on the device."""

    def __init__(self, rows: int) -> None:
        self._owner: List[Optional[str]] = [None] * rows
        self._mu = threading.Lock()

    def claim(self, name: str) -> int:
        with self._mu:
            for i, who in enumerate(self._owner):
                if who is None:
                    self._owner[i] = name
                    return i
        return -1

    def surrender(self, row: int) -> None:
        with self._mu:
            self._owner[row] = None


@dataclass
class Adapter:
    name: str
    rank: int
    path: str
    users: int = 0


class AdapterStore:
    """Host side adapters; an adapter with users is never dropped."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._mu = threading.Lock()
        self._held: Dict[str, Adapter] = {}

    def checkout(self, name: str) -> Adapter:
        with self._mu:
            ad = self._held.get(name)
            if ad is None:
                ad = self._load(name)
                self._held[name] = ad
            ad.users += 1
            return ad

    def checkin(self, ad: Adapter) -> None:
        with self._mu:
            ad.users -= 1

    def sweep(self) -> int:
        with self._mu:
            idle = [n for n, a in self._held.items() if a.users <= 0]
            for n in idle:
                del self._held[n]
            return len(idle)

    def _load(self, name: str) -> Adapter:
        path = os.path.join(self.root, name, "adapter_config.json")
        with open(path, encoding="utf-8") as fh:  # clean: closed by with
            cfg = json.load(fh)
        return Adapter(name, int(cfg.get("r", 8)), path)


@dataclass
class Active:
    row: int
    adapter: Adapter
    hits: int = 0


class LoRAManager:
    def __init__(self, table: SlotTable, store: AdapterStore, max_rank: int = 64) -> None:
        self.table = table
        self.store = store
        self.max_rank = max_rank
        self.active: Dict[str, Active] = {}
        self.kept: Dict[str, int] = {}
        self.prefetched: Dict[str, Adapter] = {}
        self._reload = threading.Lock()
        self.generation = 0

    def activate(self, name: str) -> Optional[int]:
        cur = self.active.get(name)
        if cur is not None:
            cur.hits += 1
            return cur.row
        row = self.table.claim(name)  # clean: surrendered on bad rank, else in active and by deactivate
        if row < 0:
            return None
        adapter = self.store.checkout(name)  # leak: swap pops the Active and never checks the old one in
        if adapter.rank > self.max_rank:
            logger.warning("%s: rank %d too large", name, adapter.rank)
            self.store.checkin(adapter)
            self.table.surrender(row)
            return None
        self.active[name] = Active(row, adapter)
        return row

    def deactivate(self, name: str) -> None:
        act = self.active.pop(name, None)
        if act is None:
            return
        self.table.surrender(act.row)
        self.store.checkin(act.adapter)

    def swap(self, old: str, new: str) -> Optional[int]:
        """Reuse the row of one adapter for another without a gap."""
        if old not in self.active or new in self.active:
            return None
        incoming = self.store.checkout(new)  # leak: in active, where the next swap drops it unchecked
        if incoming.rank > self.max_rank:
            self.store.checkin(incoming)
            return None
        outgoing = self.active.pop(old)
        self.active[new] = Active(outgoing.row, incoming)
        logger.info("row %d: %s -> %s", outgoing.row, old, new)
        return outgoing.row

    def prefetch(self, names: List[str]) -> int:
        for name in names:
            ad = self.store.checkout(name)  # leak: dropped when the adapter is active or already prefetched
            if name in self.active or name in self.prefetched:
                continue
            self.prefetched[name] = ad
        return len(self.prefetched)

    def drop_prefetched(self) -> None:
        while self.prefetched:
            _, ad = self.prefetched.popitem()
            self.store.checkin(ad)

    def run_once(self, name: str, x: Any) -> Optional[Any]:
        act = self.active.get(name)
        owned = act is None
        if act is not None:
            row = act.row
        else:
            row = self.table.claim(name)  # clean: near miss, owned is true exactly here and surrenders it
            if row < 0:
                return None
        y = self._apply(row, x)
        if owned:
            self.table.surrender(row)
        return y

    def run_merged(self, name: str, x: Any, keep: bool = False) -> Optional[Any]:
        row = self.table.claim(name)  # leak: with keep and 32 rows already kept nobody has it
        if row < 0:
            return None
        y = self._apply(row, x)
        if keep and len(self.kept) < 32:
            stale = self.kept.pop(name, None)
            if stale is not None:
                self.table.surrender(stale)
            self.kept[name] = row
        if not keep:
            self.table.surrender(row)
        return y

    def _apply(self, row: int, x: Any) -> Any:
        return (row, x)

    @contextlib.contextmanager
    def borrow(self, name: str) -> Iterator[Adapter]:
        ad = self.store.checkout(name)  # clean: checked in in finally
        try:
            yield ad
        finally:
            self.store.checkin(ad)

    def rank_of(self, name: str) -> int:
        with self.borrow(name) as ad:  # clean: ended by the context manager
            return min(ad.rank, self.max_rank)

    def reload(self, names: List[str]) -> bool:
        if not self._reload.acquire(timeout=0.5):  # leak: the return for no names keeps the lock
            return False
        if not names:
            return True
        for name in names:
            self.deactivate(name)
        self.generation += 1
        self._reload.release()
        return True

    def try_sweep(self) -> int:
        if not self._reload.acquire(blocking=False):  # clean: near miss, not held on the early return
            return 0
        try:
            return self.store.sweep()
        finally:
            self._reload.release()

    def close(self) -> None:
        for name in list(self.active):
            self.deactivate(name)
        for row in self.kept.values():
            self.table.surrender(row)
        self.kept.clear()
        self.drop_prefetched()


class BaseWorker:
    """Keeps the default adapter checked out for its whole life."""

    def __init__(self, mgr: LoRAManager, default: str) -> None:
        self.mgr = mgr
        self.default = mgr.store.checkout(default)  # clean: near miss, checked in by stop
        self.alive = True

    def stop(self) -> None:
        if self.alive:
            self.alive = False
            self.mgr.store.checkin(self.default)


class MergedWorker:
    """Folds one adapter into the base weights; needs a row while folding."""

    def __init__(self, mgr: LoRAManager, name: str) -> None:
        self.mgr = mgr
        self.source = mgr.store.checkout(name)  # leak: shutdown gives the row back but not the adapter
        self.row = mgr.table.claim(name)  # clean: surrendered by shutdown unless negative

    def fold(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        return {k: (v, self.source.rank) for k, v in weights.items()}

    def shutdown(self) -> None:
        if self.row >= 0:
            self.mgr.table.surrender(self.row)
            self.row = -1
        self.source = None
