"""Serving registry: models are loaded once, leased by request handlers, swapped while in use."""
import collections
import logging
import threading
from abc import ABC, abstractmethod
from typing import Any, Callable, Deque, Dict, List, Optional, Set

import torch
from torch import nn

LOGGER = logging.getLogger(__name__)

Loader = Callable[[str], nn.Module]


class ModelEntry:
    def __init__(self, name: str, module: nn.Module, generation: int):
        self.name = name
        self.module = module
        self.generation = generation
        self.leases = 0
        self.retired = False


class Registry:
    def __init__(self, loader: Loader):
        self.loader = loader
        self.mu = threading.RLock()
        self.entries: Dict[str, ModelEntry] = {}
        self.graveyard: List[ModelEntry] = []

    def checkout(self, name: str) -> ModelEntry:
        with self.mu:  # clean: with statement
            e = self.entries.get(name)
            if e is None:
                e = self.entries[name] = ModelEntry(name, self.loader(name), 0)
            e.leases += 1  # clean: the entry is returned to the one who checks it in
            return e

    def checkin(self, e: ModelEntry) -> None:
        with self.mu:  # clean: with statement
            e.leases -= 1
            if e.retired and e.leases == 0:
                self.graveyard.remove(e)
                e.module = nn.Identity()

    def swap(self, name: str) -> int:
        self.mu.acquire()  # leak: a name that is not loaded returns -1 with the mutex locked
        old = self.entries.get(name)
        if old is None:
            return -1
        new = ModelEntry(name, self.loader(name), old.generation + 1)
        self.entries[name] = new
        old.retired = True
        if old.leases:
            self.graveyard.append(old)
        self.mu.release()
        return new.generation

    def names(self) -> Set[str]:
        self.mu.acquire()  # clean: near miss, finally
        try:
            return set(self.entries)
        finally:
            self.mu.release()


class Handler(ABC):
    """Template for request handlers; subclasses implement compute."""

    def __init__(self, registry: Registry, model: str):
        self.registry = registry
        self.model = model

    @abstractmethod
    def compute(self, e: ModelEntry, x: torch.Tensor) -> Any:
        ...

    def accepts(self, x: torch.Tensor) -> bool:
        return x.dim() == 2

    def handle(self, x: torch.Tensor) -> Any:
        e = self.registry.checkout(self.model)  # clean: checked in in finally
        try:
            return self.compute(e, x)
        finally:
            self.registry.checkin(e)

    def handle_validated(self, x: torch.Tensor) -> Any:
        e = self.registry.checkout(self.model)  # leak: input that is not accepted raises before the try
        if not self.accepts(x):
            raise TypeError(f"{self.model} does not accept {tuple(x.shape)}")
        try:
            return self.compute(e, x)
        finally:
            self.registry.checkin(e)


class EmbedHandler(Handler):
    def compute(self, e: ModelEntry, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(e.module(x), dim=-1)


class StickyHandler(Handler):
    """Keeps its entry between requests, exchanges it after a swap."""

    def __init__(self, registry: Registry, model: str):
        super().__init__(registry, model)
        self.entry: Optional[ModelEntry] = None

    def compute(self, e: ModelEntry, x: torch.Tensor) -> torch.Tensor:
        return e.module(x)

    def handle(self, x: torch.Tensor) -> torch.Tensor:
        if self.entry is not None and self.entry.retired:
            self.registry.checkin(self.entry)
            self.entry = None
        if self.entry is None:
            self.entry = self.registry.checkout(self.model)  # clean: near miss, a retired one was checked in before, close() does the last
        return self.compute(self.entry, x)

    def close(self) -> None:
        if self.entry is not None:
            self.registry.checkin(self.entry)
            self.entry = None


class RefreshingHandler(StickyHandler):
    def handle(self, x: torch.Tensor) -> torch.Tensor:
        if self.entry is None or self.entry.retired:
            self.entry = self.registry.checkout(self.model)  # leak: a retired entry is replaced without being checked in
        return self.compute(self.entry, x)


class EnsembleHandler(Handler):
    def __init__(self, registry: Registry, model: str, others: List[str]):
        super().__init__(registry, model)
        self.others = others

    def compute(self, e: ModelEntry, x: torch.Tensor) -> torch.Tensor:
        members = [self.registry.checkout(n) for n in self.others]  # clean: every member is checked in
        out = e.module(x)
        for m in members:
            out = out + m.module(x)
        for m in members:
            self.registry.checkin(m)
        return out / (len(members) + 1)

    def vote(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        members: Deque[ModelEntry] = collections.deque()
        for n in self.others:
            members.append(self.registry.checkout(n))  # leak: a disagreement returns with the members that are still in the deque
        first: Optional[torch.Tensor] = None
        while members:
            m = members.popleft()
            y = m.module(x).argmax(-1)
            self.registry.checkin(m)
            if first is not None and not torch.equal(first, y):
                return None
            first = y
        return first

    def best(self, x: torch.Tensor) -> Optional[str]:
        top, name = float("-inf"), None
        for n in self.others:
            m = self.registry.checkout(n)  # clean: near miss, checked in before the continue
            score = float(m.module(x).max())
            self.registry.checkin(m)
            if score < top:
                continue
            top, name = score, n
        return name


def preload(registry: Registry, names: List[str]) -> None:
    for n in names:
        registry.checkout(n)  # leak: result discarded, the leases count up and the model can never be retired
        LOGGER.info("loaded %s", n)


def warm(registry: Registry, names: List[str], x: torch.Tensor) -> None:
    for n in names:
        e = registry.checkout(n)  # clean: checked in
        e.module(x)
        registry.checkin(e)
