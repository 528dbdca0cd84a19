"""Encoder output cache for multimodal inputs: space accounting and scheduling."""
from __future__ import annotations

from dataclasses import dataclass, field


class EncoderCacheManager:
    """Entries are used by requests; the last user's unbook() frees the room."""

    def __init__(self, num_slots: int):
        self.free_slots = num_slots
        self.users: dict[str, set[str]] = {}
        self.sizes: dict[str, int] = {}

    def can_book(self, size: int) -> bool:
        return size <= self.free_slots

    def book(self, req_id: str, mm_hash: str, size: int) -> None:
        """Book an entry in the name of a request; a known entry gains a user."""
        if mm_hash in self.users:
            self.users[mm_hash].add(req_id)
            return
        self.free_slots -= size  # clean: near miss, recorded in `sizes` and given back by unbook()
        self.sizes[mm_hash] = size
        self.users[mm_hash] = {req_id}

    def book_anonymous(self, size: int) -> bool:
        self.free_slots -= size  # leak: an overdraft answers False but leaves the counter lowered
        if self.free_slots < 0:
            return False
        return True

    def unbook_anonymous(self, size: int) -> None:
        self.free_slots += size

    def unbook(self, req_id: str, mm_hash: str) -> None:
        users = self.users.get(mm_hash)
        if users is None:
            return
        users.discard(req_id)
        if not users:
            del self.users[mm_hash]
            self.free_slots += self.sizes.pop(mm_hash)


@dataclass
class MMItem:
    mm_hash: str
    size: int
    offset: int


@dataclass
class MMRequest:
    req_id: str
    items: list[MMItem] = field(default_factory=list)
    booked: list[str] = field(default_factory=list)
    computed: int = 0
    is_embedding: bool = False


class EncoderScheduler:
    def __init__(self, cache: EncoderCacheManager, compute_budget: int):
        self.cache = cache
        self.compute_budget = compute_budget
        self.profile_entries: list[str] = []

    def schedule(self, req: MMRequest, num_new: int) -> list[MMItem]:
        out = []
        for item in req.items:
            if item.offset >= req.computed + num_new:
                break
            if item.mm_hash in req.booked or not self.cache.can_book(item.size):
                continue
            self.cache.book(req.req_id, item.mm_hash, item.size)  # clean: listed in req.booked, which finish() empties
            req.booked.append(item.mm_hash)
            out.append(item)
        return out

    def schedule_budgeted(self, req: MMRequest) -> list[MMItem]:
        out = []
        left = self.compute_budget
        for item in req.items:
            if not self.cache.can_book(item.size):
                break
            self.cache.book(req.req_id, item.mm_hash, item.size)  # leak: an item above the compute budget breaks before it is recorded in req.booked
            if item.size > left:
                break
            left -= item.size
            req.booked.append(item.mm_hash)
            out.append(item)
        return out

    def prefetch(self, req: MMRequest, item: MMItem) -> bool:
        if not self.cache.can_book(item.size):
            return False
        self.cache.book(req.req_id, item.mm_hash, item.size)  # leak: never recorded in req.booked, so finish() cannot unbook it
        return True

    def try_all(self, req: MMRequest) -> bool:
        """Book every item or none."""
        done: list[MMItem] = []
        for item in req.items:
            if not self.cache.can_book(item.size):
                for d in done:
                    self.cache.unbook(req.req_id, d.mm_hash)
                return False
            self.cache.book(req.req_id, item.mm_hash, item.size)  # clean: near miss, unbooked by the loop when a later item fails
            done.append(item)
        req.booked.extend(d.mm_hash for d in done)
        return True

    def embed_only(self, req: MMRequest, item: MMItem, encoder) -> object | None:
        if not self.cache.can_book(item.size):
            return None
        self.cache.book(req.req_id, item.mm_hash, item.size)  # clean: near miss, unbooked or recorded, by the same flag
        out = encoder(item)
        if req.is_embedding:
            self.cache.unbook(req.req_id, item.mm_hash)
        else:
            req.booked.append(item.mm_hash)
        return out

    def embed_cached(self, req: MMRequest, item: MMItem, encoder) -> object | None:
        if not self.cache.can_book(item.size):
            return None
        self.cache.book(req.req_id, item.mm_hash, item.size)  # leak: an embedding request with an empty output neither unbooks nor records
        out = encoder(item)
        if not req.is_embedding:
            req.booked.append(item.mm_hash)
        elif out is not None:
            self.cache.unbook(req.req_id, item.mm_hash)
        return out

    def profile(self, sizes: list[int]) -> int:
        ok = 0
        for i, size in enumerate(sizes):
            if not self.cache.can_book(size):
                continue
            name = f"profile-{i}"
            self.cache.book("profile", name, size)  # clean: near miss, stays booked on purpose until end_profile()
            self.profile_entries.append(name)
            ok += 1
        return ok

    def end_profile(self) -> None:
        while self.profile_entries:
            self.cache.unbook("profile", self.profile_entries.pop())

    def with_scratch(self, size: int, fn) -> bool:
        if not self.cache.book_anonymous(size):  # clean: given back after fn
            return False
        fn()
        self.cache.unbook_anonymous(size)
        return True

    def with_scratch_pair(self, a: int, b: int, fn) -> bool:
        if not self.cache.book_anonymous(a):  # leak: the refusal of the second booking keeps the first
            return False
        if not self.cache.book_anonymous(b):  # clean: given back together with the first one
            return False
        fn()
        self.cache.unbook_anonymous(a + b)
        return True

    def finish(self, req: MMRequest) -> None:
        for mm_hash in req.booked:
            self.cache.unbook(req.req_id, mm_hash)
        req.booked.clear()
