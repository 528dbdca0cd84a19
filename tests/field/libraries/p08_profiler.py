"""Lightweight step profiler with reference-counted trace sessions."""
from __future__ import annotations

import functools
import threading
import time
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch
from torch import nn


class TraceSession:
    def __init__(self, name: str) -> None:
        self.name = name
        self.refs = 0
        self.events: List[Dict[str, Any]] = []

    def add(self, label: str, start: float, stop: float) -> None:
        self.events.append({"label": label, "ts": start, "dur": stop - start})


class SessionRegistry:
    """retain() opens or shares the session of a name, release() lets it go."""

    def __init__(self) -> None:
        self._sessions: Dict[str, TraceSession] = {}
        self._spares: List[TraceSession] = []
        self._lock = threading.Lock()

    def retain(self, name: str) -> TraceSession:
        with self._lock:
            session = self._sessions.get(name)
            if session is None:
                if self._spares:
                    session = self._spares.pop()  # clean: registered under its new name and returned
                    session.name = name
                else:
                    session = TraceSession(name)
                self._sessions[name] = session
            session.refs += 1
            return session

    def release(self, session: TraceSession) -> int:
        with self._lock:
            session.refs -= 1
            if session.refs > 0:
                return session.refs
            self._sessions.pop(session.name, None)
            session.events = []
            self._spares.append(session)
            return 0

    def reset_spares(self, keep: int) -> None:
        with self._lock:
            survivors: List[TraceSession] = []
            for _ in range(min(keep, len(self._spares))):
                survivors.append(self._spares.pop())  # clean: near miss, the survivors become the new spare list
            self._spares = survivors


REGISTRY = SessionRegistry()


@contextmanager
def tracing(name: str) -> Iterator[TraceSession]:
    session = REGISTRY.retain(name)  # clean: released in the finally clause
    try:
        yield session
    finally:
        REGISTRY.release(session)


@contextmanager
def quick_trace(name: str, enabled: bool = True) -> Iterator[Optional[TraceSession]]:
    session = REGISTRY.retain(name)  # leak: the disabled branch yields and returns without releasing
    if not enabled:
        yield None
        return
    try:
        yield session
    finally:
        REGISTRY.release(session)


def traced(name: str) -> Callable:
    def decorate(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def wrapper(*args, **kwargs):
            session = REGISTRY.retain(name)  # clean: near miss, released in finally although the return comes first
            start = time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                session.add(fn.__name__, start, time.perf_counter())
                REGISTRY.release(session)

        return wrapper

    return decorate


class ModuleProfiler:
    """Attaches forward hooks; each instrumented module holds a reference to the session."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._held: Dict[str, TraceSession] = {}
        self._starts: Dict[str, float] = {}
        self._handles: List[Any] = []
        self._memory: Optional[TraceSession] = None

    def attach(self, model: nn.Module) -> None:
        for path, module in model.named_modules():
            if path in self._held:
                continue
            self._held[path] = REGISTRY.retain(self.name)  # clean: near miss, the guard excludes an overwrite and detach releases all of them
            pre = module.register_forward_pre_hook(self._before(path))  # clean: its handle is removed in detach
            self._handles.append(pre)
            post = module.register_forward_hook(self._after(path))  # leak: the handle is not kept, so detach cannot remove the hook
            self._starts[path] = 0.0

    def _before(self, path: str) -> Callable:
        def hook(module, inputs):
            self._starts[path] = time.perf_counter()

        return hook

    def _after(self, path: str) -> Callable:
        def hook(module, inputs, output):
            held = self._held.get(path)
            if held is not None:
                held.add(path, self._starts[path], time.perf_counter())

        return hook

    def track_memory(self) -> None:
        if self._memory is None:
            self._memory = REGISTRY.retain(self.name + ".memory")  # leak: detach clears the field without releasing
        self._memory.add("alloc", 0.0, float(torch.cuda.memory_allocated()))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for session in self._held.values():
            REGISTRY.release(session)
        self._held.clear()
        self._memory = None


class StepTimer:
    def __init__(self, registry: SessionRegistry) -> None:
        self.registry = registry
        self.session: Optional[TraceSession] = None
        self._t0 = 0.0

    def start(self, name: str) -> None:
        if self.session is not None:
            self.registry.release(self.session)
        self.session = self.registry.retain(name)  # clean: near miss, the former session is released before the overwrite
        self._t0 = time.perf_counter()

    def stop(self) -> float:
        elapsed = time.perf_counter() - self._t0
        if self.session is not None:
            self.session.add("step", self._t0, self._t0 + elapsed)
            self.registry.release(self.session)
            self.session = None
        return elapsed


def compare(fns: Dict[str, Callable[[], None]], budget: float) -> Dict[str, float]:
    results: Dict[str, float] = {}
    for label, fn in fns.items():
        session = REGISTRY.retain("compare." + label)  # leak: a run over budget breaks out with the session retained
        start = time.perf_counter()
        fn()
        elapsed = time.perf_counter() - start
        if elapsed > budget:
            break
        session.add(label, start, start + elapsed)
        results[label] = elapsed
        REGISTRY.release(session)
    return results


def summarise(name: str) -> float:
    with tracing(name) as session:  # clean: the with block releases it
        if not session.events:
            return 0.0
        return sum(e["dur"] for e in session.events)
