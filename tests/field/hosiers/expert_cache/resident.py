"""The set of resident experts with use counts, and the layer code that runs on it."""
from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Callable, Iterable, Iterator, Optional

import torch

from .frames import Frame, FrameSource

Key = tuple[int, int]


@dataclass
class Entry:
    frame: Frame
    users: int = 0
    loads: int = 0


class Residency:
    def __init__(self, frames: FrameSource, fetch: Callable[[Key, torch.Tensor], None]) -> None:
        self.frames = frames
        self.fetch = fetch
        self.entries: OrderedDict[Key, Entry] = OrderedDict()
        self.misses = 0

    # ---- residency ---------------------------------------------------------

    def _evict_one(self) -> bool:
        for key, ent in self.entries.items():
            if ent.users == 0:
                ent.frame.relinquish()
                del self.entries[key]
                return True
        return False

    def _bring_in(self, key: Key) -> Optional[Entry]:
        frame = self.frames.obtain()  # clean: goes into the entry; None asks for an eviction
        while frame is None:
            if not self._evict_one():
                return None
            frame = self.frames.obtain()  # clean: near miss, the loop ends as soon as one is held
        self.fetch(key, frame.weight)
        frame.expert = key
        ent = Entry(frame, loads=1)
        self.entries[key] = ent
        self.misses += 1
        return ent

    def enter(self, key: Key) -> Optional[Entry]:
        """The resident entry with one more user, or None if everything is in use."""
        ent = self.entries.get(key) or self._bring_in(key)  # clean: near miss, entries owns the frame
        if ent is not None:
            ent.users += 1
            self.entries.move_to_end(key)
        return ent

    def leave(self, ent: Entry) -> None:
        ent.users -= 1

    @contextmanager
    def using(self, key: Key) -> Iterator[Optional[Entry]]:
        ent = self.enter(key)  # clean: left in the finally
        try:
            yield ent
        finally:
            if ent is not None:
                self.leave(ent)

    def reload(self, key: Key) -> bool:
        """Fetch the expert again into a new frame after a weight update."""
        ent = self.entries.get(key)
        if ent is None:
            return False
        fresh = self.frames.obtain()  # clean: near miss, takes the place of the relinquished one
        if fresh is None:
            return False
        self.fetch(key, fresh.weight)
        ent.frame.relinquish()
        ent.frame = fresh
        fresh.expert = key
        return True

    def purge(self, layer: int) -> int:
        doomed = [k for k, e in self.entries.items() if k[0] == layer and e.users == 0]
        for k in doomed:
            self.entries.pop(k).frame.relinquish()
        return len(doomed)


class MoeLayer:
    def __init__(self, res: Residency, layer: int, top_k: int) -> None:
        self.res = res
        self.layer = layer
        self.top_k = top_k
        self.hot: list[Entry] = []
        self.next_up: dict[int, Entry] = {}

    def forward(self, x: torch.Tensor, chosen: list[int], gate: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for i, e in enumerate(chosen):
            with self.res.using((self.layer, e)) as ent:  # clean: the context manager leaves
                if ent is None:
                    continue
                out += gate[i] * (x @ ent.frame.weight)
        return out

    def forward_grouped(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        with ExitStack() as stack:
            keys = [(self.layer, e) for e in chosen]
            ents = [stack.enter_context(self.res.using(k)) for k in keys]  # clean: the stack leaves
            mats = [ent.frame.weight for ent in ents if ent is not None]
            return torch.stack([x @ w for w in mats]).sum(dim=0)

    def forward_skip(self, x: torch.Tensor, chosen: list[int], gate: torch.Tensor,
                     eps: float) -> torch.Tensor:
        out = torch.zeros_like(x)
        for i, e in enumerate(chosen):
            ent = self.res.enter((self.layer, e))  # leak: a weak gate continues with the user counted
            if ent is None:
                continue
            if float(gate[i]) < eps:
                continue
            out += gate[i] * (x @ ent.frame.weight)
            self.res.leave(ent)
        return out

    def weight_of(self, e: int) -> Optional[torch.Tensor]:
        ent = self.res.enter((self.layer, e))  # leak: a clone goes out, the use count stays up
        return ent.frame.weight.clone() if ent is not None else None

    # ---- hot set -------------------------------------------------------------

    def heat(self, experts: Iterable[int]) -> int:
        for e in experts:
            ent = self.res.enter((self.layer, e))  # clean: cool leaves the whole hot list
            if ent is None:
                break
            self.hot.append(ent)
        return len(self.hot)

    def cool(self) -> None:
        for ent in self.hot:
            self.res.leave(ent)
        self.hot = []

    # ---- prefetch for the next layer -----------------------------------------

    def prefetch(self, tok: int, e: int) -> None:
        ent = self.res.enter((self.layer, e))  # leak: settle leaves only the predictions that were right
        if ent is not None:
            self.next_up[tok] = ent

    def settle(self, actual: dict[int, int]) -> int:
        right = 0
        for tok, ent in self.next_up.items():
            if ent.frame.expert == (self.layer, actual.get(tok, -1)):
                right += 1
                self.res.leave(ent)
        self.next_up = {}
        return right


class Calibrator:
    """Measures experts off line with frames taken directly from the source."""

    def __init__(self, frames: FrameSource, fetch: Callable[[Key, torch.Tensor], None]) -> None:
        self.frames = frames
        self.fetch = fetch

    def distance(self, a: Key, b: Key) -> float:
        fa = self.frames.obtain()  # leak: without a second frame the first is not relinquished
        if fa is None:
            return float("inf")
        self.fetch(a, fa.weight)
        fb = self.frames.obtain()  # clean: relinquished with the first
        if fb is None:
            return float("inf")
        self.fetch(b, fb.weight)
        d = float((fa.weight - fb.weight).norm())
        fa.relinquish()
        fb.relinquish()
        return d

    def distance_safe(self, a: Key, b: Key) -> float:
        fa = self.frames.obtain()  # clean: near miss, relinquished also if only one was to be had
        fb = self.frames.obtain()  # clean: near miss, relinquished if held
        d = float("inf")
        if fa is not None and fb is not None:
            self.fetch(a, fa.weight)
            self.fetch(b, fb.weight)
            d = float((fa.weight - fb.weight).norm())
        for f in (fa, fb):
            if f is not None:
                f.relinquish()
        return d
