from __future__ import annotations

import logging

import torch

from .arena import ArenaSet, Region
from .graphs import GraphSet
from .sessions import SessionStore

log = logging.getLogger(__name__)


class RankServer:
    def __init__(self, arenas: ArenaSet, sessions: SessionStore, graphs: GraphSet) -> None:
        self.arenas = arenas
        self.sessions = sessions
        self.graphs = graphs
        self.shadow: dict[str, Region] = {}

    def _staged(self, items: torch.Tensor) -> Region:
        r = self.arenas.place(items.shape[0])  # clean: returned to callers that lift it
        if r is None:
            raise MemoryError(items.shape[0])
        r.tensor.copy_(items)
        return r

    def rank(self, sid: str, items: torch.Tensor) -> torch.Tensor | None:
        s = self.sessions.open(sid)  # clean: stays with the store
        if s is None:
            return None
        r = self._staged(items)  # clean: near miss, lifted on both branches
        out = self.graphs.replay(r.tensor)
        if out is None:
            out = self.graphs.fn(r.tensor).clone()
            self.arenas.lift(r)
            return out.argsort(descending=True)
        self.arenas.lift(r)
        return out.argsort(descending=True)

    def quick_scores(self, items: torch.Tensor) -> torch.Tensor:
        return self.graphs.fn(self._staged(items).tensor).sum(1)  # leak: the staged region is dropped after use

    def blend(self, items: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
        with self.arenas.scratch(items.shape[0]) as buf:  # clean: with block
            torch.mul(items, prior[:, None], out=buf)
            return self.graphs.fn(buf).clone()

    def shadow_pair(self, sid: str, rows: int) -> bool:
        pair = self.arenas.place_mirrored(rows)  # leak: the second region is dropped when the first is kept as shadow
        if pair is None:
            return False
        main, spare = pair
        spare.tensor.zero_()
        old = self.shadow.pop(sid, None)
        if old is not None:
            self.arenas.lift(old)
        self.shadow[sid] = main
        return True

    def adopt(self, sid: str, items: torch.Tensor) -> None:
        old = self.shadow.pop(sid, None)
        if old is not None:
            self.arenas.lift(old)
        self.shadow[sid] = self._staged(items)  # clean: the old one is lifted first, stop() lifts the rest

    def stop(self) -> None:
        for r in self.shadow.values():
            self.arenas.lift(r)
        self.shadow.clear()
        for sid in list(self.sessions.live):
            self.sessions.close(sid)
        self.graphs.reset()
