"""LoRA adapter slots of the rollout engine, kept as an LRU of records with states."""
from __future__ import annotations
import enum
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Callable, Optional
import torch

class SlotState(enum.IntEnum):
    VACANT = 0
    LOADING = 1
    SEATED = 2

@dataclass
class Slot:
    pos: int
    a: torch.Tensor
    b: torch.Tensor
    state: SlotState = SlotState.VACANT
    riders: int = 0
    adapter: Optional[str] = None

class SlotDeck:
    """Seats adapters; board()/alight() count riders, reserve()/vacate() hold a place."""
    def __init__(self, n: int, rank: int, dim: int) -> None:
        self._mu = threading.Lock()
        self._slots = [Slot(i, torch.zeros(rank, dim), torch.zeros(dim, rank)) for i in range(n)]
        self._seated: OrderedDict[str, Slot] = OrderedDict()
    def reserve(self) -> Optional[Slot]:
        """A slot in LOADING, evicting an adapter without riders."""
        with self._mu:
            for s in self._slots:
                if s.state is SlotState.VACANT:
                    s.state = SlotState.LOADING
                    return s
            for name, s in self._seated.items():
                if s.riders == 0:
                    del self._seated[name]
                    s.state, s.adapter = SlotState.LOADING, None
                    return s
        return None
    def vacate(self, s: Slot) -> None:
        with self._mu:
            s.state, s.adapter = SlotState.VACANT, None
    def seat(self, s: Slot, name: str) -> None:
        """Ends the reservation: the slot is now the deck's, evictable."""
        with self._mu:
            if name in self._seated:
                raise ValueError(f"{name} is seated already")
            s.state, s.adapter = SlotState.SEATED, name
            self._seated[name] = s
    def board(self, name: str) -> Optional[Slot]:
        with self._mu:
            s = self._seated.get(name)
            if s is None:
                return None
            self._seated.move_to_end(name)
            s.riders += 1
            return s
    def alight(self, s: Slot) -> None:
        with self._mu:
            s.riders -= 1

Loader = Callable[[str], Optional[tuple[torch.Tensor, torch.Tensor]]]

class AdapterRuntime:
    def __init__(self, deck: SlotDeck, load: Loader) -> None:
        self.deck, self.load = deck, load
        self.by_request: dict[str, Slot] = {}
    def install(self, name: str) -> bool:
        s = self.deck.reserve()  # clean: near miss, vacated on a missing file, else seated
        if s is None:
            return False
        w = self.load(name)
        if w is None:
            self.deck.vacate(s)
            return False
        s.a.copy_(w[0])
        s.b.copy_(w[1])
        self.deck.seat(s, name)
        return True
    def install_checked(self, name: str) -> bool:
        s = self.deck.reserve()  # leak: rank mismatch is handled, slot stays LOADING
        if s is None:
            return False
        try:
            a, b = self.load(name) or (None, None)
            s.a.copy_(a)
            s.b.copy_(b)
        except (RuntimeError, TypeError):
            return False
        self.deck.seat(s, name)
        return True
    def start(self, rid: str, name: str) -> bool:
        s = self.deck.board(name)  # clean: near miss, a miss installs; the rider leaves in stop()
        if s is None:
            if not self.install(name):
                return False
            s = self.deck.board(name)  # clean: recorded per request, stop() alights
            if s is None:
                return False
        old = self.by_request.pop(rid, None)
        if old is not None:
            self.deck.alight(old)
        self.by_request[rid] = s
        return True
    def switch(self, rid: str, name: str) -> bool:
        s = self.deck.board(name)  # leak: overwrites the request's former slot without alighting
        if s is None:
            return False
        self.by_request[rid] = s
        return True
    def stop(self, rid: str) -> None:
        s = self.by_request.pop(rid, None)
        if s is not None:
            self.deck.alight(s)
    def apply(self, x: torch.Tensor, name: str) -> torch.Tensor:
        s = self.deck.board(name)  # leak: zero-token batch returns as a rider
        if s is None:
            return x
        if x.numel() == 0:
            return x
        y = x + x @ s.a.T @ s.b.T
        self.deck.alight(s)
        return y
    def apply_many(self, x: torch.Tensor, names: list[str]) -> torch.Tensor:
        slots = [self.deck.board(n) for n in names]  # clean: near miss, Nones filtered, others alight in finally
        try:
            for i, s in enumerate(slots):
                if s is None:
                    continue
                x[i] += x[i] @ s.a.T @ s.b.T
            return x
        finally:
            for s in slots:
                if s is not None:
                    self.deck.alight(s)
    def resident(self, name: str) -> bool:
        s = self.deck.board(name)  # clean: near miss, alights when there was one
        if s is not None:
            self.deck.alight(s)
        return s is not None

def merge_into(rt: AdapterRuntime, names: list[str], out: str) -> bool:
    """Average several adapters into a new one."""
    dst = rt.deck.reserve()  # leak: an absent source breaks out with dst LOADING
    if dst is None:
        return False
    dst.a.zero_()
    for n in names:
        src = rt.deck.board(n)  # clean: alights each round
        if src is None:
            break
        dst.a.add_(src.a, alpha=1 / len(names))
        rt.deck.alight(src)
    else:
        rt.deck.seat(dst, out)
        return True
    return False
