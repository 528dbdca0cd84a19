"""Workspace arenas: scoped scratch space for kernels that need a workspace."""
import contextlib
import functools
import threading

import torch


class Arena:
    def __init__(self, ident, nbytes):
        self.ident = ident
        self.base = torch.empty(nbytes, dtype=torch.uint8)
        self.top = 0

    def carve(self, nbytes):
        start = self.top
        self.top += nbytes
        return self.base[start : start + nbytes]


class ArenaManager:
    def __init__(self, count, nbytes):
        self._idle = [Arena(i, nbytes) for i in range(count)]
        self._named = {}
        self._lock = threading.Lock()

    def attach(self):
        with self._lock:
            return self._idle.pop() if self._idle else None  # clean: handed to the caller

    def detach(self, arena):
        arena.top = 0
        with self._lock:
            self._idle.append(arena)

    def attach_named(self, name):
        with self._lock:
            if name in self._named:
                return self._named[name]
            if not self._idle:
                return None
            self._named[name] = self._idle.pop()  # clean: near miss, stays under its name until detach_named
            return self._named[name]

    def detach_named(self, name):
        arena = self._named.pop(name, None)
        if arena is not None:
            self.detach(arena)

    def largest(self):
        with self._lock:
            best = None
            while self._idle:
                arena = self._idle.pop()  # leak: every arena but the winner is dropped
                if best is None or arena.base.nbytes > best.base.nbytes:
                    best = arena
            return best

    @contextlib.contextmanager
    def scope(self):
        arena = self.attach()  # clean: detached in finally
        try:
            yield arena
        finally:
            if arena is not None:
                self.detach(arena)

    @contextlib.contextmanager
    def scope_cached(self, cache, key):
        arena = cache.pop(key, None) or self.attach()  # leak: a partly used arena is neither cached nor detached
        yield arena
        if arena is None:
            return
        if arena.top == 0:
            cache[key] = arena
        elif arena.top >= arena.base.nbytes:
            self.detach(arena)


def with_workspace(manager, nbytes):
    """Decorator that passes a workspace as the first argument."""

    def wrap(fn):
        @functools.wraps(fn)
        def inner(*args, **kwargs):
            arena = manager.attach()  # clean: near miss, the direct return holds nothing and finally does the rest
            if arena is None:
                return fn(None, *args, **kwargs)
            try:
                return fn(arena.carve(nbytes), *args, **kwargs)
            finally:
                manager.detach(arena)

        return inner

    return wrap


class Workspace:
    """Takes an arena from the manager or uses one that belongs to somebody else."""

    def __init__(self, manager, arena=None):
        self._manager = manager
        self._owned = arena is None
        self.arena = manager.attach() if self._owned else arena  # clean: near miss, close detaches exactly when it was attached here

    def carve(self, nbytes):
        return self.arena.carve(nbytes)

    def close(self):
        if self._owned:
            self._manager.detach(self.arena)
            self._owned = False


class LazyWorkspace:
    def __init__(self, manager):
        self._manager = manager
        self._owned = False
        self.arena = None

    def ensure(self, nbytes):
        if self.arena is None:
            self.arena = self._manager.attach()  # leak: ownership is never noted, so close does nothing
        return self.arena.carve(nbytes)

    def close(self):
        if self._owned:
            self._manager.detach(self.arena)
        self.arena = None


def tiles(manager, t, rows):
    arena = manager.attach()  # clean: near miss, finally runs when the generator is exhausted or closed
    try:
        for start in range(0, t.shape[0], rows):
            part = t[start : start + rows]
            arena.top = 0
            space = arena.carve(part.nbytes)
            space.copy_(part.contiguous().view(-1).view(torch.uint8))
            yield space
    finally:
        manager.detach(arena)


def tile_sums(manager, t, rows):
    for start in range(0, t.shape[0], rows):
        arena = manager.attach()  # leak: an all-zero tile is yielded and the loop goes on without detaching
        part = t[start : start + rows]
        if not bool(part.any()):
            yield 0.0
            continue
        space = arena.carve(part.nbytes).view(part.dtype)
        space.copy_(part.reshape(-1))
        yield float(space.sum())
        manager.detach(arena)


def two_pass(manager, t):
    with contextlib.ExitStack() as stack:
        first = manager.attach()  # clean: near miss, the stack detaches it, also on the early return
        stack.callback(manager.detach, first)
        second = manager.attach()  # clean: near miss, None is returned on and only a real arena is pushed
        if second is None:
            return None
        stack.callback(manager.detach, second)
        a = first.carve(t.nbytes).view(t.dtype).copy_(t.view(-1))
        b = second.carve(t.nbytes).view(t.dtype).copy_(a.cumsum(0))
        return b.clone()
