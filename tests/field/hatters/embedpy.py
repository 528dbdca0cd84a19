"""Interpreters, handles, mappings, trampolines and scopes of the service that embeds Python."""
from __future__ import annotations

import contextvars
import ctypes
import mmap
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any


class EmbedError(Exception):
    pass


class Interp:
    def __init__(self, ident):
        self.ident = ident
        self.globals = {}

    def run(self, code):
        exec(code, self.globals)

    def scrub(self):
        self.globals.clear()


class InterpStable:
    """Sub-interpreters stand in a stable; saddle one, stable it after the ride."""

    def __init__(self, n, max_rides=100):
        self._stalls = deque(Interp(i) for i in range(n))
        self._rides = {}
        self._max = max_rides
        self._cv = threading.Condition()

    def saddle(self):
        with self._cv:
            self._cv.wait_for(lambda: self._stalls)
            it = self._stalls.popleft()
            self._rides[it.ident] = self._rides.get(it.ident, 0) + 1
            return it

    def stable(self, it):
        with self._cv:
            if self._rides[it.ident] >= self._max:
                it.scrub()
                self._rides[it.ident] = 0
            self._stalls.append(it)
            self._cv.notify()


def evaluate(stable, code):
    it = stable.saddle()  # leak: a syntax error is caught and reported, the interpreter is not stabled
    try:
        it.run(code)
    except SyntaxError as exc:
        return {"error": str(exc)}
    result = dict(it.globals)
    stable.stable(it)
    return result


def evaluate_isolated(stable, code, name):
    it = stable.saddle()  # clean: stabled in finally
    try:
        it.run(code)
        return it.globals.get(name)
    except SyntaxError:
        return None
    finally:
        it.scrub()
        stable.stable(it)


@dataclass
class Entry:
    obj: Any
    refs: int


class HandleTable:
    """Integer handles that stand for Python objects on the C side."""

    def __init__(self):
        self._entries = {}
        self._next = 0x1000

    def wrap(self, obj):
        h = self._next
        self._next += 16
        self._entries[h] = Entry(obj, 1)
        return h

    def retain(self, h):
        self._entries[h].refs += 1

    def revoke(self, h):
        e = self._entries[h]
        e.refs -= 1
        if not e.refs:
            del self._entries[h]

    def deref(self, h):
        return self._entries[h].obj


def call_native(table, lib, obj):
    h = table.wrap(obj)  # clean: revoked after the call
    rc = lib.process(h)
    table.revoke(h)
    return rc


class NativeList:
    def __init__(self, table):
        self.table = table
        self.items = []

    def append(self, obj):
        self.items.append(self.table.wrap(obj))  # clean: near miss, the list owns it and clear revokes it

    def share(self, other):
        for h in self.items:
            self.table.retain(h)  # clean: other owns the second reference and its clear revokes it
            other.items.append(h)

    def clear(self):
        for h in self.items:
            self.table.revoke(h)
        self.items = []


class NativeCell:
    def __init__(self, table):
        self.table = table
        self.h = None

    def set(self, obj):
        if obj is None:
            self.h = None
            return
        if self.h is not None:
            self.table.revoke(self.h)
        self.h = self.table.wrap(obj)  # leak: set(None) overwrites the handle without revoke

    def get(self):
        return None if self.h is None else self.table.deref(self.h)

    def close(self):
        if self.h is not None:
            self.table.revoke(self.h)
            self.h = None


class Chunk:
    """A piece of an anonymous mapping."""

    def __init__(self, mapping, start, length):
        self._mapping = mapping
        self.start = start
        self.length = length

    def put(self, blob):
        self._mapping.mm[self.start : self.start + len(blob)] = blob

    def get(self, n):
        return self._mapping.mm[self.start : self.start + n]

    def unmap(self):
        m, self._mapping = self._mapping, None
        if m is None:
            raise EmbedError("chunk is unmapped")
        m._chunk_gone(self)


