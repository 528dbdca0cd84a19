"""Beam search on shared KV blocks: copy on write with counted blocks."""
from __future__ import annotations

from typing import Dict, List, Optional, Tuple


class CountedBlocks:
    """Blocks with reference counts. ``new_block`` starts at one reference."""

    def __init__(self, n: int) -> None:
        self._free = list(range(n))
        self.refs: Dict[int, int] = {}

    def new_block(self) -> Optional[int]:
        if not self._free:
            return None
        b = self._free.pop()
        self.refs[b] = 1
        return b

    def incref(self, block: int) -> int:
        self.refs[block] += 1
        return block

    def decref(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] == 0:
            del self.refs[block]
            self._free.append(block)

    def shared(self, block: int) -> bool:
        return self.refs[block] > 1


class Beam:
    def __init__(self, blocks: List[int], score: float = 0.0) -> None:
        self.blocks = blocks
        self.score = score
        self.tokens: List[int] = []
        self.eos = False


class BeamSearcher:
    def __init__(self, blocks: CountedBlocks, width: int) -> None:
        self.blocks = blocks
        self.width = width
        self.live: List[Beam] = []
        self.done: List[Beam] = []

    def start(self, prompt_blocks: int) -> bool:
        got: List[int] = []
        for _ in range(prompt_blocks):
            b = self.blocks.new_block()  # clean: rolled back when short, else owned by the beam
            if b is None:
                for x in got:
                    self.blocks.decref(x)
                return False
            got.append(b)
        self.live.append(Beam(got))
        return True

    def split(self, beam: Beam, score: float) -> Beam:
        twin = Beam([self.blocks.incref(b) for b in beam.blocks], score)  # clean: the twin owns the counts, drop decrefs
        twin.tokens = list(beam.tokens)
        return twin

    def drop(self, beam: Beam) -> None:
        for b in beam.blocks:
            self.blocks.decref(b)
        beam.blocks = []

    def write_last(self, beam: Beam) -> bool:
        last = beam.blocks[-1]
        if not self.blocks.shared(last):
            return True
        fresh = self.blocks.new_block()  # clean: near miss, replaces the shared block, which is decref'ed
        if fresh is None:
            return False
        beam.blocks[-1] = fresh
        self.blocks.decref(last)
        return True

    def step(self, scores: List[Tuple[int, float]]) -> None:
        """Candidates (parent index, score), best first."""
        children: List[Beam] = []
        for parent, score in scores:
            children.append(self.split(self.live[parent], score))  # clean: near miss, the children past the width are dropped
        for old in self.live:
            self.drop(old)
        for extra in children[self.width:]:
            self.drop(extra)
        self.live = children[:self.width]

    def step_pruned(self, scores: List[Tuple[int, float]], floor: float) -> None:
        kept: List[Beam] = []
        for parent, score in scores:
            child = self.split(self.live[parent], score)  # leak: a child below the floor is skipped without drop
            if child.score < floor:
                continue
            kept.append(child)
        for old in self.live:
            self.drop(old)
        self.live = kept

    def lookahead(self, beam: Beam, depth: int) -> float:
        """Scores an extension without keeping it."""
        trial = self.split(beam, beam.score)  # clean: dropped at the end
        for _ in range(depth):
            if not self.write_last(trial):
                break
            trial.score -= 0.5
        score = trial.score
        self.drop(trial)
        return score

    def lookahead_greedy(self, beam: Beam, depth: int) -> float:
        trial = self.split(beam, beam.score)  # leak: out of blocks returns the score without drop
        for _ in range(depth):
            if not self.write_last(trial):
                return trial.score
            trial.score -= 0.25
        score = trial.score
        self.drop(trial)
        return score

    def retire(self, beam: Beam) -> None:
        beam.eos = True
        self.live.remove(beam)
        self.done.append(beam)

    def share_prefix(self, beam: Beam, n: int) -> Optional[List[int]]:
        """Counts the first ``n`` blocks for another request."""
        out: List[int] = []
        for b in beam.blocks[:n]:
            out.append(self.blocks.incref(b))  # leak: fewer than n blocks answers None with the counts raised
        if len(out) < n:
            return None
        return out

    def export_prefix(self, beam: Beam, n: int) -> Optional[List[int]]:
        if len(beam.blocks) < n:
            return None
        return [self.blocks.incref(b) for b in beam.blocks[:n]]  # clean: the list is handed to the caller

    def tail_of(self, beam: Beam) -> Tuple[int, Optional[int]]:
        keep = self.blocks.incref(beam.blocks[-1])  # leak: without a fresh block the raised count of the tail is not lowered
        fresh = self.blocks.new_block()  # clean: joins the beam's blocks
        if fresh is None:
            return -1, None
        beam.blocks.append(fresh)
        self.blocks.decref(keep)
        return keep, fresh

    def best(self) -> Optional[List[int]]:
        """Tokens of the best beam; everything else goes back."""
        pool = self.done + self.live
        self.done, self.live = [], []
        if not pool:
            return None
        top = max(pool, key=lambda b: b.score)
        for b in pool:
            self.drop(b)
        return top.tokens


def demo() -> None:
    blocks = CountedBlocks(16)
    s = BeamSearcher(blocks, width=2)
    assert s.start(2)
    s.step([(0, -1.0), (0, -2.0), (0, -3.0)])
    s.step_pruned([(0, -1.0), (1, -1.5)], floor=-9)
    s.lookahead(s.live[0], 2)
    s.lookahead_greedy(s.live[0], 1)
    s.tail_of(s.live[0])
    for b in s.export_prefix(s.live[0], 1) or []:  # clean: decref in the loop
        blocks.decref(b)
    s.retire(s.live[0])
    s.best()
    assert not blocks.refs, blocks.refs


if __name__ == "__main__":
    demo()
