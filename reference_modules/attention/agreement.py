"""Before anything is exchanged: all ranks hold equal shapes and settings, or all of them raise."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from reference_modules.attention.exchange import Peers


def agree(peers: Peers, q: Tensor, settings: str, check: Callable[[], None]) -> None:
    """ValueError on every rank where one rank's own check fails or its shape, type or settings differ.

    A rank that raised alone would leave the others waiting for its keys until the timeout.
    """
    own_fault: ValueError | None = None
    try:
        check()
    except ValueError as error:
        own_fault = error
    shape = [q.dim(), *list(q.shape)[:4], *[0] * (4 - q.dim())]
    described = zlib.crc32(f"{q.dtype} {settings}".encode())
    mine = torch.tensor([int(own_fault is None), *shape, described], dtype=torch.int64, device=q.device)
    everyone = [x.tolist() for x in peers.gather(mine, "comparing shapes")]
    if own_fault is not None:
        raise own_fault
    refused = [rank for rank, (accepted, *_) in enumerate(everyone) if not accepted]
    if refused:
        raise ValueError(f"rank {refused[0]} refused its input, so no rank can go on: see the error there")
    for rank, (_, *found) in enumerate(everyone):
        if found[:5] != shape:
            theirs = tuple(found[1 : min(found[0], 4) + 1])
            raise ValueError(
                f"rank {rank} holds q of shape {theirs} and rank {peers.rank} {tuple(q.shape)}; "
                "all parts must be equal: pad the sequence to a multiple of the number of ranks"
            )
        if found[5] != described:
            raise ValueError(
                f"rank {rank} runs with another dtype or other settings than rank {peers.rank}, "
                f"which has {q.dtype}, {settings}: build and call the module alike on all ranks"
            )
