"""Transforms take a block and give a block.

Those that work in place return the block they got.  Those that cannot take a second
one from the pool and return the first.
"""
from __future__ import annotations

import torch

from .pool import Block, BlockPool


class Transform:
    def __call__(self, block: Block, pool: BlockPool) -> Block | None:
        raise NotImplementedError


class Log1p(Transform):
    def __call__(self, block: Block, pool: BlockPool) -> Block:
        block.data[: block.rows].clamp_(min=0).log1p_()
        return block


class Bucketize(Transform):
    def __init__(self, edges: list[float]) -> None:
        self.edges = torch.tensor(edges)

    def __call__(self, block: Block, pool: BlockPool) -> Block | None:
        out = pool.fetch_block()  # clean: near miss, returned, and the input goes back to the pool
        if out is None:
            pool.return_block(block)
            return None
        out.rows = block.rows
        out.data[: out.rows].copy_(torch.bucketize(block.data[: block.rows], self.edges))
        pool.return_block(block)
        return out


class Dedup(Transform):
    """Drops rows equal to the one above."""

    def __call__(self, block: Block, pool: BlockPool) -> Block | None:
        out = pool.fetch_block()  # leak: not returned when all rows are distinct and the input is passed on
        if out is None:
            return block
        live = block.data[: block.rows]
        keep = torch.ones(block.rows, dtype=torch.bool)
        keep[1:] = (live[1:] != live[:-1]).any(1)
        if keep.all():
            return block
        out.rows = int(keep.sum())
        out.data[: out.rows].copy_(live[keep])
        pool.return_block(block)
        return out


def column_stats(block: Block, pool: BlockPool) -> tuple[torch.Tensor, torch.Tensor] | None:
    tmp = pool.fetch_block()  # clean: returned in finally
    if tmp is None:
        return None
    try:
        tmp.data[: block.rows].copy_(block.data[: block.rows]).square_()
        return block.data[: block.rows].mean(0), tmp.data[: block.rows].mean(0)
    finally:
        pool.return_block(tmp)


def apply_all(block: Block, transforms: list[Transform], pool: BlockPool) -> Block | None:
    cur: Block | None = block
    for t in transforms:
        cur = t(cur, pool)  # clean: each transform disposes of what it got, the last result is returned
        if cur is None:
            return None
    return cur
