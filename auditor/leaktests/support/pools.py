"""Pools as a leak test sees them: objects that lend something by one method and take it back by another.

Any pool will do: its methods are known by name, and are wrapped on its class while a pass looks on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import chain
from types import ModuleType
from typing import Any

import torch

PAIRS = (
    ("allocate", "deallocate"),
    ("alloc", "free"),
    ("allocate", "free"),
    ("acquire", "release"),
    ("get_buffer", "return_buffer"),
    ("get_tensor", "return_tensor"),
    ("alloc_blocks", "free_blocks"),
    ("allocate_blocks", "free_blocks"),
    ("borrow", "give_back"),
    ("borrow", "return_"),
    ("checkout", "checkin"),
)
"""Methods that lend, and the ones that take back. `allocate_...` lends as `allocate` does."""
_NO_POOLS = ("builtins", "threading", "_thread", "multiprocessing", "asyncio", "torch", "numpy")


def pair_of(pool: object) -> tuple[str, str] | None:
    """The names by which an object lends and takes back; None if it is no pool."""
    return None if isinstance(pool, (type, ModuleType)) else pair_of_class(type(pool))


def pair_of_class(kind: type) -> tuple[str, str] | None:
    """The same for every object of a class."""
    if kind.__module__.partition(".")[0] in _NO_POOLS:
        return None
    for lend, take_back in PAIRS:
        if callable(getattr(kind, lend, None)) and callable(getattr(kind, take_back, None)):
            return lend, take_back
    return None


def pools_of(target: object) -> tuple[Any, ...]:
    """Every pool that a module, or a part of it, holds in an attribute or hands out for its device."""
    found: dict[int, Any] = {}
    parts = list(target.modules()) if isinstance(target, torch.nn.Module) else [target]
    for part in parts:
        values = list(getattr(part, "__dict__", {}).values())
        if getattr(part, "enable_memory_pool", False) and hasattr(part, "_pool_on"):  # the standard mixin
            values.append(part._pool_on(_device_of(part, target)))
        for value in values:
            for pool in value.values() if isinstance(value, dict) else (value,):
                if pair_of(pool) is not None:
                    found[id(pool)] = pool
    return tuple(found.values())


def _device_of(part: Any, target: Any) -> torch.device:
    """Where a part's own tensors are, else the module's, else where the tests run."""
    for module in (part, target):
        if isinstance(module, torch.nn.Module):
            for tensor in chain(module.parameters(), module.buffers()):
                return tensor.device
    return torch.device(os.environ.get("POOLAUDIT_DEVICE") or torch.get_default_device())


class Refusal(Exception):
    """Raised where a pool is asked, it makes the pool answer None."""


def may_refuse(kind: type) -> bool:
    """Whether a pool of this class is declared to answer None when it has nothing left."""
    pair = pair_of_class(kind)
    method = getattr(kind, pair[0], None) if pair is not None else None
    answer = str(getattr(method, "__annotations__", {}).get("return", ""))
    return answer != "None" and ("None" in answer or "Optional" in answer)


Called = Callable[[str, Any, tuple[Any, ...]], None]
"""Given `ask`, the pool, and the lending method's name and arguments; or `lend` or `take back`, the pool,
and the handles that went over the counter.
"""


class _Depth(threading.local):
    depth = 0


@dataclass(frozen=True)
class _Watch:
    pools: tuple[Any, ...]
    called: Called
    inside: _Depth = field(default_factory=_Depth)

    def knows(self, pool: Any) -> bool:
        return any(
            pool is known or (isinstance(known, type) and isinstance(pool, known)) for known in self.pools
        )


@contextmanager
def counter_watched(pools: tuple[Any, ...], called: Called) -> Iterator[None]:
    """While entered, every outermost lend and take-back of these pools is reported; a class stands for all
    of its objects.
    """
    with ExitStack() as exits:
        wrapped: set[tuple[type, str]] = set()
        watch = _Watch(pools, called)
        for pool in pools:
            kind = pool if isinstance(pool, type) else type(pool)
            pair = pair_of_class(kind)
            if pair is None:
                raise TypeError(
                    f"{kind.__name__} is no pool that a leak test knows: it has none of the pairs "
                    f"{', '.join('/'.join(names) for names in PAIRS)}"
                )
            for owner, name, act in _methods(kind, *pair):
                if (owner, name) not in wrapped:
                    wrapped.add((owner, name))
                    exits.enter_context(_wrapped(owner, name, act, watch))
        yield


def _methods(kind: type, lend: str, take_back: str) -> Iterator[tuple[type, str, str]]:
    for base in kind.__mro__:
        for name, value in list(vars(base).items()):
            if callable(value) or hasattr(value, "__get__"):
                if name == lend or name.startswith(f"{lend}_"):
                    yield base, name, "lend"
                elif name == take_back:
                    yield base, name, "take back"


@contextmanager
def _wrapped(kind: type, name: str, act: str, watch: _Watch) -> Iterator[None]:
    original = vars(kind)[name]

    @wraps(getattr(kind, name))
    def method(pool: Any, *args: Any, **kwargs: Any) -> Any:
        call = original.__get__(pool, type(pool))
        if watch.inside.depth or not watch.knows(pool):
            return call(*args, **kwargs)  # a method that lends through another lends once
        if act == "lend":
            try:
                watch.called("ask", pool, (name, args, kwargs))
            except Refusal:
                return None
        watch.inside.depth += 1
        try:
            result = call(*args, **kwargs)
        finally:
            watch.inside.depth -= 1
        watch.called(act, pool, (result,) if act == "lend" else (*args, *kwargs.values()))
        return result

    setattr(kind, name, method)
    try:
        yield
    finally:
        setattr(kind, name, original)
