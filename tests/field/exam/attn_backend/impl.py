"""Concrete backends."""
from __future__ import annotations

import math

import torch

from attn_backend.base import AttentionBackend, AttnMetadata, WorkspaceMixin


class NaiveBackend(AttentionBackend):
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttnMetadata) -> torch.Tensor:
        s = q.shape[-2]
        got = self._float_view(s * s)  # clean: None is tested, restored before the return
        if got is None:
            return torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        ws, scores = got
        scores = scores.view(s, s)
        torch.matmul(q, k.transpose(-1, -2), out=scores)
        out = torch.softmax(scores / math.sqrt(q.shape[-1]), -1) @ v
        self.manager.restore_workspace(ws)
        return out

    def lse(self, q: torch.Tensor, k: torch.Tensor, meta: AttnMetadata) -> torch.Tensor | None:
        s = q.shape[-2]
        got = self._float_view(s * s)  # leak: empty metadata returns None with the workspace
        if got is None or meta.empty:
            return None
        ws, scores = got
        torch.matmul(q, k.transpose(-1, -2), out=scores.view(s, s))
        out = scores.view(s, s).logsumexp(-1)
        self.manager.restore_workspace(ws)
        return out

    def peak(self, q: torch.Tensor, k: torch.Tensor) -> float:
        s = q.shape[-2]
        got = self._float_view(s * s)  # leak: the workspace half of the tuple is dropped
        if got is None:
            return 0.0
        scores = got[1].view(s, s)
        torch.matmul(q, k.transpose(-1, -2), out=scores)
        return scores.max().item()


class PagedBackend(WorkspaceMixin, AttentionBackend):
    """Keeps its workspace over the steps; close() gives it up."""

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttnMetadata) -> torch.Tensor:
        ws = self.workspace()  # clean: near miss, belongs to the object, close() restores it
        if meta.empty:
            return torch.zeros_like(q)
        ws[:1].zero_()
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    def close(self) -> None:
        self.drop_workspace()
        super().close()


class SplitBackend(AttentionBackend):
    def __init__(self, manager, splits: int = 2) -> None:
        super().__init__(manager)
        self.splits = splits
        self.parts: list[torch.Tensor] = []

    def prepare(self) -> bool:
        for _ in range(self.splits - len(self.parts)):
            ws = self.manager.reserve_workspace()  # leak: close() restores only the last part
            if ws is None:
                return False
            self.parts.append(ws)
        return True

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttnMetadata) -> torch.Tensor:
        outs = []
        for qs in q.chunk(self.splits, dim=-2):
            ws = self.manager.reserve_workspace()  # clean: near miss, restored on either branch
            if ws is None:
                outs.append(torch.softmax(qs @ k.transpose(-1, -2), -1) @ v)
            elif meta.empty:
                self.manager.restore_workspace(ws)
                outs.append(torch.zeros_like(qs))
            else:
                outs.append(torch.softmax(qs @ k.transpose(-1, -2), -1) @ v)
                self.manager.restore_workspace(ws)
        return torch.cat(outs, dim=-2)

    def close(self) -> None:
        if self.parts:
            self.manager.restore_workspace(self.parts.pop())
        self.parts = []
