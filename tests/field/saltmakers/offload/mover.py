"""Copies between host and device on a few side streams."""
from __future__ import annotations

import contextlib
from typing import Iterator, Optional

import torch

from .arena import Block, PinnedArena


class StreamPool:
    def __init__(self, n: int):
        self.streams = [torch.cuda.Stream() for _ in range(n)]
        self.turn = [0] * n

    def take_stream(self) -> Optional[int]:
        for i, busy in enumerate(self.turn):
            if not busy:
                self.turn[i] = 1
                return i
        return None

    def put_stream(self, i: int) -> None:
        self.streams[i].synchronize()
        self.turn[i] = 0

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[Optional[int]]:
        i = self.take_stream()  # clean: put back in finally when there is one
        try:
            yield i
        finally:
            if i is not None:
                self.put_stream(i)


class Mover:
    def __init__(self, arena: PinnedArena, streams: StreamPool):
        self.arena = arena
        self.streams = streams
        self.active: dict[int, tuple[Block, int]] = {}

    def to_host(self, t: torch.Tensor) -> Optional[Block]:
        """The caller owns the block."""
        with self.streams.on_stream() as s:  # clean: with statement
            if s is None:
                return self.arena.lease_like(t)  # clean: handed to the caller
            block = self.arena.lease_block(t.numel())  # clean: handed to the caller
            if block is None:
                return None
            with torch.cuda.stream(self.streams.streams[s]):
                block.data.copy_(t.view(-1), non_blocking=True)
            return block

    def begin_to_host(self, key: int, t: torch.Tensor) -> bool:
        block = self.arena.lease_block(t.numel())  # leak: no stream free returns with the block leased
        if block is None:
            return False
        s = self.streams.take_stream()  # clean: near miss, in self.active with the block until finish()
        if s is None:
            return False
        with torch.cuda.stream(self.streams.streams[s]):
            block.data.copy_(t.view(-1), non_blocking=True)
        self.active[key] = (block, s)
        return True

    def finish(self, key: int) -> Block:
        """Waits for the copy; the block is the caller's from here on."""
        block, s = self.active.pop(key)
        self.streams.put_stream(s)
        return block

    def to_device(self, block: Block, out: torch.Tensor, keep: bool = False) -> bool:
        s = self.streams.take_stream()  # leak: with keep the stream is not put back along with the block
        if s is None:
            return False
        with torch.cuda.stream(self.streams.streams[s]):
            out.view(-1).copy_(block.data, non_blocking=True)
        if not keep:
            self.streams.put_stream(s)
            self.arena.end_block(block)
        return True

    def checksum(self, t: torch.Tensor) -> float:
        return float(self.to_host(t).data.double().sum())  # leak: the host block is summed and dropped
