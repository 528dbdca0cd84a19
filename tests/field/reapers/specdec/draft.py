"""The draft model runs in lanes; a lane is a row of its static KV cache."""
import logging
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional

from .tree import ArenaFull, NodeArena, TokenTree

log = logging.getLogger(__name__)


class NoLane(RuntimeError):
    pass


class LanePool:
    def __init__(self, rows: int) -> None:
        self._rows = list(range(rows))
        self.owner: Dict[int, str] = {}

    def acquire(self, owner: str) -> int:
        if not self._rows:
            raise NoLane(owner)
        lane = self._rows.pop()  # clean: handed to the caller
        self.owner[lane] = owner
        return lane

    def release(self, lane: int) -> None:
        del self.owner[lane]
        self._rows.append(lane)


@dataclass
class Draft:
    """A proposal on its way to verification; owns its lane, not the tree."""
    seq: "object"
    lane: int
    pool: LanePool
    path: List[int] = field(default_factory=list)

    def close(self) -> None:
        if self.lane >= 0:
            self.pool.release(self.lane)
            self.lane = -1


class DraftWorker:
    def __init__(self, model: Callable, lanes: LanePool, arena: NodeArena, width: int = 4) -> None:
        self.model, self.lanes, self.arena = model, lanes, arena
        self.width = width
        self._sticky: Dict[str, int] = {}

    def _rollout(self, tree: TokenTree, lane: int, depth: int) -> None:
        frontier = [tree.root]
        for _ in range(depth):
            scored = self.model(lane, [int(self.arena.token[n]) for n in frontier], self.width)
            frontier = tree.extend(dict(zip(frontier, scored)))

    def propose(self, seq) -> Optional[Draft]:
        lane = self.lanes.acquire(seq.sid)  # leak: a sequence that is nearly at its limit returns None with the lane taken
        depth = min(4, seq.limit - len(seq.tokens))
        if depth < 2:
            return None
        draft = Draft(seq, lane, self.lanes)
        try:
            self._rollout(seq.tree, lane, depth)
        except ArenaFull:
            log.debug("%s: tree was cut short", seq.sid)
        draft.path = seq.tree.best_path()
        return draft

    def propose_wide(self, seq) -> Optional[Draft]:
        """A second model pass with another prefix; its branches join the tree of the sequence."""
        lane = self.lanes.acquire(seq.sid)  # clean: near miss, released by the handler or by the draft that is returned
        side = None
        try:
            side = TokenTree(self.arena, seq.tokens[-1])  # leak: graft() takes the branches, the root node of the side tree is never freed
            self._rollout(side, lane, 2)
        except ArenaFull:
            if side is not None:
                side.close()
            self.lanes.release(lane)
            return None
        seq.tree.graft(side)
        return Draft(seq, lane, self.lanes, seq.tree.best_path())

    def sticky_lane(self, sid: str) -> int:
        lane = self._sticky.get(sid)
        if lane is None:
            lane = self._sticky[sid] = self.lanes.acquire(sid)  # clean: near miss, stays in the table until forget()
        return lane

    def forget(self, sid: str) -> None:
        lane = self._sticky.pop(sid, None)
        if lane is not None:
            self.lanes.release(lane)

    def warm_up(self, prompts: List[List[int]]) -> int:
        lanes: List[int] = []
        try:
            for i, prompt in enumerate(prompts):
                lanes.append(self.lanes.acquire(f"warm-{i}"))  # clean: near miss, the finally releases also after NoLane
                self.model(lanes[-1], prompt, 1)
        except NoLane:
            log.info("warm-up stopped after %d prompts", len(lanes))
        finally:
            for lane in lanes:
                self.lanes.release(lane)
        return len(lanes)
