"""Device slots for LoRA adapters, with reference counts and a loader thread.

Only ``max_loras`` adapters fit next to the base weights.  A request that uses
an adapter pins the adapter's slot; a slot without pins may be evicted.
"""
from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterator, Optional

import torch

logger = logging.getLogger("serving.lora")


class AdapterMissing(LookupError):
    pass


class RankTooLarge(ValueError):
    pass


@dataclass(eq=False)
class Slot:
    index: int
    weight: torch.Tensor
    adapter: Optional[str] = None
    pins: int = 0


@dataclass
class Request:
    rid: int
    adapter: Optional[str]
    slot: Optional[Slot] = None
    owns_pin: bool = False
    prompt: list[int] = field(default_factory=list)
    parent: Optional["Request"] = None


class SlotBank:
    def __init__(self, max_loras: int, max_rank: int, hidden: int) -> None:
        self.max_rank = max_rank
        self._lock = threading.RLock()
        self._blank = [Slot(i, torch.zeros(max_rank, hidden)) for i in range(max_loras)]
        self._resident: dict[str, Slot] = {}

    def take_blank(self) -> Optional[Slot]:
        with self._lock:
            if self._blank:
                return self._blank.pop()  # clean: handed out
            return self._evict_locked()

    def _evict_locked(self) -> Optional[Slot]:
        for name, slot in self._resident.items():
            if slot.pins == 0:
                del self._resident[name]
                slot.adapter = None
                return slot
        return None

    def return_blank(self, slot: Slot) -> None:
        with self._lock:
            slot.adapter = None
            self._blank.append(slot)

    def install(self, name: str, slot: Slot) -> None:
        """Make ``slot`` the resident copy of ``name``; a former one is blanked."""
        with self._lock:
            old = self._resident.get(name)
            if old is not None and old is not slot:
                self._blank.append(old)
            slot.adapter = name
            self._resident[name] = slot

    def pin(self, name: str) -> Optional[Slot]:
        with self._lock:
            slot = self._resident.get(name)
            if slot is not None:
                slot.pins += 1  # clean: the pinned slot is returned
            return slot

    def unpin(self, slot: Slot) -> None:
        with self._lock:
            slot.pins -= 1

    def load(self, name: str, path: Path) -> Slot:
        """Read an adapter from disk into a slot."""
        slot = self.take_blank()  # leak: the rank check raises when the slot is neither blank nor resident
        if slot is None:
            raise AdapterMissing(f"no slot for {name}")
        state = torch.load(path, map_location="cpu")
        if state["rank"] > self.max_rank:
            raise RankTooLarge(name)
        slot.weight[: state["rank"]].copy_(state["weight"])
        self.install(name, slot)
        return slot

    def load_guarded(self, name: str, path: Path) -> Optional[Slot]:
        slot = self.take_blank()  # clean: returned to the blanks unless it was installed
        if slot is None:
            return None
        installed = False
        try:
            state = torch.load(path, map_location="cpu")
            if state["rank"] > self.max_rank:
                return None
            slot.weight[: state["rank"]].copy_(state["weight"])
            self.install(name, slot)
            installed = True
            return slot
        except (OSError, KeyError) as exc:
            logger.error("adapter %s: %s", name, exc)
            return None
        finally:
            if not installed:
                self.return_blank(slot)

    def defragment(self, keep: int) -> int:
        """Zero the weights of blank slots beyond ``keep``."""
        cleared = 0
        with self._lock:
            while len(self._blank) > keep:
                slot = self._blank.pop()  # leak: the cleared slots go into no list at all
                slot.weight.zero_()
                cleared += 1
        return cleared

    def scrub(self) -> None:
        """Zero all blank slots."""
        with self._lock:
            blanks, self._blank = self._blank, []  # clean: appended again one after the other
            for slot in blanks:
                slot.weight.zero_()
                self._blank.append(slot)

    @contextmanager
    def pinned(self, name: str) -> Iterator[Slot]:
        slot = self.pin(name)  # clean: None raises before the try, a pin is undone in the finally
        if slot is None:
            raise AdapterMissing(name)
        try:
            yield slot
        finally:
            self.unpin(slot)


