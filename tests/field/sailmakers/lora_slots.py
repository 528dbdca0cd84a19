"""LoRA adapter residency: device slots, pinned host copies and the request-side references on them."""
import logging
import os
import threading
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Set

import torch
from safetensors import safe_open

logger = logging.getLogger(__name__)


class AdapterUnavailable(Exception):
    pass


@dataclass
class Resident:
    name: str
    slot: int
    refs: int = 0
    users: Set[str] = field(default_factory=set)


class PinnedArena:
    """Fixed-size pinned host pages, large enough for the biggest supported rank."""

    def __init__(self, page_bytes: int, count: int):
        self.page_bytes = page_bytes
        self._pages: List[torch.Tensor] = [
            torch.empty(page_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)
        ]
        self._sem = threading.Semaphore(count)

    def page(self, wait: bool = True) -> Optional[torch.Tensor]:
        if not self._sem.acquire(blocking=wait):  # clean: released by recycle()
            return None
        return self._pages.pop()  # clean: returned to the caller

    def recycle(self, page: torch.Tensor) -> None:
        self._pages.append(page)
        self._sem.release()


class SlotBank:
    def __init__(self, n: int):
        self._vacant = list(reversed(range(n)))

    def occupy(self) -> Optional[int]:
        if not self._vacant:
            return None
        return self._vacant.pop()  # clean: returned to the caller

    def vacate(self, slot: int) -> None:
        self._vacant.append(slot)


class LoRAManager:
    def __init__(self, root: str, bank: SlotBank, arena: PinnedArena, weights: torch.Tensor, max_host: int):
        self.root = root
        self.bank, self.arena, self.weights = bank, arena, weights
        self.max_host = max_host
        self.resident: "OrderedDict[str, Resident]" = OrderedDict()
        self.host: "OrderedDict[str, torch.Tensor]" = OrderedDict()
        self.by_request: Dict[str, Resident] = {}
        self._lock = threading.RLock()

    # ---- host copies -------------------------------------------------

    def _read_file(self, name: str, page: torch.Tensor) -> int:
        path = os.path.join(self.root, name, "adapter_model.safetensors")
        if not os.path.exists(path):
            return 0
        off = 0
        with safe_open(path, framework="pt") as f:  # clean: context manager
            for key in f.keys():
                flat = f.get_tensor(key).reshape(-1).view(torch.uint8)
                page[off:off + flat.numel()].copy_(flat)
                off += flat.numel()
        return off

    def load_host(self, name: str) -> Optional[torch.Tensor]:
        page = self.host.get(name)
        if page is not None:
            self.host.move_to_end(name)
            return page
        page = self.arena.page(wait=False)  # leak: not recycled when the adapter file does not exist
        if page is None:
            return None
        if self._read_file(name, page) == 0:
            logger.warning("no weights for adapter %s", name)
            return None
        self.host[name] = page
        while len(self.host) > self.max_host:
            _, old = self.host.popitem(last=False)
            self.arena.recycle(old)
        return page

    # ---- device slots ------------------------------------------------

    def _evict_one(self) -> bool:
        for name, r in self.resident.items():
            if r.refs == 0:
                del self.resident[name]
                self.bank.vacate(r.slot)
                return True
        return False

    def _slot(self) -> Optional[int]:
        slot = self.bank.occupy()  # clean: near miss, retried only while it is None
        while slot is None and self._evict_one():
            slot = self.bank.occupy()  # clean: returned to the caller
        return slot

    def activate(self, name: str) -> Resident:
        r = self.resident.get(name)
        if r is not None:
            self.resident.move_to_end(name)
            return r
        slot = self._slot()  # leak: not vacated when the host copy is missing and AdapterUnavailable is raised
        if slot is None:
            raise AdapterUnavailable("all adapter slots are in use")
        page = self.load_host(name)
        if page is None:
            raise AdapterUnavailable(name)
        self.weights[slot].copy_(page, non_blocking=True)
        r = Resident(name, slot)
        self.resident[name] = r
        return r

    def hot_swap(self, name: str, page: torch.Tensor) -> None:
        """Replaces an adapter in place of the old version once no request uses it."""
        fresh = self._slot()  # clean: near miss, the flag decides, vacated unless it became the resident slot
        if fresh is None:
            return
        installed = False
        try:
            self.weights[fresh].copy_(page)
            old = self.resident.get(name)
            if old is not None and old.refs == 0:
                self.bank.vacate(old.slot)
                old.slot = fresh
                installed = True
        finally:
            if not installed:
                self.bank.vacate(fresh)

    def unload(self, name: str) -> bool:
        with self._lock:
            r = self.resident.get(name)
            if r is not None:
                if r.refs:
                    return False
                del self.resident[name]
                self.bank.vacate(r.slot)
            page = self.host.pop(name, None)
            if page is not None:
                self.arena.recycle(page)
            return True

    # ---- request references -------------------------------------------

    def ref(self, name: str) -> Resident:
        with self._lock:
            r = self.activate(name)
            r.refs += 1
            return r

    def unref(self, r: Resident) -> None:
        with self._lock:
            r.refs -= 1

    def bind(self, rid: str, name: str, rank_limit: int) -> bool:
        r = self.ref(name)  # leak: the reference stays when the slot exceeds the rank limit
        if int(self.weights[r.slot].count_nonzero()) > rank_limit:
            return False
        self.by_request[rid] = r
        r.users.add(rid)
        return True

    def unbind(self, rid: str) -> None:
        r = self.by_request.pop(rid, None)
        if r is None:
            return
        r.users.discard(rid)
        self.unref(r)

    def bind_batch(self, wanted: Dict[str, str]) -> Dict[str, int]:
        """All or nothing: rid -> slot."""
        got: Dict[str, Resident] = {}
        try:
            for rid, name in wanted.items():
                got[rid] = self.ref(name)  # clean: unref on AdapterUnavailable, else owned by by_request
        except AdapterUnavailable:
            for r in got.values():
                self.unref(r)
            raise
        for rid in got:
            self.unbind(rid)
        self.by_request.update(got)
        return {rid: r.slot for rid, r in got.items()}

    def score_adapters(self, names: List[str], probe) -> Dict[str, float]:
        out = {}
        for name in names:
            try:
                r = self.ref(name)  # leak: continue on a None score skips unref
            except AdapterUnavailable:
                continue
            s = probe(r.slot)
            if s is None:
                continue
            out[name] = s
            self.unref(r)
        return out

    def rebind(self, rid: str, name: str) -> None:
        nxt = self.ref(name)  # leak: a rebind to the same adapter overwrites the entry and keeps two references
        prev = self.by_request.get(rid)
        self.by_request[rid] = nxt
        if prev is not None and prev.name != name:
            self.unref(prev)
