"""Activation offload arena, used through context managers and saved-tensor hooks."""
from __future__ import annotations

import contextlib
from typing import Callable, Dict, Iterator, List, Optional


class Region:
    def __init__(self, rid: int) -> None:
        self.rid = rid
        self.data: List[int] = []


class ActivationArena:
    def __init__(self, n: int) -> None:
        self._avail = [Region(i) for i in range(n)]
        self.n = n

    def take(self) -> Optional[Region]:
        return self._avail.pop() if self._avail else None

    def give(self, region: Region) -> None:
        region.data = []
        self._avail.append(region)

    @property
    def taken(self) -> int:
        return self.n - len(self._avail)


class OffloadScope:
    def __init__(self, arena: ActivationArena) -> None:
        self.arena = arena
        self.region: Optional[Region] = None

    def __enter__(self) -> Optional[Region]:
        self.region = self.arena.take()  # leak: __exit__ returns early on ValueError, which it swallows
        return self.region

    def __exit__(self, et, ev, tb) -> bool:
        if et is not None and issubclass(et, ValueError):
            return True
        if self.region is not None:
            self.arena.give(self.region)
            self.region = None
        return False


class RecomputeScope:
    def __init__(self, arena: ActivationArena) -> None:
        self.arena = arena
        self.region: Optional[Region] = None

    def __enter__(self) -> Optional[Region]:
        self.region = self.arena.take()  # clean: near miss, __exit__ returns early only with nothing taken
        return self.region

    def __exit__(self, et, ev, tb) -> bool:
        if self.region is None:
            return False
        self.arena.give(self.region)
        self.region = None
        return et is not None and issubclass(et, ValueError)


@contextlib.contextmanager
def staged(arena: ActivationArena) -> Iterator[Optional[Region]]:
    region = arena.take()  # clean: near miss, finally gives back unless None
    try:
        yield region
    finally:
        if region is not None:
            arena.give(region)


@contextlib.contextmanager
def suppressed(arena: ActivationArena) -> Iterator[Optional[Region]]:
    region = arena.take()  # leak: a KeyError from the body is swallowed before the give
    try:
        yield region
        if region is not None:
            arena.give(region)
    except KeyError:
        pass


class SavedTensorHooks:
    """pack stores the activation in the arena, unpack takes it out again."""

    def __init__(self, arena: ActivationArena, min_len: int) -> None:
        self.arena = arena
        self.min_len = min_len
        self.packed: Dict[int, Region] = {}
        self._next = 0

    def pack(self, x: List[int]):
        if len(x) < self.min_len:
            return x
        region = self.arena.take()  # clean: kept in packed, unpack or clear gives it back
        if region is None:
            return x
        region.data = list(x)
        self._next += 1
        self.packed[self._next] = region
        return self._next

    def unpack(self, handle):
        if not isinstance(handle, int):
            return handle
        region = self.packed.pop(handle)
        out = list(region.data)
        self.arena.give(region)
        return out

    def clear(self) -> None:
        for region in self.packed.values():
            self.arena.give(region)
        self.packed.clear()


class Checkpointer:
    def __init__(self, arena: ActivationArena) -> None:
        self.arena = arena
        self.layers: Dict[str, Region] = {}
        self.stack: List[Region] = []

    def save(self, name: str, x: List[int]) -> bool:
        region = self.arena.take()  # leak: the entry is popped and copied in restore, never given
        if region is None:
            return False
        region.data = list(x)
        self.layers[name] = region
        return True

    def restore(self, name: str) -> List[int]:
        region = self.layers.pop(name)
        return list(region.data)

    def push(self, x: List[int]) -> None:
        region = self.arena.take()  # clean: on the stack, pop_all gives it back
        if region is not None:
            region.data = x
            self.stack.append(region)

    def pop_all(self, fn: Callable[[List[int]], None]) -> None:
        while self.stack:
            region = self.stack.pop()
            fn(region.data)
            self.arena.give(region)

    def stash(self, x: List[int], keep: bool) -> int:
        region = self.arena.take()  # clean: near miss, keep pushes it, otherwise given back
        if region is None:
            return 0
        region.data = list(x)
        size = len(region.data)
        if keep:
            self.stack.append(region)
        else:
            self.arena.give(region)
        return size

    def measure(self, x: List[int], verbose: bool) -> int:
        region = self.arena.take()  # leak: given back only when verbose
        if region is None:
            return 0
        region.data = list(x)
        size = len(region.data)
        if verbose:
            print("activation", size)
            self.arena.give(region)
        return size


def forward(arena: ActivationArena, xs: List[List[int]]) -> int:
    total = 0
    for x in xs:
        with staged(arena) as region:  # clean: with
            if region is None:
                continue
            region.data = x
            total += len(x)
    with RecomputeScope(arena) as region:  # clean: with
        if region is not None:
            total += 1
    return total


def manual_scope(arena: ActivationArena) -> int:
    scope = RecomputeScope(arena)
    region = scope.__enter__()  # leak: __exit__ is not called when no work is found
    if region is None or not region.data:
        return 0
    n = len(region.data)
    scope.__exit__(None, None, None)
    return n


def with_stack(arena: ActivationArena, n: int) -> int:
    with contextlib.ExitStack() as stack:
        for _ in range(n):
            region = arena.take()  # clean: near miss, give is registered with the exit stack
            if region is None:
                return -1
            stack.callback(arena.give, region)
        return n


if __name__ == "__main__":
    a = ActivationArena(4)
    assert forward(a, [[1], [2, 3]]) == 4
    h = SavedTensorHooks(a, 1)
    assert h.unpack(h.pack([1, 2])) == [1, 2]
    assert with_stack(a, 9) == -1
    ck = Checkpointer(a)
    ck.push([1])
    ck.stash([1], False)
    ck.pop_all(lambda d: None)
    assert a.taken == 0
