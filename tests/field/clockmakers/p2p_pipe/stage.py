"""What a pipeline stage does with its channels."""
from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from .channel import Channel
from .wire import WirePool

log = logging.getLogger(__name__)


class StageLink:
    def __init__(self, pool: WirePool, up: Channel | None, down: Channel | None):
        self.pool = pool
        self.up = up
        self.down = down

    def fan_out(self, t: torch.Tensor, peers: list[int]) -> int:
        """Send one buffer to several peers; every send holds a reference."""
        buf = self.pool.pull_filled(t)  # clean: the own reference is dropped after the loop
        if buf is None:
            return 0
        works = []
        for p in peers:
            ref = self.pool.addref(buf)  # leak: the reference for a peer that is this rank is never dropped
            if p == dist.get_rank():
                continue
            works.append((dist.isend(ref.data[: t.numel()], p), ref))
        for work, ref in works:
            work.wait()
            self.pool.unref(ref)
        self.pool.unref(buf)
        return len(works)

    def echo(self, t: torch.Tensor) -> None:
        if self.down is None:
            return
        with self.down.tagged() as tag:  # clean: context manager
            dist.send(t, self.down.peer, tag=tag)
            dist.recv(t, self.down.peer, tag=tag)

    def next_activation(self, numel: int, retries: int) -> torch.Tensor | None:
        tag = None
        for _ in range(retries):
            tag = self.up.post_recv(numel)  # clean: near miss, only None is retried; complete() ends the request
            if tag is not None:
                break
        if tag is None:
            log.warning("no wire buffer after %d tries", retries)
            return None
        return self.up.complete(tag)

    def peek_header(self, t: torch.Tensor) -> float:
        buf = self.pool.pull_filled(t)  # leak: the return inside the branch skips the unref
        if buf is None:
            return 0.0
        head = buf.data[0].item()
        if head != head:
            return 0.0
        self.pool.unref(buf)
        return head
