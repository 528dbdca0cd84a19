"""Kernel workspaces with owned and borrowed handles and completion callbacks."""
from __future__ import annotations

from concurrent.futures import Executor, Future
from functools import partial
from typing import Callable, List, Optional


class Workspace:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.storage = bytearray(nbytes)


class WorkspacePool:
    def __init__(self, sizes: List[int]) -> None:
        self.free: List[Workspace] = [Workspace(n) for n in sorted(sizes)]

    def take(self, nbytes: int) -> Optional[Workspace]:
        for i, ws in enumerate(self.free):
            if ws.nbytes >= nbytes:
                return self.free.pop(i)  # clean: pool body, returned to the caller
        return None

    def put_back(self, ws: Workspace) -> None:
        self.free.append(ws)
        self.free.sort(key=lambda w: w.nbytes)


class Handle:
    def __init__(self, pool: WorkspacePool, ws: Optional[Workspace], owned: bool) -> None:
        self.pool = pool
        self.ws = ws
        self.owned = owned

    def view(self) -> "Handle":
        return Handle(self.pool, self.ws, owned=False)

    def close(self) -> None:
        if self.owned and self.ws is not None:
            self.pool.put_back(self.ws)
        self.ws = None


def open_owned(pool: WorkspacePool, nbytes: int) -> Handle:
    ws = pool.take(nbytes)  # clean: near miss, goes to the caller in a handle whose close puts it back
    return Handle(pool, ws, owned=True)


def open_shared(pool: WorkspacePool, nbytes: int) -> Handle:
    ws = pool.take(nbytes)  # leak: the handle is made as not owning, its close only forgets the workspace
    return Handle(pool, ws, owned=False)


class GemmRunner:
    def __init__(self, pool: WorkspacePool, nbytes: int, ws: Optional[Workspace] = None) -> None:
        self.pool = pool
        self.owns = ws is None
        self.ws = pool.take(nbytes) if ws is None else ws  # clean: near miss, owns is true just when it was taken here

    def enlarge(self, nbytes: int) -> bool:
        bigger = self.pool.take(nbytes)  # clean: near miss, the old one is put back if owned before the new one replaces it
        if bigger is None:
            return False
        if self.owns and self.ws is not None:
            self.pool.put_back(self.ws)
        self.ws, self.owns = bigger, True
        return True

    def close(self) -> None:
        if self.owns and self.ws is not None:
            self.pool.put_back(self.ws)
        self.ws = None


class ConvRunner:
    def __init__(self, pool: WorkspacePool, nbytes: int, ws: Optional[Workspace] = None) -> None:
        self.pool = pool
        self.nbytes = nbytes
        self.borrowed = ws is not None
        self.ws = ws

    def prepare(self) -> bool:
        if self.ws is None:
            self.ws = self.pool.take(self.nbytes)  # leak: a runner whose borrowed workspace was detached takes one here, close skips it as borrowed
        return self.ws is not None

    def detach(self) -> Optional[Workspace]:
        if not self.borrowed:
            return None
        ws, self.ws = self.ws, None
        return ws

    def close(self) -> None:
        if self.borrowed:
            self.ws = None
            return
        if self.ws is not None:
            self.pool.put_back(self.ws)
            self.ws = None


class Launcher:
    def __init__(self, pool: WorkspacePool, executor: Executor) -> None:
        self.pool = pool
        self.executor = executor
        self.on_finish: List[Callable[[], None]] = []
        self.on_abort: List[Callable[[], None]] = []

    def plan(self, nbytes: int) -> bool:
        ws = self.pool.take(nbytes)  # clean: near miss, put back by the callback which finish runs
        if ws is None:
            return False
        self.on_finish.append(partial(self.pool.put_back, ws))
        return True

    def plan_speculative(self, nbytes: int) -> bool:
        ws = self.pool.take(nbytes)  # leak: its callback sits in on_abort, which finish clears without running
        if ws is None:
            return False
        self.on_abort.append(partial(self.pool.put_back, ws))
        return True

    def finish(self) -> None:
        for fn in self.on_finish:
            fn()
        self.on_finish.clear()
        self.on_abort.clear()

    def _exec(self, kernel: Callable[[Workspace], int], ws: Workspace, done: Callable[[Workspace], None]) -> int:
        code = kernel(ws)
        done(ws)
        return code

    def launch(self, kernel: Callable[[Workspace], int], nbytes: int) -> Optional[Future]:
        ws = self.pool.take(nbytes)  # clean: the task calls put_back as its done callback
        if ws is None:
            return None
        return self.executor.submit(self._exec, kernel, ws, self.pool.put_back)

    def scratch_total(self, kernel: Callable[[Workspace], int], sizes: List[int]) -> int:
        total = 0
        for n in sizes:
            handle = open_owned(self.pool, n)  # leak: the view is closed in place of the owning handle
            if handle.ws is None:
                continue
            view = handle.view()
            total += kernel(view.ws)
            view.close()
        return total

    def run_once(self, kernel: Callable[[Workspace], int], nbytes: int) -> int:
        handle = open_owned(self.pool, nbytes)  # clean: near miss, a handle without a workspace needs no close
        if handle.ws is None:
            return -1
        code = kernel(handle.view().ws)
        handle.close()
        return code
