import logging
from typing import Callable, Dict, List, Optional

from .blocks import Block, BlockManager
from .scheduler import Scheduler, Seq

logger = logging.getLogger(__name__)


class Engine:
    def __init__(self, bm: BlockManager, sched: Scheduler, forward: Callable[[Seq], int], eos: int):
        self.bm = bm
        self.sched = sched
        self.forward = forward
        self.eos = eos
        self.system: Dict[str, List[Block]] = {}

    def step(self) -> List[Seq]:
        self.sched.schedule()
        done: List[Seq] = []
        for seq in list(self.sched.running):
            if seq not in self.sched.running:
                continue
            if not self.sched.grow(seq):
                continue
            seq.tokens.append(self.forward(seq))
            if seq.tokens[-1] == self.eos or len(seq.tokens) >= seq.max_len:
                self.sched.finish(seq)
                done.append(seq)
        return done

    def pin_system(self, name: str, tokens: List[int]) -> int:
        if name in self.system:
            return len(self.system[name])
        probe = Seq(name, tokens, len(tokens))
        hit = self.bm.match(probe.keys())  # clean: near miss, kept under its name until unpin_system()
        self.system[name] = hit
        return len(hit)

    def unpin_system(self, name: str) -> None:
        self.bm.free(self.system.pop(name, []))

    def cached_fraction(self, tokens: List[int]) -> float:
        probe = Seq("probe", tokens, len(tokens))
        hit = self.bm.match(probe.keys())  # leak: only counted, the references that match() took are never freed
        return len(hit) / max(1, probe.blocks_needed())

    def prefix_len(self, tokens: List[int]) -> int:
        hit = self.bm.match(Seq("probe", tokens, len(tokens)).keys())  # clean: near miss, freed after the count
        n = len(hit)
        self.bm.free(hit)
        return n

    def fork(self, parent: Seq, n: int) -> List[Seq]:
        out: List[Seq] = []
        for i in range(n):
            if len(self.sched.running) >= self.sched.max_running:
                break
            blocks = self.bm.share(parent.blocks)  # clean: the child owns the references and is running
            child = Seq(f"{parent.uid}.{i}", list(parent.tokens), parent.max_len, parent.group, blocks)
            self.sched.running.append(child)
            out.append(child)
        return out

    def score(self, tokens: List[int], judge: Callable[[List[Block]], Optional[float]]) -> Optional[float]:
        seq = Seq("score", tokens, len(tokens))
        blocks = self.bm.allocate_aligned(seq.blocks_needed())  # leak: a judge that abstains takes the early return
        if blocks is None:
            return None
        value = judge(blocks)
        if value is None:
            logger.info("judge abstained on %d tokens", len(tokens))
            return None
        self.bm.free(blocks)
        return value
