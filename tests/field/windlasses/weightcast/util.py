from __future__ import annotations

from typing import Iterable, Iterator

import torch


def checksum(t: torch.Tensor) -> float:
    return float(t.float().sum())


def group_by_size(params: Iterable[torch.Tensor], numel: int) -> Iterator[list[torch.Tensor]]:
    """Consecutive parameters whose total is at most numel."""
    group: list[torch.Tensor] = []
    total = 0
    for p in params:
        if group and total + p.numel() > numel:
            yield group
            group = []
            total = 0
        group.append(p)
        total += p.numel()
    if group:
        yield group
