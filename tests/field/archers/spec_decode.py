"""Speculative decoding worker: pages for draft and target, RNG slots, linear and tree proposals."""
import heapq
import logging
from collections import deque
from typing import Deque, Dict, List, Optional, Sequence as Seq

logger = logging.getLogger("spec")

PAGE = 16


class PoolDry(Exception):
    def __init__(self, pool: str, wanted: int):
        super().__init__("pool %s cannot give %d pages" % (pool, wanted))
        self.pool = pool


class NonFiniteLogits(Exception):
    pass


def pages_for(tokens: int) -> int:
    return (tokens + PAGE - 1) // PAGE


class PagePool:
    """Lowest page first, so that the used part of the cache stays dense."""

    def __init__(self, name: str, count: int):
        self.name = name
        self._heap = list(range(count))
        self._quarantine: Dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def take(self, n: int) -> List[int]:
        if n > len(self._heap):
            raise PoolDry(self.name, n)
        return [heapq.heappop(self._heap) for _ in range(n)]  # clean: returned to the caller

    def take_upto(self, n: int) -> List[int]:
        out: List[int] = []
        while self._heap and len(out) < n:
            page = heapq.heappop(self._heap)  # leak: a page in quarantine is skipped and never pushed again
            if page in self._quarantine:
                continue
            out.append(page)
        return out

    def put(self, pages: Seq[int]) -> None:
        for page in pages:
            heapq.heappush(self._heap, page)

    def quarantine(self, page: int, why: str) -> None:
        self._quarantine[page] = why

    def absolve(self, page: int) -> None:
        self._quarantine.pop(page, None)


class RngSlots:
    def __init__(self, count: int):
        self._free: Deque[int] = deque(range(count))
        self.low_water = count

    def lend(self) -> Optional[int]:
        if not self._free:
            return None
        slot = self._free.popleft()  # clean: returned to the caller
        self.low_water = min(self.low_water, len(self._free))
        return slot

    def restore(self, slot: int) -> None:
        self._free.append(slot)


class Sequence:
    def __init__(self, sid: str, tokens: List[int]):
        self.sid = sid
        self.tokens = tokens
        self.worker: Optional["SpecWorker"] = None
        self.target_pages: List[int] = []
        self.draft_pages: List[int] = []
        self.rng_slot: Optional[int] = None

    @property
    def length(self) -> int:
        return len(self.tokens)


class Proposal:
    def __init__(self, tokens: List[int], score: float = 0.0):
        self.tokens = tokens
        self.score = score


class Branch:
    def __init__(self, pages: List[int], proposal: Proposal):
        self.pages = pages
        self.proposal = proposal


