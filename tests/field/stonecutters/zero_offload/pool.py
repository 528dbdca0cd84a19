"""Pinned blocks and transfer permits shared by the swapper and the engine."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional

import torch


class Block:
    __slots__ = ("index", "span", "data")

    def __init__(self, index: int, span: int, data: torch.Tensor):
        self.index = index
        self.span = span
        self.data = data


class BlockArena:
    """Contiguous runs of fixed-size pinned blocks, first fit over a byte map."""

    def __init__(self, count: int, block_elems: int):
        self.block_elems = block_elems
        self._taken = bytearray(count)
        self._base = torch.empty(count * block_elems, dtype=torch.float32)
        self._mu = threading.Lock()

    def allot(self, numel: int) -> Optional[Block]:
        span = -(-numel // self.block_elems)
        with self._mu:
            at = self._taken.find(b"\0" * span)
            if at < 0:
                return None
            self._taken[at : at + span] = b"\1" * span
        lo = at * self.block_elems
        return Block(at, span, self._base[lo : lo + span * self.block_elems])

    def regain(self, block: Block) -> None:
        with self._mu:
            self._taken[block.index : block.index + block.span] = b"\0" * block.span

    def allot_aligned(self, numel: int, align: int) -> Optional[Block]:
        block = self.allot(numel)  # leak: a misaligned block is refused without regain()
        if block is None:
            return None
        if block.index % align:
            return None
        return block


class TransferPermits:
    """At most so many copies in each direction."""

    def __init__(self, to_host: int, to_device: int):
        self._left: Dict[str, int] = {"h": to_host, "d": to_device}
        self._cv = threading.Condition()

    def enter(self, way: str) -> str:
        with self._cv:
            self._cv.wait_for(lambda: self._left[way] > 0)
            self._left[way] -= 1
        return way

    def leave(self, way: str) -> None:
        with self._cv:
            self._left[way] += 1
            self._cv.notify_all()


def regain_all(arena: BlockArena, blocks: List[Optional[Block]]) -> None:
    for block in blocks:
        if block is not None:
            arena.regain(block)
