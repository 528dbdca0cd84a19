"""Copies between the tiers on a thread of its own."""
from __future__ import annotations

import collections
import logging
import threading
from dataclasses import dataclass
from typing import Callable, Deque, Optional

import torch

log = logging.getLogger(__name__)


@dataclass
class Move:
    src: torch.Tensor
    dst: torch.Tensor
    done: Callable[[bool], None]
    tag: str = ""


class Mover(threading.Thread):
    """Every move that enqueue() accepts is answered by its done(), with True or, after a failed copy, with False."""

    def __init__(self, limit: int = 256) -> None:
        super().__init__(name="kv-mover", daemon=True)
        self.limit = limit
        self.moves: Deque[Move] = collections.deque()
        self.cond = threading.Condition()
        self.running = True
        self.stream = torch.cuda.Stream()

    def enqueue(self, move: Move) -> bool:
        with self.cond:
            if not self.running or len(self.moves) >= self.limit:
                return False
            self.moves.append(move)
            self.cond.notify()
            return True

    def _next(self) -> Optional[Move]:
        with self.cond:
            while self.running and not self.moves:
                self.cond.wait()
            return self.moves.popleft() if self.moves else None

    def run(self) -> None:
        while True:
            move = self._next()
            if move is None:
                return
            try:
                with torch.cuda.stream(self.stream):
                    move.dst.copy_(move.src, non_blocking=True)
                self.stream.synchronize()
            except RuntimeError as exc:
                log.error("move %s: %s", move.tag, exc)
                move.done(False)
                continue
            move.done(True)

    def stop(self) -> None:
        """The moves that wait are still made."""
        with self.cond:
            self.running = False
            self.cond.notify_all()
        self.join()
