"""Bump arena with sub-allocators. Each level takes spans from the one below."""
from typing import Dict, List, NamedTuple, Optional


class Span(NamedTuple):
    lo: int
    hi: int

    def __len__(self):
        return self.hi - self.lo


class RootArena:
    def __init__(self, size: int, grain: int):
        self.spans: List[Span] = [Span(i, i + grain) for i in range(0, size, grain)]
        self.grain = grain

    def take_span(self) -> Optional[Span]:
        if not self.spans:
            return None
        return self.spans.pop()  # clean: handed to the caller

    def take_above(self, lo: int) -> Optional[Span]:
        if self.spans:
            s = self.spans.pop()  # leak: a span below the bound is popped and None is the answer
            if s.lo >= lo:
                return s
        return None

    def take_largest(self) -> Optional[Span]:
        if not self.spans:
            return None
        s = max(self.spans, key=len)
        self.spans.remove(s)  # clean: handed to the caller
        return s

    def give_span(self, s: Span) -> None:
        self.spans.append(s)


class SlabCache:
    """Fixed-size objects cut out of spans."""

    def __init__(self, root: RootArena, obj: int):
        self.root = root
        self.obj = obj
        self.spans: List[Span] = []
        self.free: List[int] = []

    def _refill(self) -> bool:
        s = self.root.take_span()  # clean: in the spans, destroy() gives all
        if s is None:
            return False
        self.spans.append(s)
        self.free.extend(range(s.lo, s.hi - self.obj + 1, self.obj))
        return True

    def _refill_big(self) -> bool:
        s = self.root.take_largest()  # leak: too small a span is neither cut up nor given
        if s is None or len(s) < self.obj:
            return False
        self.spans.append(s)
        self.free.extend(range(s.lo, s.hi - self.obj + 1, self.obj))
        return True

    def obj_alloc(self) -> Optional[int]:
        if not self.free and not self._refill():
            return None
        return self.free.pop()  # clean: handed to the caller

    def obj_free(self, a: int) -> None:
        self.free.append(a)

    def destroy(self) -> None:
        for s in self.spans:
            self.root.give_span(s)
        self.spans.clear()
        self.free.clear()


class StackArena:
    """Mark and release."""

    def __init__(self, root: RootArena):
        self.root = root
        self.stack: List[Span] = []

    def push(self) -> bool:
        s = self.root.take_span()  # clean: on the stack, pop_to() and reset() give it
        if s is not None:
            self.stack.append(s)
        return s is not None

    def pop_to(self, mark: int) -> None:
        while len(self.stack) > mark:
            self.root.give_span(self.stack.pop())

    def reset(self) -> None:
        self.pop_to(0)


class CutStack:
    def __init__(self, root: RootArena):
        self.root = root
        self.stack: List[Span] = []

    def push(self) -> bool:
        s = self.root.take_span()  # leak: cut() shortens the stack and gives the top one only
        if s is not None:
            self.stack.append(s)
        return s is not None

    def cut(self, mark: int) -> None:
        if len(self.stack) > mark:
            self.root.give_span(self.stack[-1])
            self.stack = self.stack[:mark]


class NamedSpans:
    def __init__(self, root: RootArena):
        self.root = root
        self.by_name: Dict[str, Span] = {}

    def define(self, name: str) -> Optional[Span]:
        if name in self.by_name:
            return self.by_name[name]
        s = self.root.take_span()  # clean: near miss, a known name returned before, undefine() and wipe() give it
        if s is not None:
            self.by_name[name] = s
        return s

    def rename(self, old: str, new: str) -> None:
        self.undefine(new)
        self.by_name[new] = self.by_name.pop(old)

    def undefine(self, name: str) -> None:
        s = self.by_name.pop(name, None)
        if s is not None:
            self.root.give_span(s)

    def wipe(self) -> None:
        for name in list(self.by_name):
            self.undefine(name)


def fill(cache: SlabCache, n: int) -> Optional[List[int]]:
    out = []
    for _ in range(n):
        a = cache.obj_alloc()  # leak: the objects made before the shortage are dropped
        if a is None:
            return None
        out.append(a)
    return out


def fill_exact(cache: SlabCache, n: int) -> Optional[List[int]]:
    out = []
    for _ in range(n):
        a = cache.obj_alloc()  # clean: near miss, undone on a shortage
        if a is None:
            for b in out:
                cache.obj_free(b)
            return None
        out.append(a)
    return out


def churn(cache: SlabCache, rounds: int) -> int:
    done = 0
    for r in range(rounds):
        batch = fill_exact(cache, r + 1)  # clean: freed in the same round
        if batch is None:
            break
        for a in batch:
            cache.obj_free(a)
        done += 1
    return done


def churn_odd(cache: SlabCache, rounds: int) -> int:
    done = 0
    for r in range(rounds):
        batch = fill_exact(cache, r + 1)  # leak: even rounds continue with their objects
        if batch is None:
            break
        if r % 2 == 0:
            continue
        for a in batch:
            cache.obj_free(a)
        done += 1
    return done


def span_test(root: RootArena) -> bool:
    a = root.take_span()  # clean: given back on both returns
    if a is None:
        return False
    b = root.take_above(a.lo)  # leak: the comparison returns and gives only the first
    if b is None:
        root.give_span(a)
        return False
    root.give_span(a)
    return b.lo > a.lo
