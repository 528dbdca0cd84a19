from __future__ import annotations

import shutil
from collections import deque
from pathlib import Path


class Workspace:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.dirty = False

    def write(self, name: str, text: str) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)
        self.dirty = True


class WorkspacePool:
    def __init__(self, base: Path, count: int) -> None:
        self._avail: deque[Workspace] = deque(Workspace(base / f"ws{i}") for i in range(count))

    def open_workspace(self) -> Workspace | None:
        return self._avail.popleft() if self._avail else None

    def close_workspace(self, ws: Workspace) -> None:
        if ws.dirty:
            shutil.rmtree(ws.root, ignore_errors=True)
            ws.dirty = False
        self._avail.append(ws)

    def open_clean(self) -> Workspace | None:
        for _ in range(len(self._avail)):
            ws = self._avail.popleft()  # leak: a workspace whose folder still exists is popped and not appended again
            if ws.root.exists():
                continue
            return ws
        return None


class Scope:
    """`with Scope(pool) as ws:`; ws is None when the pool is empty."""

    def __init__(self, pool: WorkspacePool) -> None:
        self._pool = pool
        self._ws: Workspace | None = None

    def __enter__(self) -> Workspace | None:
        self._ws = self._pool.open_workspace()  # clean: near miss, __exit__ closes it with or without an exception
        return self._ws

    def __exit__(self, *exc_info: object) -> None:
        if self._ws is None:
            return
        self._pool.close_workspace(self._ws)
        self._ws = None
