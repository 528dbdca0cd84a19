"""The part of an engine that decides which sequence lives where."""
import logging
from typing import Dict, List, Optional

from .lanes import Lanes
from .swap import Seq, SwapManager, Where
from .tiers import TierFull

log = logging.getLogger("tieredkv.engine")


class Engine:
    def __init__(self, swap: SwapManager, lanes: Lanes, runner, page_size: int = 64):
        self.swap, self.lanes, self.runner = swap, lanes, runner
        self.page_size = page_size
        self.seqs: Dict[str, Seq] = {}
        self._ahead: Dict[str, object] = {}
        self.now = 0

    def _victim(self, but: Optional[Seq] = None) -> Optional[Seq]:
        pool = [s for s in self.seqs.values() if s.where is Where.GPU and s is not but]
        return min(pool, key=lambda s: s.last_step, default=None)

    def _device_pages(self, n: int, but: Optional[Seq] = None) -> List[int]:
        while True:
            try:
                return self.swap.gpu.take(n)  # clean: returned
            except TierFull:
                victim = self._victim(but)
                if victim is None or not self.swap.swap_out(victim):
                    raise

    def admit(self, rid: str, n_tokens: int) -> bool:
        if rid in self.seqs:
            return False
        try:
            pages = self._device_pages(-(-n_tokens // self.page_size))  # clean: near miss, the sequence takes them and finish() drops it
        except TierFull:
            return False
        self.seqs[rid] = Seq(rid, Where.GPU, pages, last_step=self.now)
        return True

    def extend(self, seq: Seq) -> None:
        if seq.where is not Where.GPU:
            return
        seq.pages += self._device_pages(1, but=seq)  # clean: owned by the sequence

    def finish(self, rid: str) -> None:
        self.lookahead_stop(rid)
        seq = self.seqs.pop(rid, None)
        if seq is not None:
            self.swap.drop(seq)

    def speculate(self, seq: Seq, k: int) -> int:
        extra = self.swap.gpu.take_upto(k)  # leak: with fewer than k pages it returns 0 and keeps those it got
        if len(extra) < k:
            return 0
        try:
            return self.runner.draft(seq.pages + extra, k)
        finally:
            self.swap.gpu.give(extra)

    def lookahead(self, seq: Seq, dst: List[int]) -> None:
        if seq.rid not in self._ahead:
            self._ahead[seq.rid] = self.lanes.copy_async(seq.pages, dst, lambda job: self._ahead.pop(seq.rid, None))  # leak: lookahead_stop() cancels the job, which poll() then passes over

    def lookahead_stop(self, rid: str) -> None:
        job = self._ahead.pop(rid, None)
        if job is not None:
            job.cancelled = True

    def step(self) -> int:
        self.now += 1
        self.lanes.poll()
        ran = 0
        for seq in list(self.seqs.values()):
            if seq.where is Where.DISK and not self.swap.promote(seq):
                continue
            if seq.where is Where.CPU and not self.swap.swap_in(seq):
                self.swap.demote(seq)
                continue
            if self.runner.decode(seq.rid, seq.pages):
                self.finish(seq.rid)
            seq.last_step = self.now
            ran += 1
        return ran
