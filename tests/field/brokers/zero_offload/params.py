from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class ShardedParam:
    name: str
    shard: torch.Tensor
    world: int
    full: torch.Tensor | None = None
    holders: int = 0
    hooks: list[str] = field(default_factory=list)


class Coordinator:
    """A param stays gathered for as long as it has holders."""

    def fetch(self, p: ShardedParam) -> torch.Tensor:
        if p.full is None:
            p.full = p.shard.repeat(p.world)
        p.holders += 1
        return p.full

    def partition(self, p: ShardedParam) -> None:
        p.holders -= 1
        if p.holders == 0:
            p.full = None


class GatheredParams:
    def __init__(self, coord: Coordinator, params: list[ShardedParam], modifier_rank: int | None = None, rank: int = 0):
        self.coord = coord
        self.params = params
        self.modifier_rank = modifier_rank
        self.rank = rank

    def __enter__(self) -> "GatheredParams":
        for p in self.params:
            self.coord.fetch(p)  # leak: __exit__ returns early on every rank that is not the modifier
        return self

    def __exit__(self, *exc: object) -> None:
        if self.modifier_rank is not None and self.rank != self.modifier_rank:
            return
        for p in self.params:
            if self.modifier_rank is not None and p.full is not None:
                p.shard.copy_(p.full[: p.shard.numel()])
            self.coord.partition(p)


class ReadOnlyParams:
    def __init__(self, coord: Coordinator, params: list[ShardedParam]) -> None:
        self.coord = coord
        self.params = params
        self.held: list[ShardedParam] = []

    def __enter__(self) -> list[torch.Tensor]:
        out: list[torch.Tensor] = []
        for p in self.params:
            out.append(self.coord.fetch(p))  # clean: near miss, __exit__ partitions whatever is in held
            self.held.append(p)
        return out

    def __exit__(self, *exc: object) -> None:
        while self.held:
            self.coord.partition(self.held.pop())
