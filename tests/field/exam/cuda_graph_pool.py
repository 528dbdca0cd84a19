"""Static input/output buffers for captured decode graphs."""
from __future__ import annotations

import bisect
import logging
from collections import defaultdict
from typing import Any, Callable, Generic, Optional, TypeVar

import torch

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Freelist(Generic[T]):
    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._items: list[T] = []
        self.live = 0

    def pull(self) -> T:
        self.live += 1
        return self._items.pop() if self._items else self._make()  # clean: goes to the caller

    def push(self, item: T) -> None:
        self.live -= 1
        self._items.append(item)


class GraphInputs:
    def __init__(self, bs: int, dim: int) -> None:
        self.ids = torch.zeros(bs, dtype=torch.long)
        self.hidden = torch.zeros(bs, dim)
        self.bs = bs

    def load(self, ids: torch.Tensor) -> bool:
        if ids.numel() > self.bs:
            return False
        self.ids.zero_()
        self.ids[: ids.numel()].copy_(ids)
        return True


class GraphRunner:
    SIZES = (1, 2, 4, 8, 16)

    def __init__(self, model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dim: int) -> None:
        self.model = model
        self.lists = {bs: Freelist(lambda bs=bs: GraphInputs(bs, dim)) for bs in self.SIZES}
        self.by_tag: dict[str, GraphInputs] = {}
        self.current: Optional[GraphInputs] = None
        self.history: defaultdict[int, list[Any]] = defaultdict(list)

    def _bucket(self, n: int) -> int:
        return self.SIZES[min(bisect.bisect_left(self.SIZES, n), len(self.SIZES) - 1)]

    def checkout_inputs(self, n: int) -> GraphInputs:
        return self.lists[self._bucket(n)].pull()  # clean: goes to the caller

    def checkin_inputs(self, g: GraphInputs) -> None:
        self.lists[g.bs].push(g)

    def replay(self, ids: torch.Tensor) -> Optional[torch.Tensor]:
        g = self.checkout_inputs(ids.numel())  # leak: load() refusing a large batch returns None without checkin
        if not g.load(ids):
            return None
        out = self.model(g.ids, g.hidden)[: ids.numel()].clone()
        self.checkin_inputs(g)
        return out

    def replay_split(self, ids: torch.Tensor) -> torch.Tensor:
        outs = []
        for part in ids.split(self.SIZES[-1]):
            g = self.checkout_inputs(part.numel())  # clean: near miss, checked in before the raise as well
            ok = g.load(part)
            out = self.model(g.ids, g.hidden)[: part.numel()].clone() if ok else None
            self.checkin_inputs(g)
            if out is None:
                raise ValueError("batch does not fit")
            outs.append(out)
        return torch.cat(outs)

    def capture(self, tag: str, n: int) -> None:
        if tag in self.by_tag:
            self.checkin_inputs(self.by_tag.pop(tag))
        self.by_tag[tag] = self.checkout_inputs(n)  # clean: near miss, the former holder of the tag is checked in first

    def capture_all(self) -> None:
        for bs in self.SIZES:
            self.capture(f"bs{bs}", bs)

    def release_all(self) -> None:
        for g in self.by_tag.values():
            self.checkin_inputs(g)
        self.by_tag = {}

    def __enter__(self) -> "GraphRunner":
        self.current = self.lists[1].pull()  # leak: __exit__ returns early when an exception is passed
        return self

    def __exit__(self, et: Any, ev: Any, tb: Any) -> bool:
        if et is not None:
            logger.error("capture failed: %s", ev)
            return False
        if self.current is not None:
            self.lists[1].push(self.current)
            self.current = None
        return False

    def time_sizes(self, clock: Callable[[], float]) -> dict[int, float]:
        res = {}
        for bs in self.SIZES:
            g = self.lists[bs].pull()  # clean: pushed in the same turn
            t0 = clock()
            self.model(g.ids, g.hidden)
            res[bs] = clock() - t0
            self.lists[bs].push(g)
        return res

    def best_size(self, clock: Callable[[], float], limit: float) -> int:
        for bs in reversed(self.SIZES):
            g = self.lists[bs].pull()  # leak: the size that meets the limit returns before push
            t0 = clock()
            self.model(g.ids, g.hidden)
            if clock() - t0 < limit:
                return bs
            self.lists[bs].push(g)
        return 1

    def record(self, n: int) -> None:
        self.history[n].append(self.checkout_inputs(n))  # leak: forget() clears the lists without checkin

    def forget(self) -> None:
        for items in self.history.values():
            items.clear()

    def compare(self, ids: torch.Tensor) -> float:
        a, b = self.lists[8].pull(), self.lists[8].pull()  # clean: both are pushed
        a.load(ids)
        b.load(ids.flip(0))
        d = float((self.model(a.ids, a.hidden) - self.model(b.ids, b.hidden)).abs().max())
        for g in (a, b):
            self.lists[8].push(g)
        return d

    def padded(self, ids: torch.Tensor) -> torch.Tensor:
        return self.checkout_inputs(ids.numel()).ids.clone()  # leak: the inputs object is a temporary and is lost
