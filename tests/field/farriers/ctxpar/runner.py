import logging
from typing import Callable, List, Optional

import torch

from .streams import SideStreams, Timer
from .workspace import KVStash, Workspace

logger = logging.getLogger("ctxpar")


class CPRunner:
    def __init__(self, ws: Workspace, side: SideStreams, rank: int, world: int) -> None:
        self.ws = ws
        self.side = side
        self.stash = KVStash(ws)
        self.timer = Timer(side.events)
        self.rank = rank
        self.world = world

    def ulysses(self, qkv: torch.Tensor, a2a: Callable, attn: Callable) -> Optional[torch.Tensor]:
        at = self.ws.push(qkv.nbytes)  # clean: near miss, popped in the finally even without heads to work on
        if at < 0:
            return None
        try:
            scratch = self.ws.buf[at : at + qkv.nbytes].view(qkv.dtype).view(qkv.shape)
            a2a(scratch, qkv)
            if scratch.shape[1] == 0:
                return None
            return attn(scratch).clone()
        finally:
            self.ws.pop_to(at)

    def lse_reduce(self, lse: torch.Tensor, allreduce: Callable) -> torch.Tensor:
        at = self.ws.push(lse.nbytes)  # leak: a world of one returns with the mark still pushed
        if at < 0:
            return allreduce(lse.clone())
        tmp = self.ws.buf[at : at + lse.nbytes].view(lse.dtype).view(lse.shape)
        tmp.copy_(lse)
        if self.world == 1:
            return lse
        out = allreduce(tmp).clone()
        self.ws.pop_to(at)
        return out

    def overlap(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
        with self.side.side() as s:  # clean: near miss, the return leaves through the context manager
            if s is None:
                self.stash.save(layer, k, v)
                return
            self.stash.save(layer, k, v)
            k.record_stream(s)
            v.record_stream(s)

    def prefetch(self, layers: List[int], load: Callable[[int], bool]) -> int:
        s = self.side.fork()  # leak: a layer that is not resident returns from the middle without the join
        if s is None:
            return 0
        n = 0
        with torch.cuda.stream(s):
            for layer in layers:
                if not load(layer):
                    return n
                n += 1
        self.side.join(s)
        return n

    def prefetch_all(self, layers: List[int], load: Callable[[int], bool]) -> int:
        s = self.side.fork()  # clean: near miss, the break still arrives at the join
        if s is None:
            return 0
        n = 0
        with torch.cuda.stream(s):
            for layer in layers:
                if not load(layer):
                    break
                n += 1
        self.side.join(s)
        return n

    def timed_step(self, fn: Callable[[], None]) -> List[float]:
        with self.timer:
            fn()
        return self.timer.drain()

    def permute(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        tmp = self.ws.chunk(x.nbytes)  # leak: index_select makes a fresh tensor and the chunk is dropped on return
        y = tmp.view(x.dtype).view(x.shape)
        y.copy_(x)
        return y.index_select(0, index)

    def permute_(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        tmp = self.ws.chunk(x.nbytes)  # clean: near miss, an identity permutation gives it back before the early return
        y = tmp.view(x.dtype).view(x.shape)
        torch.index_select(x, 0, index, out=y)
        if torch.equal(x, y):
            logger.debug("identity permutation on rank %d", self.rank)
            self.ws.unchunk(tmp)
            return x
        x.copy_(y)
        self.ws.unchunk(tmp)
        return x
