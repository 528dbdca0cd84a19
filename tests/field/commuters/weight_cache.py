"""Reference-counted weight cache for a multi-model server."""
from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Callable, Iterator, Optional
from contextlib import contextmanager

import torch

log = logging.getLogger("weights")

Loader = Callable[[str], dict[str, torch.Tensor]]


@dataclass
class CachedModel:
    name: str
    tensors: dict[str, torch.Tensor]
    pins: int = 0
    last_use: float = field(default_factory=time.monotonic)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class WeightCache:
    def __init__(self, loader: Loader, budget: int) -> None:
        self.loader = loader
        self.budget = budget
        self._models: dict[str, CachedModel] = {}

    def pin(self, name: str) -> CachedModel:
        model = self._models.get(name)
        if model is None:
            model = CachedModel(name, self.loader(name))
            self._models[name] = model
            self._trim(keep=model)
        model.pins += 1
        model.last_use = time.monotonic()
        return model

    def pin_if_cached(self, name: str) -> Optional[CachedModel]:
        if name not in self._models:
            return None
        return self.pin(name)  # clean: handed through

    def unpin(self, model: CachedModel) -> None:
        model.pins -= 1

    def _trim(self, keep: CachedModel) -> None:
        total = sum(m.nbytes for m in self._models.values())
        for m in sorted(self._models.values(), key=lambda m: m.last_use):
            if total <= self.budget:
                return
            if m.pins == 0 and m is not keep:
                del self._models[m.name]
                total -= m.nbytes

    @contextmanager
    def pinned(self, name: str) -> Iterator[CachedModel]:
        model = self.pin(name)  # clean: unpinned in the finally
        try:
            yield model
        finally:
            self.unpin(model)


class ModelServer:
    def __init__(self, cache: WeightCache) -> None:
        self.cache = cache
        self.primary: Optional[CachedModel] = None
        self.shadow: Optional[CachedModel] = None
        self.aliases: dict[str, CachedModel] = {}

    def activate(self, name: str) -> None:
        model = self.cache.pin(name)  # clean: near miss, the former primary is unpinned before it is replaced
        if self.primary is not None:
            self.cache.unpin(self.primary)
        self.primary = model

    def set_shadow(self, name: str) -> None:
        if self.shadow is not None and self.shadow.name == name:
            return
        self.shadow = self.cache.pin(name)  # leak: another shadow still pinned is overwritten

    def promote(self) -> bool:
        if self.shadow is None:
            return False
        if self.primary is not None:
            self.cache.unpin(self.primary)
        self.primary, self.shadow = self.shadow, None
        return True

    def alias(self, alias: str, name: str) -> bool:
        model = self.cache.pin_if_cached(name)  # leak: a taken alias returns without unpinning
        if model is None:
            return False
        if alias in self.aliases:
            return False
        self.aliases[alias] = model
        return True

    def forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        with self.cache.pinned(name) as model:  # clean: context manager
            w = model.tensors.get("weight")
            if w is None:
                return x
            return x @ w.T

    def ensemble(self, names: list[str], x: torch.Tensor) -> torch.Tensor:
        models = [self.cache.pin(n) for n in names]  # clean: all unpinned in the finally
        try:
            return torch.stack([x @ m.tensors["weight"].T for m in models]).mean(0)
        finally:
            for m in models:
                self.cache.unpin(m)

    def ensemble_cached(self, names: list[str], x: torch.Tensor) -> Optional[torch.Tensor]:
        outs = []
        for n in names:
            m = self.cache.pin_if_cached(n)  # leak: models without a weight are passed over while pinned
            if m is None:
                continue
            w = m.tensors.get("weight")
            if w is None:
                continue
            outs.append(x @ w.T)
            self.cache.unpin(m)
        return torch.stack(outs).mean(0) if outs else None

    def close(self) -> None:
        for m in self.aliases.values():
            self.cache.unpin(m)
        self.aliases.clear()
        for m in (self.primary, self.shadow):
            if m is not None:
                self.cache.unpin(m)
        self.primary = self.shadow = None


def model_size(cache: WeightCache, name: str) -> int:
    return cache.pin(name).nbytes  # leak: the pinned model is dropped after the size is read


def compare(cache: WeightCache, left: str, right: str) -> float:
    a = cache.pin(left)  # clean: near miss, the shape mismatch unpins it before returning
    b = cache.pin(right)  # leak: the shape mismatch unpins only the left one
    wa, wb = a.tensors["weight"], b.tensors["weight"]
    if wa.shape != wb.shape:
        cache.unpin(a)
        return float("inf")
    diff = float((wa - wb).abs().max())
    cache.unpin(b)
    cache.unpin(a)
    return diff


def preheat(cache: WeightCache, names: list[str]) -> int:
    ok = 0
    for name in names:
        try:
            cache.unpin(cache.pin(name))  # clean: near miss, pinned only to load it and unpinned in the same line
            ok += 1
        except OSError:
            log.warning("cannot load %s", name)
    return ok
