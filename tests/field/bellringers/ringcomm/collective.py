"""All-reduce over the ring."""
from __future__ import annotations

from typing import List, Optional

import torch

from .channel import ChannelSet
from .tiles import TileCache, tile
from .tokens import TokenRing


class RingAllReduce:
    def __init__(self, rank: int, world: int, tokens: TokenRing, tiles: TileCache) -> None:
        self.rank, self.world = rank, world
        self.tokens = tokens
        self.tiles = tiles
        self.channels = ChannelSet(tokens, tiles)
        self.carry: Optional[torch.Tensor] = None

    def run(self, x: torch.Tensor) -> torch.Tensor:
        nxt, prv = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        parts = list(x.view(-1).chunk(self.world))
        for step in range(self.world - 1):
            self._send(nxt, parts[(self.rank - step) % self.world])
            self.channels.to(prv).receive_add(parts[(self.rank - step - 1) % self.world])
        for step in range(self.world - 1):
            self._send(nxt, parts[(self.rank - step + 1) % self.world])
            self.channels.to(prv).receive_into(parts[(self.rank - step) % self.world])
        self.channels.flush()
        return x

    def _send(self, peer: int, part: torch.Tensor) -> None:
        ch = self.channels.to(peer)
        while not ch.post(part):
            ch.flush()

    def compensate(self, x: torch.Tensor) -> torch.Tensor:
        """Adds what rounding lost at the step before."""
        fixed = x if self.carry is None else x + self.carry
        low = fixed.bfloat16().float()
        if self.carry is None:
            self.carry = self.tiles.pull_like(x)  # clean: near miss, pulled once, reset() pushes it
        torch.sub(fixed, low, out=self.carry)
        return low

    def reset(self) -> None:
        if self.carry is not None:
            self.tiles.push(self.carry)
            self.carry = None

    def absmax(self, x: torch.Tensor) -> float:
        with tile(self.tiles, tuple(x.shape), x.dtype) as t:  # clean: the with statement pushes it
            torch.abs(x, out=t)
            return float(t.max())

    def clipped(self, x: torch.Tensor, limit: float) -> torch.Tensor:
        t = self.tiles.pull_like(x)  # leak: not pushed when nothing has to be clipped
        torch.abs(x, out=t)
        over = t > limit
        if not over.any():
            return x
        out = torch.where(over, x.sign() * limit, x)
        self.tiles.push(t)
        return out

    def probe_depth(self, want: int) -> int:
        got = self.tokens.draw_many(want)  # leak: not put back when fewer than wanted are there
        if len(got) < want:
            return len(got)
        for t in got:
            self.tokens.put_token(t)
        return want

    def quiesce(self, count: int) -> bool:
        """True if no chunk was on the ring."""
        got = self.tokens.draw_many(count)  # clean: all are put back before the comparison
        for t in got:
            self.tokens.put_token(t)
        return len(got) == count

    def reduce_list(self, xs: List[torch.Tensor]) -> torch.Tensor:
        acc = None
        for x in xs:
            if acc is None:
                acc = self.tiles.pull_like(x)  # clean: pulled once and pushed after the loop
                acc.zero_()
            acc.add_(x)
        if acc is None:
            return torch.zeros(())
        out = self.run(acc).clone()
        self.tiles.push(acc)
        return out
