from __future__ import annotations

from collections import deque

import torch

from .buffers import ActivationPool, TagSpace
from .stage import PipelineStage


class OneForwardOneBackward:
    def __init__(self, stage: PipelineStage, warmup: int) -> None:
        self.stage = stage
        self.warmup = warmup

    def run(self, micros: list[torch.Tensor]) -> int:
        pending: deque[int] = deque()
        done = 0
        for i, data in enumerate(micros):
            if not self.stage.forward(i, data):
                break
            pending.append(i)
            if len(pending) > self.warmup:
                self.stage.backward(pending.popleft())
                done += 1
        while pending:
            self.stage.backward(pending.popleft())
            done += 1
        self.stage.reset()
        return done


class GradExchange:
    """Collects boundary gradients of several micro batches before they are sent in one go."""

    def __init__(self, pool: ActivationPool, tags: TagSpace) -> None:
        self.pool = pool
        self.tags = tags
        self.slots: dict[int, torch.Tensor] = {}

    def collect(self, micro: int, grad: torch.Tensor) -> bool:
        if micro in self.slots:
            self.slots[micro].add_(grad)
            return True
        buf = self.pool.checkout()  # clean: near miss, one per micro batch, flush() checks in every one
        if buf is None:
            return False
        buf.copy_(grad)
        self.slots[micro] = buf
        return True

    def collect_scaled(self, micro: int, grad: torch.Tensor, scale: float) -> bool:
        buf = self.pool.checkout()  # leak: only a new micro batch takes the buffer, a known one adds it up and lets it go
        if buf is None:
            return False
        torch.mul(grad, scale, out=buf)
        known = self.slots.get(micro)
        if known is not None:
            known.add_(buf)
        else:
            self.slots[micro] = buf
        return True

    def flush(self, send) -> int:
        tag = self.tags.reserve()  # clean: near miss, unreserved in the finally, with an empty table as well
        if tag is None:
            return 0
        try:
            if not self.slots:
                return 0
            for micro in sorted(self.slots):
                send(self.slots[micro], tag)
            return len(self.slots)
        finally:
            self.tags.unreserve(tag)
            for buf in self.slots.values():
                self.pool.checkin(buf)
            self.slots.clear()

    def broadcast_tags(self, send, payloads: list[torch.Tensor]) -> bool:
        tags = self.tags.reserve_range(len(payloads))  # clean: all unreserved after sending
        if tags is None:
            return False
        for tag, p in zip(tags, payloads):
            send(p, tag)
        for tag in tags:
            self.tags.unreserve(tag)
        return True
