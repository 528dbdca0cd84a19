"""Which tokens of the whole sequence a rank holds.

contiguous   rank i of p holds the i-th of p equal parts. zigzag       rank i holds parts i and 2p−1−i of
2p, one after the other: under causal attention every rank then has
             the same amount to do, where contiguous gives the last rank nearly twice the mean.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from reference_modules.attention.checks import check_choice
from reference_modules.attention.geometry import Chunk

Placement = Literal["contiguous", "zigzag"]


def check_placement(placement: str) -> None:
    """One of the two."""
    check_choice("placement", placement, get_args(Placement))


def chunks_of(rank: int, ranks: int, tokens: int, placement: Placement) -> tuple[Chunk, ...]:
    """The chunks of `tokens` local tokens, in the order in which the rank holds them."""
    if placement == "contiguous":
        return (Chunk(rank * tokens, tokens),)
    half = tokens // 2
    return (Chunk(rank * half, half), Chunk((2 * ranks - 1 - rank) * half, half))


def check_tokens(tokens: int, placement: Placement) -> None:
    """Zigzag needs two equal halves."""
    if placement == "zigzag" and tokens % 2:
        raise ValueError(
            f"this rank holds {tokens} tokens; zigzag needs an even number, two equal halves: "
            "pad the sequence to a multiple of 2 · ranks, or use placement='contiguous'"
        )


def shard(x: Tensor, rank: int, ranks: int, placement: Placement = "contiguous", dim: int = 1) -> Tensor:
    """This rank's part of a whole sequence."""
    check_placement(placement)
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank}; it must be within 0 and {ranks - 1} where there are {ranks} ranks")
    pieces = ranks if placement == "contiguous" else 2 * ranks
    if x.shape[dim] % pieces:
        raise ValueError(
            f"{x.shape[dim]} tokens do not split into {pieces} equal parts ({placement}, {ranks} ranks): "
            f"pad to {-(-x.shape[dim] // pieces) * pieces}"
        )
    tokens = x.shape[dim] // ranks
    chunks = chunks_of(rank, ranks, tokens, placement)
    return torch.cat([x.narrow(dim, chunk.start, chunk.length) for chunk in chunks], dim)


def unshard(parts: list[Tensor], placement: Placement = "contiguous", dim: int = 1) -> Tensor:
    """The whole sequence from every rank's part, in rank order."""
    check_placement(placement)
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) != 1:
        raise ValueError(
            f"{len(parts)} parts have the shapes {sorted(shapes)}; there must be one for each rank, "
            "all alike: gather them from all ranks first"
        )
    check_tokens(parts[0].shape[dim], placement)
    found: list[tuple[int, Tensor]] = []
    for rank, part in enumerate(parts):
        at = 0
        for chunk in chunks_of(rank, len(parts), part.shape[dim], placement):
            found.append((chunk.start, part.narrow(dim, at, chunk.length)))
            at += chunk.length
    return torch.cat([piece for _, piece in sorted(found, key=lambda pair: pair[0])], dim)
