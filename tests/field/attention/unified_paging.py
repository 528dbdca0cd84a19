"""One page space for KV blocks and LoRA weights; requests carry both."""
import itertools
import logging
import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import DefaultDict, Deque, Dict, Iterator, List, Optional, Set, Tuple

import torch

logger = logging.getLogger(__name__)


class Pages:
    def __init__(self, n: int) -> None:
        self._ids: Set[int] = set(range(n))
        self._n = n

    @property
    def free_count(self) -> int:
        return len(self._ids)

    def take(self, k: int) -> List[int]:
        """Up to k pages, maybe fewer."""
        return [self._ids.pop() for _ in range(min(k, len(self._ids)))]

    def return_(self, pages: List[int]) -> None:
        self._ids.update(pages)

    def grow(self, by: int) -> None:
        self._ids.update(range(self._n, self._n + by))
        self._n += by


@dataclass
class Holding:
    kv: List[int] = field(default_factory=list)
    lora: List[int] = field(default_factory=list)
    note: str = ""


class UnifiedManager:
    def __init__(self, pages: Pages, kv_page: int = 16) -> None:
        self.pages = pages
        self.kv_page = kv_page
        self.held: Dict[int, Holding] = {}
        self.backlog: Deque[Tuple[int, Holding]] = deque()
        self.by_adapter: DefaultDict[str, List[int]] = defaultdict(list)

    def open(self, rid: int, tokens: int, lora_pages: int) -> bool:
        if rid in self.held or any(r == rid for r, _ in self.backlog):
            return False
        need = -(-tokens // self.kv_page)
        kv = self.pages.take(need)  # clean: near miss, a short take is returned, a full one is held until shut
        if len(kv) < need:
            self.pages.return_(kv)
            return False
        lora = self.pages.take(lora_pages)  # clean: near miss, returned together with the other list on shortage
        if len(lora) < lora_pages:
            self.pages.return_(lora)
            self.pages.return_(kv)
            return False
        self.held[rid] = Holding(kv, lora)
        return True

    def open_optimistic(self, rid: int, tokens: int, lora_pages: int) -> bool:
        if rid in self.held or any(r == rid for r, _ in self.backlog):
            return False
        need = -(-tokens // self.kv_page)
        kv = self.pages.take(need)  # leak: stays out when the adapter pages fall short
        if len(kv) < need:
            self.pages.return_(kv)
            return False
        lora = self.pages.take(lora_pages)  # clean: returned on shortage, else held
        if len(lora) < lora_pages:
            self.pages.return_(lora)
            return False
        self.held[rid] = Holding(kv, lora)
        return True

    def extend(self, rid: int, k: int) -> int:
        more = self.pages.take(k)  # clean: whatever came joins the holding
        self.held[rid].kv.extend(more)
        return len(more)

    def extend_exact(self, rid: int, k: int) -> bool:
        more = self.pages.take(k)  # leak: fewer than k are refused and not returned
        if len(more) != k:
            return False
        self.held[rid].kv += more
        return True

    def shut(self, rid: int) -> None:
        h = self.held.pop(rid)
        self.pages.return_(h.kv)
        self.pages.return_(h.lora)

    def park(self, rid: int) -> None:
        self.backlog.append((rid, self.held.pop(rid)))

    def unpark(self) -> Optional[int]:
        if not self.backlog:
            return None
        rid, h = self.backlog.popleft()
        self.held[rid] = h
        return rid

    def preload_adapter(self, name: str, k: int) -> None:
        self.by_adapter[name] += self.pages.take(k)  # clean: drop_adapter returns the list

    def drop_adapter(self, name: str) -> None:
        self.pages.return_(self.by_adapter.pop(name, []))

    def shut_all(self) -> None:
        while self.unpark() is not None:
            pass
        for rid in list(self.held):
            self.shut(rid)
        for name in list(self.by_adapter):
            self.drop_adapter(name)

    def defrag(self, rid: int) -> None:
        h = self.held[rid]
        fresh = self.pages.take(len(h.kv))  # clean: near miss, too few are returned, else they replace the old ones
        if len(fresh) < len(h.kv):
            self.pages.return_(fresh)
            return
        h.kv, old = fresh, h.kv
        self.pages.return_(old)


class Prober:
    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.window: List[int] = []

    def refill(self, k: int) -> None:
        self.window = self.pages.take(k)  # leak: the former window is overwritten with its pages out

    def empty(self) -> None:
        self.pages.return_(self.window)
        self.window = []

    def sample(self, k: int) -> Optional[int]:
        got = self.pages.take(k)  # leak: one page is popped for the result and the rest alone goes back
        if not got:
            return None
        one = got.pop()
        self.pages.return_(got)
        return one % 7

    def sample_even(self, k: int) -> List[int]:
        got = self.pages.take(k)  # leak: the filter drops the odd pages before the return
        got = [p for p in got if p % 2 == 0]
        self.pages.return_(got)
        return got

    def sample_sorted(self, k: int) -> List[int]:
        got = self.pages.take(k)  # clean: near miss, sorted makes a new list of the same pages
        got = sorted(got)
        self.pages.return_(got)
        return got[:4]

    def chunks(self, k: int, size: int) -> Iterator[Tuple[int, ...]]:
        got = self.pages.take(k)  # clean: returned after the last chunk
        it = iter(got)
        while chunk := tuple(itertools.islice(it, size)):
            yield chunk
        self.pages.return_(got)

    def stress(self, rounds: int) -> int:
        held: List[List[int]] = []
        for _ in range(rounds):
            if held and random.random() < 0.5:
                self.pages.return_(held.pop())
            else:
                held.append(self.pages.take(2))  # clean: near miss, those still in the list are returned below
        n = len(held)
        for h in held:
            self.pages.return_(h)
        return n

    def stress_fast(self, rounds: int) -> int:
        held: List[List[int]] = []
        for _ in range(rounds):
            held.append(self.pages.take(2))  # leak: clear forgets every list gathered since the last return
            if len(held) > 8:
                self.pages.return_(held.pop())
                held.clear()
        return len(held)
