"""Multimodal encoder output cache: a token budget that is reserved, entries that are reference counted."""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Set


class EncoderBudget:
    """Counting budget. `reserve` answers whether it got the tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0

    def reserve(self, n: int) -> bool:
        if self.used + n > self.capacity:
            return False
        self.used += n
        return True

    def unreserve(self, n: int) -> None:
        if n > self.used:
            raise ValueError("unreserve of more than reserved")
        self.used -= n


@dataclass
class Entry:
    mm_hash: str
    num_tokens: int
    output: Any = None
    refs: int = 0

    def incref(self) -> "Entry":
        self.refs += 1
        return self

    def decref(self) -> int:
        self.refs -= 1
        return self.refs


@dataclass
class MMRequest:
    req_id: str
    items: List[Any]
    held: Dict[int, Entry] = field(default_factory=dict)


class EncoderCache:
    def __init__(self, budget: EncoderBudget, encode: Callable[[Any], Any]) -> None:
        self.budget = budget
        self.encode = encode
        self.entries: Dict[str, Entry] = {}
        self.idle: "OrderedDict[str, Entry]" = OrderedDict()

    def _evict_idle(self, need: int) -> None:
        while self.idle and self.budget.used + need > self.budget.capacity:
            _, entry = self.idle.popitem(last=False)
            del self.entries[entry.mm_hash]
            self.budget.unreserve(entry.num_tokens)

    def get(self, mm_hash: str) -> Optional[Entry]:
        """A counted entry; pair with `put_back`."""
        entry = self.entries.get(mm_hash)
        if entry is None:
            return None
        self.idle.pop(mm_hash, None)
        return entry.incref()  # clean: returned to the caller

    def put_back(self, entry: Entry) -> None:
        if entry.decref() == 0:
            self.idle[entry.mm_hash] = entry

    def add(self, item: Any) -> Optional[Entry]:
        """Run the encoder for an item that is not there; the result is counted once for the caller."""
        self._evict_idle(item.num_tokens)
        if not self.budget.reserve(item.num_tokens):  # clean: owned by the entry, given back on eviction
            return None
        entry = Entry(item.mm_hash, item.num_tokens, self.encode(item))
        self.entries[item.mm_hash] = entry
        return entry.incref()  # clean: returned to the caller

    def get_or_add(self, item: Any) -> Optional[Entry]:
        entry = self.get(item.mm_hash)  # clean: returned
        if entry is None:
            entry = self.add(item)  # clean: returned
        return entry


class EncoderScheduler:
    def __init__(self, cache: EncoderCache) -> None:
        self.cache = cache
        self.requests: Dict[str, MMRequest] = {}

    def schedule(self, req: MMRequest) -> bool:
        """All items or nothing."""
        for i, item in enumerate(req.items):
            if i in req.held:
                continue
            entry = self.cache.get_or_add(item)  # clean: on req.held, released when an item does not fit
            if entry is None:
                self.release(req)
                return False
            req.held[i] = entry
        self.requests[req.req_id] = req
        return True

    def release(self, req: MMRequest) -> None:
        while req.held:
            _, entry = req.held.popitem()
            self.cache.put_back(entry)

    def finish(self, req_id: str) -> None:
        self.release(self.requests.pop(req_id))

    def embeddings(self, item: Any) -> Optional[List[float]]:
        """A private copy for the logits processor."""
        entry = self.cache.get(item.mm_hash)  # leak: list() copies the output, the entry is dropped
        if entry is None:
            return None
        return list(entry.output)

    def token_count(self, hashes: List[str]) -> int:
        total = 0
        for h in hashes:
            entry = self.cache.get(h)  # clean: near miss, the continue has nothing to put back
            if entry is None:
                continue
            total += entry.num_tokens
            self.cache.put_back(entry)
        return total

    def compare(self, a: str, b: str) -> Optional[bool]:
        left = self.cache.get(a)  # leak: b is absent, left is not put back
        right = self.cache.get(b)  # leak: a is absent while b is there, right is not put back
        if left is None or right is None:
            return None
        same = left.output == right.output
        self.cache.put_back(left)
        self.cache.put_back(right)
        return same

    def replace_item(self, req: MMRequest, i: int, item: Any) -> bool:
        """An edited image takes the place of an earlier one."""
        entry = self.cache.get_or_add(item)  # clean: near miss, stored in held after the old one is put back
        if entry is None:
            return False
        old = req.held.get(i)
        if old is not None:
            self.cache.put_back(old)
        req.held[i] = entry
        return True

    def outputs(self, hashes: List[str]) -> Iterator[Any]:
        """Outputs in order, up to the first that is missing."""
        for h in hashes:
            entry = self.cache.get(h)  # leak: consumer that stops early leaves the generator before put_back
            if entry is None:
                return
            yield entry.output
            self.cache.put_back(entry)

    def first_nonempty(self, hashes: List[str]) -> Any:
        for out in self.outputs(hashes):
            if out:
                return out
        return None

    def scan(self, hashes: List[str]) -> Iterator[Any]:
        for h in hashes:
            entry = self.cache.get(h)  # clean: near miss, finally also runs when the generator is closed
            if entry is None:
                continue
            try:
                yield entry.output
            finally:
                self.cache.put_back(entry)


class ProfileRunner:
    """Finds the largest image that fits, at start-up."""

    def __init__(self, budget: EncoderBudget, run: Callable[[int], float]) -> None:
        self.budget = budget
        self.run = run

    def fits(self, n: int) -> bool:
        if not self.budget.reserve(n):  # leak: MemoryError is caught and answered False with the tokens reserved
            return False
        try:
            self.run(n)
        except MemoryError:
            return False
        self.budget.unreserve(n)
        return True

    def largest(self, sizes: List[int]) -> int:
        best = 0
        for n in sorted(sizes):
            if not self.budget.reserve(n):  # leak: slow sizes break out with the tokens reserved
                break
            if self.run(n) > 1.0:
                break
            best = n
            self.budget.unreserve(n)
        return best
