"""Generation counted handles for the request objects of an inference server."""
from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple


class Handle(NamedTuple):
    index: int
    generation: int


@dataclass
class _Cell:
    generation: int = 0
    value: Any = None
    used: bool = False


class HandleMap:
    """Fixed number of cells. A retired handle is stale: its cell carries a higher generation."""

    def __init__(self, cells: int) -> None:
        self._cells = [_Cell() for _ in range(cells)]
        self._open = list(range(cells - 1, -1, -1))

    def install(self, value: Any) -> Handle | None:
        if not self._open:
            return None
        index = self._open.pop()
        cell = self._cells[index]
        cell.value, cell.used = value, True
        return Handle(index, cell.generation)

    def resolve(self, handle: Handle) -> Any:
        cell = self._cells[handle.index]
        if not cell.used or cell.generation != handle.generation:
            return None
        return cell.value

    def retire(self, handle: Handle) -> bool:
        cell = self._cells[handle.index]
        if not cell.used or cell.generation != handle.generation:
            return False
        cell.generation += 1
        cell.value, cell.used = None, False
        self._open.append(handle.index)
        return True


@dataclass
class Request:
    id: str
    prompt: list[int]
    deadline: float


class Sessions:
    def __init__(self, handles: HandleMap) -> None:
        self.handles = handles
        self.by_id: dict[str, Handle] = {}
        self.draft: dict[str, Handle] = {}

    def register(self, request: Request) -> Handle | None:
        old = self.by_id.pop(request.id, None)
        if old is not None:
            self.handles.retire(old)
        handle = self.handles.install(request)  # clean: near miss, in by_id, the one before is retired
        if handle is not None:
            self.by_id[request.id] = handle
        return handle

    def attach_draft(self, request: Request) -> bool:
        """Called anew whenever the speculator starts over on a request."""
        handle = self.handles.install(request)  # leak: a draft of the same id is overwritten, not retired
        if handle is None:
            return False
        self.draft[request.id] = handle
        return True

    def finish(self, request_id: str) -> bool:
        draft = self.draft.pop(request_id, None)
        if draft is not None:
            self.handles.retire(draft)
        handle = self.by_id.pop(request_id, None)
        return handle is not None and self.handles.retire(handle)

    def expire(self, now: float) -> int:
        gone = 0
        for request_id, handle in list(self.by_id.items()):
            request = self.handles.resolve(handle)
            if request is None or request.deadline < now:
                del self.by_id[request_id]
                self.handles.retire(handle)
                gone += 1
        return gone


class OneShot:
    def __init__(self, handles: HandleMap, engine) -> None:
        self.handles = handles
        self.engine = engine

    def run(self, request: Request) -> list[int]:
        handle = self.handles.install(request)  # clean: retired in finally
        if handle is None:
            return []
        try:
            return self.engine.run(handle)
        finally:
            self.handles.retire(handle)

    def run_until(self, request: Request) -> list[int] | None:
        handle = self.handles.install(request)  # leak: at the deadline it returns with the handle live
        if handle is None:
            return None
        out: list[int] = []
        while (token := self.engine.step(handle)) is not None:
            if time.monotonic() > request.deadline:
                return out
            out.append(token)
        self.handles.retire(handle)
        return out

    def run_before(self, request: Request) -> list[int] | None:
        handle = self.handles.install(request)  # clean: near miss, the deadline only breaks the loop
        if handle is None:
            return None
        out: list[int] = []
        while (token := self.engine.step(handle)) is not None:
            if time.monotonic() > request.deadline:
                break
            out.append(token)
        self.handles.retire(handle)
        return out

    def compare(self, request: Request) -> float:
        a = self.handles.install(request)  # leak: not retired when b could not be installed
        if a is None:
            return 0.0
        b = self.handles.install(request)  # clean: retired when it was installed
        if b is None:
            return 0.0
        distance = self.engine.distance(a, b)
        self.handles.retire(a)
        self.handles.retire(b)
        return distance

    def contrast(self, request: Request) -> float:
        pair = [self.handles.install(request) for _ in range(2)]  # clean: near miss, each not None is retired
        value = self.engine.distance(*pair) if None not in pair else 0.0
        for handle in pair:
            if handle is not None:
                self.handles.retire(handle)
        return value
