"""Paged KV cache bookkeeping and a small continuous-batching scheduler."""
from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from enum import Enum, auto
from typing import Callable, Deque, Dict, List, Optional

class OutOfPages(RuntimeError): ...
class FanoutExceeded(RuntimeError): ...


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    DONE = auto()


class Page:
    __slots__ = ("pid", "refs")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.refs = 0


class PageAllocator:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._free: Deque[Page] = deque(Page(i) for i in range(num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self) -> Page:
        if not self._free:
            raise OutOfPages("page pool is empty")
        page = self._free.popleft()  # clean: handed to the caller with one reference
        page.refs = 1
        return page

    def alloc_many(self, n: int) -> List[Page]:
        if n > len(self._free):
            raise OutOfPages(f"want {n}, have {len(self._free)}")
        return [self.alloc() for _ in range(n)]  # clean: near miss, the count was checked so alloc cannot raise midway

    def retain(self, page: Page) -> Page:
        page.refs += 1
        return page

    def release(self, page: Page) -> None:
        page.refs -= 1
        if page.refs == 0:
            self._free.append(page)


class HostSwap:
    def __init__(self, num_slots: int) -> None:
        self.slots = list(range(num_slots))

    def take(self) -> int:
        return self.slots.pop()  # clean: returned to the caller

    def give(self, slot: int) -> None:
        self.slots.append(slot)


class PrefixCache:
    """Content hash of a full page -> page. The table holds its own reference."""

    def __init__(self, allocator: PageAllocator, capacity: int) -> None:
        self.allocator = allocator
        self.capacity = capacity
        self._table: "OrderedDict[int, Page]" = OrderedDict()

    def lookup(self, digests: List[int]) -> List[Page]:
        found: List[Page] = []
        for digest in digests:
            page = self._table.get(digest)
            if page is None:
                break
            self._table.move_to_end(digest)
            found.append(self.allocator.retain(page))  # clean: the list of references goes to the caller
        return found

    def publish(self, digest: int, page: Page) -> None:
        self._table[digest] = self.allocator.retain(page)  # leak: an entry of the same digest is overwritten and its reference is lost
        while len(self._table) > self.capacity:
            _, oldest = self._table.popitem(last=False)
            self.allocator.release(oldest)


class Request:
    def __init__(self, rid: str, tokens: List[int], max_new: int, deadline: Optional[float] = None) -> None:
        self.rid = rid
        self.tokens = tokens
        self.limit = len(tokens) + max_new
        self.deadline = deadline
        self.status = Status.WAITING
        self.pages: List[Page] = []
        self.host_slots: List[int] = []


class CacheManager:
    def __init__(self, allocator: PageAllocator, cache: PrefixCache, host: HostSwap, copier, max_fanout: int = 8) -> None:
        self.allocator = allocator
        self.cache = cache
        self.host = host
        self.copier = copier
        self.watermark = 4
        self.max_fanout = max_fanout
        self._forks: Counter = Counter()

    def _digests(self, tokens: List[int]) -> List[int]:
        size = self.allocator.page_size
        out, h = [], 0
        for i in range(0, len(tokens) - size + 1, size):
            h = hash((h, tuple(tokens[i:i + size])))
            out.append(h)
        return out

    def admit(self, req: Request) -> bool:
        shared = self.cache.lookup(self._digests(req.tokens))  # leak: the early return below keeps the references of the hits
        total = -(-len(req.tokens) // self.allocator.page_size)
        need = total - len(shared)
        if need > self.allocator.num_free - self.watermark:
            return False
        fresh = self.allocator.alloc_many(need)  # leak: the scheduler drops an expired request after it was admitted
        req.pages = shared + fresh
        return True

    def grow(self, req: Request) -> None:
        """Make room for one more token at the end of the request."""
        if len(req.tokens) % self.allocator.page_size == 0:
            req.pages.append(self.allocator.alloc())  # clean: belongs to req.pages, which free() walks
            return
        last = req.pages[-1]
        if last.refs > 1:
            fresh = self.allocator.alloc()  # clean: near miss, takes the place of the shared page in req.pages
            self.copier(last.pid, fresh.pid)
            req.pages[-1] = fresh
            self.allocator.release(last)

    def fork(self, parent: Request, rid: str) -> Request:
        child = Request(rid, list(parent.tokens), parent.limit - len(parent.tokens))
        child.pages = [self.allocator.retain(p) for p in parent.pages]  # leak: the fan-out check raises when the child already holds them
        self._forks[parent.rid] += 1
        if self._forks[parent.rid] > self.max_fanout:
            raise FanoutExceeded(parent.rid)
        return child

    def swap_out(self, req: Request) -> bool:
        if len(self.host.slots) < len(req.pages):
            return False
        req.host_slots = [self.host.take() for _ in req.pages]  # leak: abort() of a swapped request only walks the device pages
        for page, slot in zip(req.pages, req.host_slots):
            self.copier(page.pid, -1 - slot)
        self.free(req)
        return True

    def swap_in(self, req: Request) -> bool:
        n = len(req.host_slots)
        if n > self.allocator.num_free - self.watermark:
            return False
        req.pages = self.allocator.alloc_many(n)  # clean: near miss, pages were emptied by swap_out and free() walks the new ones
        for page, slot in zip(req.pages, req.host_slots):
            self.copier(-1 - slot, page.pid)
            self.host.give(slot)
        req.host_slots = []
        return True

    def publish(self, req: Request) -> None:
        for digest, page in zip(self._digests(req.tokens), req.pages):
            self.cache.publish(digest, page)

    def free(self, req: Request) -> None:
        for page in reversed(req.pages):
            self.allocator.release(page)
        req.pages = []


class Scheduler:
    def __init__(self, manager: CacheManager, model: Callable, eos: int, max_running: int = 64) -> None:
        self.manager = manager
        self.model = model
        self.eos = eos
        self.max_running = max_running
        self.waiting: Deque[Request] = deque()
        self.swapped: Deque[Request] = deque()
        self.running: List[Request] = []
        self.counts: Dict[str, int] = Counter()

    def _admit(self) -> None:
        while self.swapped and self.manager.swap_in(self.swapped[0]):
            req = self.swapped.popleft()
            req.status = Status.RUNNING
            self.running.append(req)
        while self.waiting and len(self.running) < self.max_running:
            if not self.manager.admit(self.waiting[0]):
                break
            req = self.waiting.popleft()
            if req.deadline is not None and time.monotonic() > req.deadline:
                req.status = Status.DONE
                self.counts["expired"] += 1
                continue
            req.status = Status.RUNNING
            self.running.append(req)

    def _make_room(self, req: Request) -> bool:
        while True:
            try:
                self.manager.grow(req)
                return True
            except OutOfPages:
                victim = self.running.pop()
                if self.manager.swap_out(victim):
                    victim.status = Status.SWAPPED
                    self.swapped.append(victim)
                else:
                    self.manager.free(victim)
                    victim.status = Status.WAITING
                    self.waiting.appendleft(victim)
                if victim is req:
                    return False

    def step(self) -> List[str]:
        self._admit()
        finished = []
        for req in list(self.running):
            if req.status is not Status.RUNNING or not self._make_room(req):
                continue
            token = self.model(req)
            req.tokens.append(token)
            if token == self.eos or len(req.tokens) >= req.limit:
                self.running.remove(req)
                self.manager.publish(req)
                self.manager.free(req)
                req.status = Status.DONE
                finished.append(req.rid)
        return finished

    def branch(self, parent: Request, width: int) -> None:
        for i in range(width):
            try:
                child = self.manager.fork(parent, f"{parent.rid}/{i}")  # clean: joins self.running, freed when it ends or is aborted
            except FanoutExceeded:
                break
            child.status = Status.RUNNING
            self.running.append(child)

    def abort(self, rid: str) -> None:
        for queue in (self.running, self.waiting, self.swapped):
            for req in list(queue):
                if req.rid == rid:
                    queue.remove(req)
                    self.manager.free(req)
                    req.status = Status.DONE
                    self.counts["aborted"] += 1
