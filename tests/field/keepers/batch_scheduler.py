"""Continuous batching: decode slots, prompt KV pages, grammar handles and preemption."""
from __future__ import annotations

import time
from collections import deque
from typing import Any, Deque, Dict, List, Optional


class DecodeSlots:
    def __init__(self, n: int) -> None:
        self.owner: List[Optional[str]] = [None] * n

    def occupy(self, rid: str) -> Optional[int]:
        for i, who in enumerate(self.owner):
            if who is None:
                self.owner[i] = rid
                return i
        return None

    def vacate(self, slot: int) -> None:
        self.owner[slot] = None


class PagePool:
    def __init__(self, pages: int) -> None:
        self._free = list(range(pages))

    def get(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        taken, self._free = self._free[:n], self._free[n:]
        return taken

    def put(self, pages: List[int]) -> None:
        self._free.extend(pages)


class GrammarCache:
    """Compiled grammars counted by running requests."""

    def __init__(self) -> None:
        self._entries: Dict[str, Dict[str, Any]] = {}

    def attach(self, text: str) -> str:
        ent = self._entries.setdefault(text, {"refs": 0, "compiled": text.split()})
        ent["refs"] += 1
        return text

    def detach(self, key: str) -> None:
        ent = self._entries[key]
        ent["refs"] -= 1
        if ent["refs"] == 0:
            del self._entries[key]


class Scheduler:
    def __init__(self, slots: DecodeSlots, pages: PagePool, grammars: GrammarCache, page: int = 16) -> None:
        self.slots = slots
        self.pages = pages
        self.grammars = grammars
        self.page = page
        self.waiting: Deque[Dict[str, Any]] = deque()
        self.running: Dict[str, Dict[str, Any]] = {}
        self.prefetched: Dict[str, List[int]] = {}

    def add(self, req: Dict[str, Any]) -> bool:
        req.setdefault("grammar", None)
        if req.get("schema"):
            req["grammar"] = self.grammars.attach(req["schema"])  # leak: a prompt over the limit is refused with the grammar attached
        if len(req["prompt"]) > 8192:
            req["error"] = "prompt too long"
            return False
        self.waiting.append(req)
        return True

    def _admit(self, req: Dict[str, Any]) -> bool:
        need = -(-len(req["prompt"]) // self.page)
        slot = self.slots.occupy(req["id"])  # clean: near miss, vacated when there are no pages, else kept in the request
        if slot is None:
            return False
        pages = self.pages.get(need)  # clean: in the request, put by _release_all
        if pages is None:
            self.slots.vacate(slot)
            return False
        req["slot"], req["pages"] = slot, pages
        self.running[req["id"]] = req
        return True

    def schedule(self) -> List[Dict[str, Any]]:
        while self.waiting:
            if not self._admit(self.waiting[0]):
                break
            self.waiting.popleft()
        batch: List[Dict[str, Any]] = []
        for req in list(self.running.values()):
            if req["id"] not in self.running:
                continue
            if len(req["prompt"]) + len(req["out"]) >= len(req["pages"]) * self.page:
                more = self.pages.get(1)  # clean: near miss, joined to the request's pages unless None
                if more is None:
                    self.preempt(req)
                    continue
                req["pages"] += more
            batch.append(req)
        return batch

    def preempt(self, req: Dict[str, Any]) -> None:
        self.running.pop(req["id"])
        self.slots.vacate(req.pop("slot"))
        self.pages.put(req.pop("pages"))
        self.waiting.appendleft(req)

    def _release_all(self, req: Dict[str, Any]) -> None:
        self.slots.vacate(req.pop("slot"))
        self.pages.put(req.pop("pages"))
        if req["grammar"] is not None:
            self.grammars.detach(req["grammar"])
            req["grammar"] = None

    def finish(self, rid: str) -> None:
        self._release_all(self.running.pop(rid))

    def abort(self, rid: str) -> bool:
        req = self.running.pop(rid, None)
        if req is not None:
            self._release_all(req)
            return True
        for req in list(self.waiting):
            if req["id"] == rid:
                self.waiting.remove(req)
                if req["grammar"] is not None:
                    self.grammars.detach(req["grammar"])
                return True
        return False

    def admit_now(self, req: Dict[str, Any]) -> bool:
        req["grammar"] = None
        slot = self.slots.occupy(req["id"])  # leak: stays occupied when the pages are not granted
        if slot is None:
            return False
        pages = self.pages.get(-(-len(req["prompt"]) // self.page))  # clean: in the request, put by _release_all
        if pages is None:
            self.waiting.append(req)
            return False
        req.update(slot=slot, pages=pages)
        self.running[req["id"]] = req
        return True

    def prefetch(self, rid: str, tokens: int) -> bool:
        pages = self.pages.get(-(-tokens // self.page))  # leak: taken again for an id already prefetched, the list before is replaced
        if pages is None:
            return False
        self.prefetched[rid] = pages
        return True

    def drop_prefetch(self, rid: str) -> None:
        pages = self.prefetched.pop(rid, None)
        if pages:
            self.pages.put(pages)

    def retry_admit(self, req: Dict[str, Any], tries: int) -> bool:
        for attempt in range(tries):
            slot = self.slots.occupy(req["id"])  # clean: near miss, vacated before the next attempt
            if slot is None:
                time.sleep(0.001 * attempt)
                continue
            pages = self.pages.get(1)  # clean: near miss, kept in the request, None otherwise
            if pages is not None:
                req.update(slot=slot, pages=pages, grammar=None)
                self.running[req["id"]] = req
                return True
            self.slots.vacate(slot)
        return False

    def speculative_pages(self, rid: str, k: int) -> List[int]:
        req = self.running[rid]
        pages = self.pages.get(k)  # leak: the pages behind the accepted ones go nowhere
        if pages is None:
            return []
        used = pages[:req.get("accepted", 0)]
        req["pages"] += used
        return used

    def probe(self, tokens: int) -> bool:
        pages = self.pages.get(-(-tokens // self.page))  # clean: put right away
        if pages is None:
            return False
        self.pages.put(pages)
        return True
