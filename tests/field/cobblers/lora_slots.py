"""LoRA adapters on the GPU: a fixed number of slots, reference counts per adapter, pin for always-on ones."""
from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Set, Tuple

logger = logging.getLogger(__name__)


@dataclass
class Adapter:
    name: str
    rank: int
    weights: Dict[str, List[float]]


class SlotLease:
    __slots__ = ("index", "adapter", "_pool")

    def __init__(self, index: int, pool: "AdapterSlots") -> None:
        self.index = index
        self.adapter: Optional[Adapter] = None
        self._pool = pool

    def surrender(self) -> None:
        self._pool.vacate(self)


class AdapterSlots:
    def __init__(self, n: int) -> None:
        self._vacant: List[int] = list(range(n))[::-1]
        self.occupied: Set[int] = set()

    def occupy(self) -> Optional[SlotLease]:
        if not self._vacant:
            return None
        idx = self._vacant.pop()
        self.occupied.add(idx)
        return SlotLease(idx, self)

    def vacate(self, lease: SlotLease) -> None:
        self.occupied.remove(lease.index)
        lease.adapter = None
        self._vacant.append(lease.index)


class AdapterRef:
    """Counted: retain()/drop(). The slot is surrendered with the last drop."""

    def __init__(self, lease: SlotLease) -> None:
        self.lease = lease
        self.count = 0

    def retain(self) -> "AdapterRef":
        self.count += 1
        return self

    def drop(self) -> None:
        self.count -= 1
        if self.count == 0:
            self.lease.surrender()


def read_config(path: str) -> Optional[Dict[str, Any]]:
    fh = open(os.path.join(path, "adapter_config.json"))  # leak: the except for broken JSON returns without close
    try:
        cfg = json.load(fh)
    except json.JSONDecodeError:
        logger.error("broken adapter config in %s", path)
        return None
    fh.close()
    return cfg


def read_weights(path: str) -> Dict[str, List[float]]:
    fh = open(os.path.join(path, "weights.json"))  # clean: closed in the finally, caught error included
    try:
        return json.load(fh)
    except json.JSONDecodeError:
        return {}
    finally:
        fh.close()


def read_index(path: str) -> List[str]:
    names: List[str] = []
    fh = open(path)  # clean: near miss, break falls through to close
    for line in fh:
        line = line.strip()
        if line == "---":
            break
        if not line or line.startswith("#"):
            continue
        names.append(line)
    fh.close()
    return names


class LoRAManager:
    def __init__(self, slots: AdapterSlots, root: str, max_rank: int = 64) -> None:
        self.slots = slots
        self.root = root
        self.max_rank = max_rank
        self.active: Dict[str, AdapterRef] = {}
        self.pinned: Dict[str, AdapterRef] = {}

    def _load(self, name: str) -> Optional[Adapter]:
        path = os.path.join(self.root, name)
        cfg = read_config(path)
        if cfg is None:
            return None
        return Adapter(name, cfg["r"], read_weights(path))

    def activate(self, name: str) -> Optional[AdapterRef]:
        """A counted reference for one request."""
        ref = self.active.get(name)
        if ref is not None and ref.count > 0:
            return ref.retain()  # clean: reference handed to the caller
        lease = self.slots.occupy()  # leak: an adapter that does not load or is too large leaves the slot occupied
        if lease is None:
            return None
        adapter = self._load(name)
        if adapter is None or adapter.rank > self.max_rank:
            logger.warning("adapter %s refused", name)
            return None
        lease.adapter = adapter
        ref = self.active[name] = AdapterRef(lease)
        return ref.retain()  # clean: first reference, handed to the caller

    def activate_checked(self, name: str) -> Optional[AdapterRef]:
        ref = self.active.get(name)
        if ref is None or ref.count == 0:
            lease = self.slots.occupy()  # clean: near miss, surrendered when the adapter does not load, else owned by the AdapterRef
            if lease is None:
                return None
            lease.adapter = self._load(name)
            if lease.adapter is None:
                lease.surrender()
                return None
            ref = self.active[name] = AdapterRef(lease)
        return ref.retain()  # clean: handed to the caller

    def pin(self, name: str) -> bool:
        if name in self.pinned:
            return True
        ref = self.activate_checked(name)  # clean: kept in pinned until unpin
        if ref is None:
            return False
        self.pinned[name] = ref
        return True

    def unpin(self, name: str) -> None:
        ref = self.pinned.pop(name, None)
        if ref is not None:
            ref.drop()

    def rank_of(self, name: str) -> int:
        ref = self.activate_checked(name)  # leak: the reference is used for its rank and forgotten
        return ref.lease.adapter.rank if ref else 0


@dataclass
class Row:
    request_id: str
    adapter: Optional[AdapterRef] = None


class LoRABatch:
    """Adapters of the rows of one forward pass."""

    def __init__(self, mgr: LoRAManager, limit: int) -> None:
        self.mgr = mgr
        self.limit = limit
        self.rows: Dict[str, Row] = {}

    def add(self, request_id: str, name: Optional[str]) -> bool:
        ref = self.mgr.activate_checked(name) if name else None  # leak: a full batch refuses the row and keeps the reference
        if name and ref is None:
            return False
        if len(self.rows) >= self.limit:
            return False
        self.rows[request_id] = Row(request_id, ref)
        return True

    def add_front(self, request_id: str, name: Optional[str]) -> bool:
        if request_id in self.rows or len(self.rows) >= self.limit:
            return False
        row = Row(request_id)
        if name is not None:
            row.adapter = self.mgr.activate_checked(name)  # clean: near miss, owned by the row, which is only dropped when it got nothing
            if row.adapter is None:
                return False
        self.rows[request_id] = row
        return True

    def remove(self, request_id: str) -> None:
        row = self.rows.pop(request_id, None)
        if row is not None and row.adapter is not None:
            row.adapter.drop()

    def share(self, src: str, dst: str) -> None:
        """n>1 sampling: the new row uses the adapter of its parent."""
        parent = self.rows[src].adapter
        self.remove(dst)
        self.rows[dst] = Row(dst, parent.retain() if parent is not None else None)  # clean: the new row owns its own reference

    def preload(self, requests: List[Tuple[str, str]]) -> List[str]:
        """Activate what the next step needs; returns the ids that must wait."""
        wait: List[str] = []
        refs: List[AdapterRef] = []
        for rid, name in requests:
            ref = self.mgr.activate_checked(name)  # clean: near miss, all of the list are dropped after the barrier
            if ref is None:
                wait.append(rid)
                continue
            refs.append(ref)
        for ref in refs:
            ref.drop()
        return wait

    def merge_into_base(self, name: str, keys: Set[str]) -> int:
        ref = self.mgr.activate_checked(name)  # leak: no overlap with the base model's keys returns early
        if ref is None:
            return 0
        hit = keys & set(ref.lease.adapter.weights)
        if not hit:
            return 0
        for k in hit:
            ref.lease.adapter.weights[k] = [0.0]
        ref.drop()
        return len(hit)
