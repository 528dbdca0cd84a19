"""In-process model registry.

Models are mmapped once per version; users check a handle out and check it in
again.  A version is unloaded when nobody uses it any more.
"""
from __future__ import annotations

import functools
import logging
import threading
import typing
from pathlib import Path

import torch

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)


class ModelHandle:
    def __init__(self, name: str, version: int, state: dict[str, torch.Tensor]) -> None:
        self.name, self.version, self.state = name, version, state
        self.users = 0


class Registry:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._handles: dict[tuple[str, int], ModelHandle] = {}
        self._guard = threading.RLock()

    def checkout(self, name: str, version: int) -> ModelHandle:
        with self._guard:
            key = (name, version)
            h = self._handles.get(key)
            if h is None:
                state = torch.load(self.root / name / f"{version}.pt", mmap=True)
                h = self._handles[key] = ModelHandle(name, version, state)
            h.users += 1
            return h

    def checkin(self, h: ModelHandle) -> None:
        with self._guard:
            h.users -= 1
            if h.users == 0:
                self._handles.pop((h.name, h.version), None)

    def latest(self, name: str) -> int:
        return max((int(p.stem) for p in (self.root / name).glob("*.pt")), default=-1)


class Lease:
    """`with Lease(registry, "m", 3) as model:`"""

    def __init__(self, registry: Registry, name: str, version: int) -> None:
        self._registry = registry
        self._handle = registry.checkout(name, version)  # clean: __exit__ and close() check it in

    def __enter__(self) -> ModelHandle:
        return self._handle

    def close(self) -> None:
        if self._handle is not None:
            self._registry.checkin(self._handle)
            self._handle = None

    def __exit__(self, *exc) -> None:
        self.close()


class LazyLease:
    def __init__(self, registry: Registry, name: str, version: int) -> None:
        self._registry = registry
        self._args = (name, version)
        self._handle: ModelHandle | None = None
        self.errors = 0

    def __enter__(self) -> ModelHandle:
        self._handle = self._registry.checkout(*self._args)  # leak: __exit__ returns early on an exception
        return self._handle

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None:
            self.errors += 1
            return False
        self._registry.checkin(self._handle)
        return False


def with_model(name: str) -> Callable:
    def deco(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def inner(registry: Registry, *args, **kw):
            handle = registry.checkout(name, registry.latest(name))  # clean: finally of the decorator
            try:
                return fn(registry, handle, *args, **kw)
            finally:
                registry.checkin(handle)
        return inner
    return deco


@with_model("reranker")
def rerank(registry: Registry, handle: ModelHandle, scores: torch.Tensor) -> torch.Tensor:
    return scores * handle.state["scale"]


def num_params(registry: Registry, name: str) -> int:
    return sum(v.numel() for v in registry.checkout(name, registry.latest(name)).state.values())  # leak: the handle is a temporary


def same_weights(registry: Registry, name: str, a: int, b: int) -> bool:
    ha = registry.checkout(name, a)  # leak: differing keys return before the check-ins
    hb = registry.checkout(name, b)  # leak: differing keys return before the check-ins
    if ha.state.keys() != hb.state.keys():
        return False
    same = all(torch.equal(ha.state[k], hb.state[k]) for k in ha.state)
    registry.checkin(ha)
    registry.checkin(hb)
    return same


def average(registry: Registry, name: str, versions: list[int]) -> dict[str, torch.Tensor]:
    acc: dict[str, torch.Tensor] = {}
    for v in versions:
        with Lease(registry, name, v) as h:  # clean: with block
            for k, t in h.state.items():
                acc[k] = acc.get(k, 0) + t / len(versions)
            if not h.state:
                break
    return acc


def find_tensor(registry: Registry, names: list[str], key: str) -> torch.Tensor | None:
    for n in names:
        h = registry.checkout(n, registry.latest(n))  # leak: checked in only where the tensor is missing
        if key in h.state:
            return h.state[key].clone()
        registry.checkin(h)
    return None


def iter_tensors(registry: Registry, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    h = registry.checkout(name, registry.latest(name))  # clean: generator with finally
    try:
        yield from h.state.items()
    finally:
        registry.checkin(h)


class Switcher:
    """Serves one active version and swaps it without interruption."""

    def __init__(self, registry: Registry, name: str) -> None:
        self.registry, self.name = registry, name
        self.active = registry.checkout(name, registry.latest(name))  # clean: swapped out and closed properly below
        self.shadow: ModelHandle | None = None

    def refresh(self) -> bool:
        new = self.registry.checkout(self.name, self.registry.latest(self.name))  # clean: near miss, same version is checked in again
        if new is self.active:
            self.registry.checkin(new)
            return False
        old, self.active = self.active, new
        self.registry.checkin(old)
        return True

    def set_shadow(self, version: int) -> None:
        if self.shadow is None:
            self.shadow = self.registry.checkout(self.name, version)  # leak: close() forgets the shadow

    def close(self) -> None:
        self.registry.checkin(self.active)
