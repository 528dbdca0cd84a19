"""Workspace manager for the attention backends."""
from __future__ import annotations

import threading
from typing import Optional

import torch


class WorkspaceManager:
    """Equal sized workspaces; at most `limit` may be out."""

    def __init__(self, nbytes: int, limit: int) -> None:
        self.nbytes = nbytes
        self.limit = limit
        self.out = 0
        self._cached: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def reserve_workspace(self) -> Optional[torch.Tensor]:
        with self._lock:  # clean: with statement
            if self.out >= self.limit:
                return None
            self.out += 1
            if self._cached:
                return self._cached.pop()  # clean: goes to the caller
        return torch.empty(self.nbytes, dtype=torch.uint8)

    def restore_workspace(self, ws: torch.Tensor) -> None:
        with self._lock:  # clean: with statement
            self.out -= 1
            self._cached.append(ws)

    def trim(self) -> None:
        with self._lock:  # clean: with statement
            self._cached.clear()
