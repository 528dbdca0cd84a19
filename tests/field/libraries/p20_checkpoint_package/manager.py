"""Checkpoint manager: stages a state dict into segments and submits it."""
from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from .segments import Segment, SegmentPool
from .writer import AsyncWriter, WriteRequest


class CheckpointManager:
    def __init__(self, root: Path, pool: SegmentPool, writer: AsyncWriter) -> None:
        self.root = root
        self.pool = pool
        self.writer = writer
        self._best: Optional[WriteRequest] = None
        self._open: Dict[str, WriteRequest] = {}

    def _stage(self, request: WriteRequest, tensors: Dict[str, Tensor]) -> bool:
        current: Optional[Segment] = None
        for t in tensors.values():
            need = t.numel() * t.element_size()
            if current is None or current.room() < need:
                current = self.pool.attach(timeout=30.0)  # clean: near miss, the one it replaces is already in the request and the caller submits or cancels that
                if current is None:
                    return False
                request.segments.append(current)
            current.store(t)
        return True

    def _stage_tail(self, tensors: Dict[str, Tensor]) -> Optional[Segment]:
        segment = self.pool.attach(timeout=5.0)  # leak: tensors that do not fit return None with the segment attached
        if segment is None:
            return None
        for t in tensors.values():
            if segment.room() < t.numel() * t.element_size():
                return None
            segment.store(t)
        return segment

    def save(self, step: int, model: nn.Module) -> bool:
        request = WriteRequest(self.root / f"step-{step}.bin")
        if not self._stage(request, model.state_dict()):
            self.writer.cancel(request)
            return False
        self.writer.submit(request)
        return True

    def save_extra(self, step: int, extra: Dict[str, Tensor]) -> bool:
        segment = self._stage_tail(extra)  # clean: moved into the request, whose segments the writer detaches
        if segment is None:
            return False
        self.writer.submit(WriteRequest(self.root / f"extra-{step}.bin", [segment]))
        return True

    def save_if_changed(self, step: int, extra: Dict[str, Tensor], last: int) -> int:
        segment = self._stage_tail(extra)  # leak: an unchanged digest returns before the request is submitted
        if segment is None:
            return last
        digest = int(segment.storage[: segment.used].long().sum())
        if digest == last:
            return last
        self.writer.submit(WriteRequest(self.root / f"extra-{step}.bin", [segment]))
        return digest

    def keep_best(self, model: nn.Module) -> None:
        if self._best is not None:
            self.writer.cancel(self._best)
        self._best = WriteRequest(self.root / "best.bin")
        segment = self.pool.attach()  # clean: near miss, held by the best request, which is cancelled when replaced and on close
        self._best.segments.append(segment)
        for t in list(model.state_dict().values())[:1]:
            segment.store(t)

    def begin(self, name: str) -> None:
        request = WriteRequest(self.root / name)
        request.segments.append(self.pool.attach())  # leak: begin under a name that is open replaces the former request in the table
        self._open[name] = request

    def put(self, name: str, t: Tensor) -> None:
        self._open[name].segments[-1].store(t)

    def commit(self, name: str) -> None:
        request = self._open.pop(name, None)
        if request is not None:
            self.writer.submit(request)

    def size_of(self, model: nn.Module) -> int:
        total = 0
        with self.pool.attached() as segment:  # clean: the with block detaches it
            for t in model.state_dict().values():
                segment.used = 0
                segment.store(t)
                total += segment.used
        return total

    def close(self) -> None:
        for request in self._open.values():
            self.writer.cancel(request)
        self._open.clear()
        if self._best is not None:
            self.writer.cancel(self._best)
            self._best = None
