from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from .workspace import WorkspaceManager


@dataclass
class AttnMetadata:
    seq_lens: list[int]
    causal: bool = True

    @property
    def empty(self) -> bool:
        return not self.seq_lens or max(self.seq_lens) == 0


class WorkspaceMixin:
    """Adds a lazily reserved workspace to a backend."""

    manager: WorkspaceManager
    _ws: torch.Tensor | None = None

    def workspace(self) -> torch.Tensor:
        if self._ws is None:
            ws = self.manager.reserve_workspace()  # clean: near miss, kept in the field, drop_workspace restores it
            if ws is None:
                raise RuntimeError("no workspace left")
            self._ws = ws
        return self._ws

    def drop_workspace(self) -> None:
        if self._ws is not None:
            self.manager.restore_workspace(self._ws)
            self._ws = None


class AttentionBackend(ABC):
    def __init__(self, manager: WorkspaceManager) -> None:
        self.manager = manager

    @abstractmethod
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttnMetadata) -> torch.Tensor:
        ...

    def _float_view(self, numel: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        ws = self.manager.reserve_workspace()  # clean: near miss, too small is restored, else it is the first item of the result
        if ws is None:
            return None
        if ws.numel() < 4 * numel:
            self.manager.restore_workspace(ws)
            return None
        return ws, ws[: 4 * numel].view(torch.float32)

    def close(self) -> None:
        pass