class ChunkMapping:
    PAGE = 4096

    def __init__(self, npages):
        self.mm = mmap.mmap(-1, npages * self.PAGE)
        self._pages = [False] * npages
        self.live = 0

    def map_chunk(self, nbytes):
        k = -(-nbytes // self.PAGE)
        run = 0
        for i, used in enumerate(self._pages):
            run = 0 if used else run + 1
            if run == k:
                first = i - k + 1
                self._pages[first : i + 1] = [True] * k
                self.live += 1
                return Chunk(self, first * self.PAGE, k * self.PAGE)
        raise MemoryError(nbytes)

    def _chunk_gone(self, chunk):
        first = chunk.start // self.PAGE
        k = chunk.length // self.PAGE
        self._pages[first : first + k] = [False] * k
        self.live -= 1


def pass_blob(mapping, lib, blob):
    try:
        chunk = mapping.map_chunk(len(blob))  # leak: an error code breaks out of the loop past unmap
    except MemoryError:
        return lib.copy_in(blob)
    chunk.put(blob)
    for _ in range(3):
        rc = lib.offer(chunk.start, len(blob))
        if rc == 0:
            chunk.unmap()
            return True
        if rc < 0:
            break
    else:
        chunk.unmap()
    return False


class GrowBuffer:
    def __init__(self, mapping, n):
        self.mapping = mapping
        self.chunk = mapping.map_chunk(n)  # clean: near miss, grow unmaps the old chunk after the copy

    def grow(self, n):
        bigger = self.mapping.map_chunk(n)  # clean: becomes the chunk that close unmaps
        bigger.put(self.chunk.get(self.chunk.length))
        old, self.chunk = self.chunk, bigger
        old.unmap()

    def close(self):
        self.chunk.unmap()


CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)


class Trampolines:
    """A limited table of C callables; a slot keeps the Python function alive."""

    def __init__(self, nslots=16):
        self._fns = [None] * nslots
        self.high_water = 0

    def bind(self, fn):
        for i, cur in enumerate(self._fns):
            if cur is None:
                self._fns[i] = CALLBACK(fn)
                self.high_water = max(self.high_water, i + 1)
                return i
        raise EmbedError("no trampoline left")

    def unbind(self, i):
        if self._fns[i] is None:
            raise EmbedError(f"slot {i} is not bound")
        self._fns[i] = None

    def pointer(self, i):
        return ctypes.cast(self._fns[i], ctypes.c_void_p).value


def sort_native(tramps, lib, data, key):
    slot = tramps.bind(key)  # clean: unbound after the sort
    lib.sort(data, tramps.pointer(slot))
    tramps.unbind(slot)
    return data


def subscribe(tramps, lib, topics, fn):
    slots = {}
    for topic in topics:
        slot = tramps.bind(fn)  # leak: a refused topic is neither in the result nor unbound
        if lib.subscribe(topic, tramps.pointer(slot)):
            slots[topic] = slot
    return slots


def unsubscribe(tramps, lib, slots):
    for topic, slot in slots.items():
        lib.unsubscribe(topic)
        tramps.unbind(slot)
    slots.clear()


def on_signal(tramps, lib, fn, fallback):
    slot = tramps.bind(fn)  # leak: the fallback's slot replaces it in the same name
    if not lib.on_signal(tramps.pointer(slot)):
        slot = tramps.bind(fallback)  # clean: returned to the caller
        lib.on_any(tramps.pointer(slot))
    return slot


_scope = contextvars.ContextVar("scope", default=())


class ScopeStack:
    """Request scopes in a context variable; tokens restore the outer scope."""

    def __init__(self):
        self.depth = 0
        self.deepest = 0

    def enter_scope(self, name):
        self.depth += 1
        self.deepest = max(self.deepest, self.depth)
        return _scope.set(_scope.get() + (name,))

    def exit_scope(self, token):
        self.depth -= 1
        _scope.reset(token)


def handle_request(scopes, req, app):
    token = scopes.enter_scope(req.path)  # leak: a not found answer returns inside the scope
    view = app.routes.get(req.path)
    if view is None:
        return 404
    body = view(req)
    scopes.exit_scope(token)
    return body


def with_scope(scopes, name, fn):
    token = scopes.enter_scope(name)  # clean: left in finally
    try:
        return fn()
    finally:
        scopes.exit_scope(token)


class CompiledScripts:
    """Code objects by text; they stay."""

    def __init__(self):
        self._codes = {}

    def checkout(self, text):
        code = self._codes.get(text)
        if code is None:
            code = self._codes[text] = compile(text, "<script>", "exec")
        return code

    def remove(self, text):
        self._codes.pop(text, None)


def run_script(scripts, it, text):
    code = scripts.checkout(text)  # clean: a cache of code objects, nothing is lent
    if not code.co_names:
        return False
    it.run(code)
    return True
