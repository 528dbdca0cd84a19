"""Encoder cache of a multi-modal scheduler: a token budget shared by the images of all requests."""
from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Set, Tuple

logger = logging.getLogger("mm.encoder_cache")


@dataclass
class MMInput:
    mm_hash: str
    num_tokens: int
    offset: int


@dataclass
class Request:
    request_id: str
    inputs: List[MMInput]
    computed: int = 0
    aborted: bool = False
    priority: int = 0

    def inputs_in(self, start: int, end: int) -> List[int]:
        return [
            i for i, m in enumerate(self.inputs)
            if m.offset < end and m.offset + m.num_tokens > start
        ]


class EncoderBudget:
    """Counts encoder tokens. take() answers whether the tokens were granted."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0

    def take(self, tokens: int) -> bool:
        if self.used + tokens > self.capacity:
            return False
        self.used += tokens
        return True

    def give(self, tokens: int) -> None:
        self.used -= tokens


class EncoderCacheManager:
    """Space for encoder outputs, keyed by request and input number."""

    def __init__(self, cache_size: int) -> None:
        self.budget = EncoderBudget(cache_size)
        self.cached: Dict[str, Dict[int, int]] = {}
        self.freed: List[Tuple[str, int]] = []

    def has(self, req: Request, i: int) -> bool:
        return i in self.cached.get(req.request_id, ())

    def allocate(self, req: Request, i: int) -> bool:
        tokens = req.inputs[i].num_tokens
        if not self.budget.take(tokens):  # clean: recorded in the table, given by free_input
            return False
        self.cached.setdefault(req.request_id, {})[i] = tokens
        return True

    def resize(self, req: Request, i: int, tokens: int) -> bool:
        old = self.cached.get(req.request_id, {}).get(i, 0)
        if not self.budget.take(tokens):  # clean: near miss, the old size is given before the overwrite
            return False
        self.budget.give(old)
        self.cached.setdefault(req.request_id, {})[i] = tokens
        return True

    def free_input(self, req: Request, i: int) -> None:
        entries = self.cached.get(req.request_id)
        if not entries or i not in entries:
            return
        self.budget.give(entries.pop(i))
        self.freed.append((req.request_id, i))
        if not entries:
            del self.cached[req.request_id]

    def free(self, req: Request) -> None:
        for i in list(self.cached.get(req.request_id, ())):
            self.free_input(req, i)


class TileReservations:
    """Tokens set aside for pictures whose number of tiles is still being negotiated."""

    def __init__(self, budget: EncoderBudget) -> None:
        self.budget = budget
        self.tiles: Dict[str, int] = {}

    def negotiate(self, key: str, wanted: int, per_tile: int = 256) -> int:
        """Raises the number of tiles step by step until the budget says no."""
        granted = 0
        for tiles in range(1, wanted + 1):
            tokens = tiles * per_tile + 1
            if not self.budget.take(tokens):  # leak: each earlier size is overwritten in the table
                break
            self.tiles[key] = tokens
            granted = tiles
        return granted

    def settle(self, key: str) -> int:
        tokens = self.tiles.pop(key, 0)
        self.budget.give(tokens)
        return tokens


class PromptEmbedStore:
    """Named entries of prompt embeddings under one budget."""

    def __init__(self, tokens: int) -> None:
        self.budget = EncoderBudget(tokens)
        self.entries: "OrderedDict[str, int]" = OrderedDict()
        self.transient: Dict[str, int] = {}

    def insert(self, key: str, tokens: int) -> bool:
        if key in self.entries:
            self.entries.move_to_end(key)
            return True
        while not self.budget.take(tokens):  # clean: entered in the table, evict gives it back
            if not self.entries:
                return False
            self.evict()
        self.entries[key] = tokens
        return True

    def insert_transient(self, key: str, tokens: int) -> bool:
        if not self.budget.take(tokens):  # leak: end_step clears the table without giving the tokens
            return False
        if key in self.transient:
            self.budget.give(tokens)
            return True
        self.transient[key] = tokens
        return True

    def evict(self) -> None:
        _, tokens = self.entries.popitem(last=False)
        self.budget.give(tokens)

    def end_step(self) -> int:
        n = len(self.transient)
        self.transient.clear()
        return n


@dataclass
class SchedulerOutput:
    scheduled: Dict[str, List[int]] = field(default_factory=dict)
    num_tokens: Dict[str, int] = field(default_factory=dict)
    free_inputs: List[Tuple[str, int]] = field(default_factory=list)


class Scheduler:
    def __init__(self, manager: EncoderCacheManager, compute_budget: int) -> None:
        self.manager = manager
        self.compute = EncoderBudget(compute_budget)
        self.waiting: Deque[Request] = deque()
        self.running: List[Request] = []
        self.finished: Set[str] = set()

    def add(self, req: Request) -> None:
        self.waiting.append(req)

    def _encode_inputs(self, req: Request, start: int, end: int) -> Tuple[List[int], int]:
        """Picks the inputs to run now; stops in front of the first that has no room."""
        picked: List[int] = []
        for i in req.inputs_in(start, end):
            if self.manager.has(req, i):
                continue
            if not self.manager.allocate(req, i):  # clean: kept under the request, freed by finish()
                end = req.inputs[i].offset
                break
            picked.append(i)
        return picked, end - start

    def schedule(self, chunk: int) -> SchedulerOutput:
        out = SchedulerOutput()
        while self.waiting:
            req = self.waiting[0]
            if req.aborted:
                self.waiting.popleft()
                self.manager.free(req)
                continue
            picked, n = self._encode_inputs(req, req.computed, req.computed + chunk)
            if n <= 0:
                break
            self.waiting.popleft()
            self.running.append(req)
            out.scheduled[req.request_id] = picked
            out.num_tokens[req.request_id] = n
        out.free_inputs, self.manager.freed = self.manager.freed, []
        return out

    def warm(self, req: Request, limit: int) -> List[int]:
        """Runs the encoder ahead of time, within the compute budget of this step."""
        done: List[int] = []
        for i, item in enumerate(req.inputs):
            if not self.compute.take(item.num_tokens):  # leak: kept when the input is past the limit
                break
            if item.offset > limit:
                break
            done.append(i)
            self.compute.give(item.num_tokens)
        return done

    def admit_pair(self, first: Request, second: Request) -> bool:
        """Two halves of a comparison prompt run together or not at all."""
        need_a = sum(m.num_tokens for m in first.inputs)
        need_b = sum(m.num_tokens for m in second.inputs)
        if not self.compute.take(need_a):  # leak: not given back when the second half is refused
            return False
        if not self.compute.take(need_b):  # clean: given at the end of the pair
            logger.info("no room for %s", second.request_id)
            return False
        self.running += [first, second]
        self.compute.give(need_b)
        self.compute.give(need_a)
        return True

    def admit_all_or_none(self, reqs: List[Request]) -> bool:
        total = 0
        for req in reqs:
            need = sum(m.num_tokens for m in req.inputs)
            if not self.compute.take(need):  # clean: near miss, the running total is given on refusal
                self.compute.give(total)
                return False
            total += need
        self.running.extend(reqs)
        self.compute.give(total)
        return True

    def finish(self, req: Request) -> None:
        self.running.remove(req)
        self.manager.free(req)
        self.finished.add(req.request_id)

    def preempt(self, req: Request) -> None:
        self.running.remove(req)
        req.computed = 0
        self.waiting.appendleft(req)


def run_profile(manager: EncoderCacheManager, item: MMInput, copies: int) -> int:
    """Fills the cache with dummies to measure the peak."""
    dummy = Request("profile", [item] * copies)
    fitted = 0
    for i in range(copies):
        if not manager.allocate(dummy, i):  # clean: near miss, free(dummy) gives every entry back
            break
        fitted += 1
    manager.free(dummy)
    return fitted


def largest_item(manager: EncoderCacheManager, sizes: List[int]) -> Optional[int]:
    """The largest dummy that the cache would accept right now."""
    for size in sorted(sizes, reverse=True):
        probe = Request("probe-%d" % size, [MMInput("probe", size, 0)])
        if manager.allocate(probe, 0):  # leak: the accepted probe is never freed
            logger.debug("accepts %d tokens", size)
            return size
    return None
