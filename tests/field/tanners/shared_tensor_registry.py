"""Counted references to shared-memory tensors, between the trainer and the eval workers."""
from __future__ import annotations

import threading
from typing import Any, Dict, List, Optional, Tuple


class Segment:
    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.refs = 1
        self.version = 0
        self.payload: Any = None

    def retain(self) -> "Segment":
        self.refs += 1
        return self

    def drop_ref(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self.payload = None


class Registry:
    """Name to segment; the registry has one reference to each of its segments."""

    def __init__(self) -> None:
        self._mu = threading.RLock()
        self._segs: Dict[str, Segment] = {}

    def create(self, name: str, nbytes: int) -> None:
        with self._mu:
            if name not in self._segs:
                self._segs[name] = Segment(name, nbytes)

    def attach(self, name: str) -> Optional[Segment]:
        with self._mu:
            seg = self._segs.get(name)
            return seg.retain() if seg is not None else None  # clean: the caller's reference

    def attach_version(self, name: str, at_least: int) -> Optional[Segment]:
        seg = self.attach(name)  # leak: too old a version returns None with the reference counted
        if seg is None or seg.version < at_least:
            return None
        return seg

    def attach_newest(self, names: List[str]) -> Optional[Segment]:
        best: Optional[Segment] = None
        for n in names:
            seg = self.attach(n)  # clean: near miss, the loser of each comparison is dropped
            if seg is None:
                continue
            if best is None:
                best = seg
            elif seg.version > best.version:
                best.drop_ref()
                best = seg
            else:
                seg.drop_ref()
        return best

    def attach_largest(self, names: List[str]) -> Optional[Segment]:
        best: Optional[Segment] = None
        for n in names:
            seg = self.attach(n)  # leak: a former best is rebound, a smaller one forgotten
            if seg is not None and (best is None or seg.nbytes > best.nbytes):
                best = seg
        return best

    def unlink(self, name: str) -> None:
        with self._mu:
            seg = self._segs.pop(name, None)
        if seg is not None:
            seg.drop_ref()

    def publish(self, name: str, payload: Any) -> bool:
        self._mu.acquire()  # leak: an unknown name returns with the lock taken
        seg = self._segs.get(name)
        if seg is None:
            return False
        seg.payload = payload
        seg.version += 1
        self._mu.release()
        return True

    def names(self) -> List[str]:
        self._mu.acquire()  # clean: released on the one way out
        out = sorted(self._segs)
        self._mu.release()
        return out


class View:
    """Object that owns one reference until close."""

    def __init__(self, seg: Segment) -> None:
        self._seg: Optional[Segment] = seg

    @property
    def payload(self) -> Any:
        return self._seg.payload if self._seg is not None else None

    def share(self) -> Optional["View"]:
        if self._seg is None:
            return None
        return View(self._seg.retain())  # clean: near miss, the new view owns the reference

    def close(self) -> None:
        if self._seg is not None:
            self._seg.drop_ref()
            self._seg = None

    def __enter__(self) -> "View":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


class EvalWorker:
    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._views: Dict[str, View] = {}
        self._pending: List[Tuple[str, Segment]] = []

    def open(self, name: str) -> Optional[View]:
        view = self._views.get(name)
        if view is not None:
            return view
        seg = self.registry.attach(name)  # clean: in a view, kept in the table until close
        if seg is None:
            return None
        view = View(seg)
        self._views[name] = view
        return view

    def close(self, name: str) -> None:
        view = self._views.pop(name, None)
        if view is not None:
            view.close()

    def peek(self, name: str) -> Any:
        seg = self.registry.attach(name)  # clean: the with closes the view that took it over
        if seg is None:
            return None
        with View(seg) as v:
            return v.payload

    def version(self, name: str) -> int:
        seg = self.registry.attach(name)  # leak: only the number is kept
        return seg.version if seg is not None else -1

    def schedule(self, names: List[str]) -> None:
        for n in names:
            seg = self.registry.attach_version(n, 1)  # leak: run_pending takes it out and skips those without payload
            if seg is not None:
                self._pending.append((n, seg))

    def run_pending(self) -> List[Any]:
        out = []
        while self._pending:
            _, seg = self._pending.pop()
            if seg.payload is None:
                continue
            out.append(seg.payload)
            seg.drop_ref()
        return out

    def compare(self, a: str, b: str) -> Optional[bool]:
        left = self.registry.attach(a)  # clean: near miss, both branches drop what is not None
        right = self.registry.attach(b)  # clean: near miss, same
        same = None
        if left is not None and right is not None:
            same = left.payload == right.payload
        if left is not None:
            left.drop_ref()
        if right is not None:
            right.drop_ref()
        return same

    def largest(self, names: List[str]) -> int:
        seg = self.registry.attach_largest(names)  # clean: dropped after reading
        if seg is None:
            return 0
        n = seg.nbytes
        seg.drop_ref()
        return n

    def newest_payload(self, names: List[str]) -> Any:
        seg = self.registry.attach_newest(names)  # clean: finally
        try:
            return seg.payload if seg is not None else None
        finally:
            if seg is not None:
                seg.drop_ref()
