from __future__ import annotations

from typing import Callable, Dict, List, Optional, Sequence

from .blocks import BlockManager, SlotTable
from .request import Request
from .scheduler import Scheduler

Model = Callable[[Request], int]


class Engine:
    def __init__(self, model: Model, blocks: int = 16, rows: int = 4) -> None:
        self.mgr = BlockManager(blocks)
        self.slots = SlotTable(rows)
        self.sched = Scheduler(self.mgr, self.slots)
        self.model = model
        self.scoring: Dict[str, List[int]] = {}
        self.embedding: Dict[str, List[int]] = {}

    def add(self, rid: str, prompt: Sequence[int], max_new: int = 4) -> None:
        self.sched.waiting.append(Request(rid, list(prompt), max_new))

    def step(self) -> List[Request]:
        done: List[Request] = []
        for req in self.sched.schedule():
            if req.rid not in self.sched.running:
                continue
            if not self.sched.grow(req):
                self.sched.preempt(req)
                continue
            token = self.model(req)
            req.output.append(token)
            if token == 0 or len(req.output) >= req.max_new:
                self.sched.finish(req.rid)
                done.append(req)
        return done

    def begin_score(self, rid: str, tokens: Sequence[int]) -> bool:
        blocks = self.mgr.allocate_tokens(len(tokens))  # leak: cancel_score pops the entry without deallocating
        if blocks is None:
            return False
        self.scoring[rid] = self.scoring.pop(rid, []) + blocks
        return True

    def end_score(self, rid: str) -> int:
        blocks = self.scoring.pop(rid, None)
        if blocks is None:
            return 0
        self.mgr.deallocate(blocks)
        return len(blocks)

    def cancel_score(self, rid: str) -> bool:
        return self.scoring.pop(rid, None) is not None

    def begin_embed(self, rid: str, tokens: Sequence[int]) -> bool:
        if rid in self.embedding:
            return False
        blocks = self.mgr.allocate_tokens(len(tokens))  # clean: near miss, both end and cancel go through _drop_embed
        if blocks is None:
            return False
        self.embedding[rid] = blocks
        return True

    def _drop_embed(self, rid: str) -> int:
        blocks = self.embedding.pop(rid, [])
        self.mgr.deallocate(blocks)
        return len(blocks)

    def end_embed(self, rid: str) -> int:
        return self._drop_embed(rid)

    def cancel_embed(self, rid: str) -> bool:
        return self._drop_embed(rid) > 0

    def classify_pair(self, a: Sequence[int], b: Sequence[int]) -> Optional[int]:
        rows = self.slots.take_pair()  # leak: the over-long pair returns with both rows taken
        if rows is None:
            return None
        if self.mgr.blocks_for(len(a) + len(b)) > 8:
            return None
        verdict = int(sum(a) >= sum(b))
        for row in rows:
            self.slots.vacate(row)
        return verdict

    def warmup(self, align: int = 2) -> bool:
        row = self.slots.take_aligned(align)  # clean: vacated when there is one
        ok = row >= 0
        if ok:
            self.model(Request("warmup", [1], row=row))
        if ok:
            self.slots.vacate(row)
        return ok


def main() -> None:
    eng = Engine(lambda req: req.length % 7, blocks=6, rows=2)
    print("warm", eng.warmup())
    for i in range(4):
        eng.add(f"r{i}", [1, 2, 3 + i], max_new=6)
    finished = 0
    for _ in range(60):
        finished += len(eng.step())
    assert eng.begin_embed("e", [1, 2, 3])  # clean: cancelled on the next line
    assert eng.cancel_embed("e")
    print("finished", finished, "allocated", eng.mgr.allocated, "rows", eng.slots.taken)


if __name__ == "__main__":
    main()