class SpecWorker:
    def __init__(self, draft_model, target_model, draft: PagePool, target: PagePool, rng: RngSlots):
        self.draft_model = draft_model
        self.target_model = target_model
        self.draft = draft
        self.target = target
        self.rng = rng
        self.accepted = 0
        self.proposed = 0

    def begin(self, seq: Sequence) -> None:
        seq.worker = self
        seq.target_pages = self.target.take(pages_for(seq.length))  # leak: when the draft pool is dry the scheduler begins again and these are overwritten
        seq.draft_pages = self.draft.take(pages_for(seq.length))  # clean: finish() puts them back

    def finish(self, seq: Sequence) -> None:
        self.target.put(seq.target_pages)
        self.draft.put(seq.draft_pages)
        seq.target_pages, seq.draft_pages = [], []
        seq.rng_slot = None

    def reseed(self, seq: Sequence) -> None:
        if seq.rng_slot is not None:
            self.rng.restore(seq.rng_slot)
            seq.rng_slot = None

    def warm_up(self, tokens: int) -> None:
        pages = self.target.take(pages_for(tokens))  # clean: put back by the finally
        try:
            self.target_model.score([0] * tokens, pages, None)
        finally:
            self.target.put(pages)

    def propose(self, seq: Sequence, k: int) -> Optional[Proposal]:
        need = max(0, pages_for(seq.length + k) - len(seq.draft_pages))
        extra = self.draft.take(need)  # leak: an empty draft returns before the pages reach the sequence
        tokens = self.draft_model.run(seq.tokens, seq.draft_pages + extra, k)
        if not tokens:
            logger.debug("no draft for %s", seq.sid)
            return None
        seq.draft_pages += extra
        self.proposed += len(tokens)
        return Proposal(tokens)

    def propose_tree(self, seq: Sequence, width: int, depth: int) -> Optional[Proposal]:
        branches: List[Branch] = []
        for seed in range(2 * width):
            pages = self.draft.take_upto(pages_for(depth))  # leak: the branches beyond the width are cut off the list with their pages
            if len(pages) < pages_for(depth):
                self.draft.put(pages)
                break
            tokens, score = self.draft_model.sample(seq.tokens, pages, depth, seed)
            branches.append(Branch(pages, Proposal(tokens, score)))
        branches.sort(key=lambda b: b.proposal.score, reverse=True)
        branches = branches[:width]
        if not branches:
            return None
        best = branches[0]
        for branch in branches[1:]:
            self.draft.put(branch.pages)
        seq.draft_pages += best.pages
        return best.proposal

    def verify(self, seq: Sequence, proposal: Proposal) -> Optional[int]:
        need = max(0, pages_for(seq.length + len(proposal.tokens)) - len(seq.target_pages))
        scratch = self.target.take(need)  # clean: near miss, both early returns put it back, else it is split between sequence and pool
        if seq.rng_slot is None:
            seq.rng_slot = self.rng.lend()  # leak: finish() forgets the slot of the sequence, only reseed() restores it
        if seq.rng_slot is None:
            self.target.put(scratch)
            return None
        try:
            accepted = self.target_model.score(proposal.tokens, seq.target_pages + scratch, seq.rng_slot)
        except NonFiniteLogits:
            logger.warning("non-finite logits for %s", seq.sid)
            self.target.put(scratch)
            return None
        seq.tokens.extend(proposal.tokens[:accepted])
        keep = max(0, pages_for(seq.length) - len(seq.target_pages))
        seq.target_pages += scratch[:keep]
        self.target.put(scratch[keep:])
        self.accepted += accepted
        return accepted

    def bonus(self, seq: Sequence, token: int) -> None:
        if pages_for(seq.length + 1) > len(seq.target_pages):
            seq.target_pages.extend(self.target.take(1))  # clean: belongs to the sequence and finish() puts it back
        seq.tokens.append(token)

    def migrate(self, seq: Sequence, other: "SpecWorker") -> bool:
        try:
            pages = other.target.take(len(seq.target_pages))  # clean: near miss, put back when the draft pool is dry, else the sequence's
        except PoolDry:
            return False
        try:
            draft = other.draft.take(len(seq.draft_pages))  # clean: near miss, swapped into the sequence after the old pages were put
        except PoolDry:
            other.target.put(pages)
            return False
        self.target_model.copy_pages(seq.target_pages, pages)
        self.draft_model.copy_pages(seq.draft_pages, draft)
        self.finish(seq)
        seq.target_pages, seq.draft_pages = pages, draft
        seq.worker = other
        return True


class SpecScheduler:
    def __init__(self, worker: SpecWorker, k: int = 4):
        self.worker = worker
        self.k = k
        self.waiting: Deque[Sequence] = deque()
        self.running: List[Sequence] = []

    def admit(self) -> None:
        while self.waiting:
            seq = self.waiting.popleft()
            try:
                self.worker.begin(seq)
            except PoolDry as exc:
                logger.info("%s: %s waits", exc, seq.sid)
                self.waiting.appendleft(seq)
                return
            self.running.append(seq)

    def step(self) -> int:
        self.admit()
        produced = 0
        for seq in list(self.running):
            try:
                proposal = seq.worker.propose(seq, self.k)
                if proposal is not None:
                    produced += seq.worker.verify(seq, proposal) or 0
                seq.worker.bonus(seq, self.worker.target_model.sample_one(seq.tokens))
            except PoolDry:
                self.running.remove(seq)
                seq.worker.finish(seq)
                self.waiting.append(seq)
        return produced

    def cancel(self, sid: str) -> None:
        for seq in [s for s in self.running if s.sid == sid]:
            self.running.remove(seq)
            seq.worker.finish(seq)
        self.waiting = deque(s for s in self.waiting if s.sid != sid)
