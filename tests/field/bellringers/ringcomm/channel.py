"""One neighbour's channel: a token and a tile travel with every chunk."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Deque, Dict, Optional

import torch
import torch.distributed as dist

from .tiles import TileCache
from .tokens import TokenRing


@dataclass
class Chunk:
    token: int
    tile: torch.Tensor
    work: Optional[dist.Work] = None
    owns_tile: bool = True


class Channel:
    def __init__(self, peer: int, tokens: TokenRing, tiles: TileCache) -> None:
        self.peer = peer
        self.tokens = tokens
        self.tiles = tiles
        self.posted: Deque[Chunk] = deque()

    def post(self, x: torch.Tensor) -> bool:
        token = self.tokens.draw_token()  # clean: near miss, moved into posted, flush() puts it back
        if token is None:
            return False
        t = self.tiles.pull_like(x)  # clean: moved into posted, flush() pushes it
        t.copy_(x)
        self.posted.append(Chunk(token, t, dist.isend(t, self.peer)))
        return True

    def post_view(self, x: torch.Tensor) -> bool:
        """Sends x itself if it is contiguous."""
        token = self.tokens.draw_token()  # clean: moved into posted, flush() puts it back
        if token is None:
            return False
        owns = not x.is_contiguous()
        t = self.tiles.pull_like(x).copy_(x) if owns else x  # clean: near miss, flush() pushes it by the owns_tile flag
        self.posted.append(Chunk(token, t, dist.isend(t, self.peer), owns_tile=owns))
        return True

    def flush(self) -> None:
        while self.posted:
            c = self.posted.popleft()
            c.work.wait()
            if c.owns_tile:
                self.tiles.push(c.tile)
            self.tokens.put_token(c.token)

    def receive(self, shape, dtype) -> torch.Tensor:
        """The caller pushes the tile."""
        t = self.tiles.pull(shape, dtype)  # clean: returned to the caller
        dist.recv(t, self.peer)
        return t

    def receive_into(self, out: torch.Tensor) -> None:
        out.copy_(self.receive(tuple(out.shape), out.dtype))  # leak: the received tile is copied and dropped

    def receive_add(self, out: torch.Tensor) -> None:
        t = self.receive(tuple(out.shape), out.dtype)  # clean: pushed after the addition
        out.add_(t)
        self.tiles.push(t)

    def ping(self, x: torch.Tensor) -> bool:
        token = self.tokens.draw_token()  # leak: not put back when the echo differs
        if token is None:
            return False
        dist.send(x, self.peer)
        echo = self.receive(tuple(x.shape), x.dtype)  # clean: pushed before the result is looked at
        same = torch.equal(echo, x)
        self.tiles.push(echo)
        if not same:
            return False
        self.tokens.put_token(token)
        return True


class ChannelSet:
    def __init__(self, tokens: TokenRing, tiles: TileCache) -> None:
        self.tokens = tokens
        self.tiles = tiles
        self.by_peer: Dict[int, Channel] = {}

    def to(self, peer: int) -> Channel:
        ch = self.by_peer.get(peer)
        if ch is None:
            ch = self.by_peer[peer] = Channel(peer, self.tokens, self.tiles)
        return ch

    def flush(self) -> None:
        for ch in self.by_peer.values():
            ch.flush()