class LoraRouter:
    def __init__(self, bank: SlotBank, root: Path) -> None:
        self.bank = bank
        self.root = root
        self._active: dict[int, Request] = {}
        self._prefetched: dict[str, Slot] = {}
        self._on_done: dict[int, Callable[[], None]] = {}

    # -- binding ----------------------------------------------------------
    def bind(self, req: Request) -> bool:
        """Pin the slot of the request's adapter, loading it if need be."""
        if req.adapter is None or req.rid in self._active:
            return True
        slot = self.bank.pin(req.adapter)  # clean: kept by the request with owns_pin set
        if slot is None:
            if self.bank.load_guarded(req.adapter, self.root / req.adapter) is None:  # clean: a loaded slot is resident in the bank
                return False
            slot = self.bank.pin(req.adapter)  # clean: as above, or None
            if slot is None:
                return False
        req.slot, req.owns_pin = slot, True
        self._active[req.rid] = req
        return True

    def bind_child(self, req: Request, parent: Request) -> None:
        """A beam of ``parent`` rides on the parent's pin."""
        req.slot, req.owns_pin, req.parent = parent.slot, False, parent
        self._active[req.rid] = req

    def bind_speculative(self, req: Request) -> None:
        """Bind if the adapter happens to be resident; never load."""
        if req.adapter is None or req.rid in self._active:
            return
        req.slot = self.bank.pin(req.adapter)  # leak: owns_pin stays False, so retire never unpins
        if req.slot is not None:
            self._active[req.rid] = req

    def retire(self, rid: int) -> None:
        req = self._active.pop(rid, None)
        if req is None:
            return
        if req.owns_pin and req.slot is not None:
            self.bank.unpin(req.slot)
        req.slot, req.owns_pin = None, False
        hook = self._on_done.pop(rid, None)
        if hook is not None:
            hook()

    # -- scheduling ---------------------------------------------------------
    def batch(self, waiting: list[Request], limit: int) -> list[Request]:
        chosen: list[Request] = []
        names: set[str] = set()
        for req in waiting:
            if len(chosen) == limit:
                break
            if req.adapter is None or req.rid in self._active:
                continue
            slot = self.bank.pin(req.adapter)  # leak: an over-long prompt with an adapter new to the batch is postponed, its pin kept
            if slot is None:
                continue
            if len(req.prompt) > 4096 and req.adapter not in names:
                logger.debug("request %d postponed", req.rid)
                continue
            names.add(req.adapter)
            req.slot, req.owns_pin = slot, True
            self._active[req.rid] = req
            chosen.append(req)
        return chosen

    def admit_pair(self, draft: str, target: str) -> Optional[tuple[Slot, Slot]]:
        """Pin two adapters for speculative decoding; the caller unpins both."""
        d = self.bank.pin(draft)  # clean: unpinned if the target is not resident, otherwise returned
        t = self.bank.pin(target)  # leak: the rollback covers only a pinned draft
        if d is None:
            return None
        if t is None:
            self.bank.unpin(d)
            return None
        return d, t

    def switch(self, rid: int, adapter: str) -> bool:
        req = self._active.get(rid)
        slot = self.bank.pin(adapter)  # clean: unpinned when unused, else it replaces the request's former pin
        if slot is None:
            return False
        if req is None or not req.owns_pin or req.slot is None:
            self.bank.unpin(slot)
            return False
        self.bank.unpin(req.slot)
        req.slot, req.adapter = slot, adapter
        return True

    # -- prefetch -------------------------------------------------------------
    def prefetch(self, name: str) -> None:
        """Pin an adapter that is expected soon."""
        slot = self.bank.pin(name)  # leak: a name that is prefetched already has its pin counted twice and dropped once
        if slot is not None:
            self._prefetched[name] = slot

    def drop_prefetched(self) -> None:
        while self._prefetched:
            _, slot = self._prefetched.popitem()
            self.bank.unpin(slot)

    def hold_until_done(self, rid: int, name: str) -> bool:
        """Keep a second adapter resident for as long as ``rid`` runs."""
        if rid not in self._active or rid in self._on_done:
            return False
        slot = self.bank.pin(name)  # clean: the hook that retire runs unpins it
        if slot is None:
            return False
        self._on_done[rid] = lambda: self.bank.unpin(slot)
        return True

    def forward(self, req: Request, x: torch.Tensor) -> torch.Tensor:
        if req.slot is not None:
            return x @ req.slot.weight.T @ req.slot.weight
        if req.adapter is None:
            return x
        with self.bank.pinned(req.adapter) as slot:  # clean: context manager
            return x @ slot.weight.T @ slot.weight
