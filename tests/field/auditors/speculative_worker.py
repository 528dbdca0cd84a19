from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Iterator, Optional


class SlotTable:
    def __init__(self, size: int) -> None:
        self._bitmap = [False] * size

    def occupy(self) -> int:
        try:
            idx = self._bitmap.index(False)
        except ValueError:
            return -1
        self._bitmap[idx] = True
        return idx

    def vacate(self, idx: int) -> None:
        self._bitmap[idx] = False


class LogitBuffers:
    def __init__(self, count: int, vocab: int) -> None:
        self.total = count
        self._free: deque[list[float]] = deque([0.0] * vocab for _ in range(count))

    def pull(self) -> Optional[list[float]]:
        return self._free.popleft() if self._free else None

    def push(self, buf: list[float]) -> None:
        self._free.append(buf)

    def shrink(self, target: int) -> list[list[float]]:
        retired: list[list[float]] = []
        while self.total > target and self._free:
            retired.append(self._free.popleft())  # clean: near miss, retiring lowers total by one and hands the memory to the caller for good
            self.total -= 1
        return retired

    def pull_zeroed(self, vocab: int) -> Optional[list[float]]:
        while self._free:
            buf = self._free.popleft()  # leak: a buffer of another vocabulary is thrown away with total still counting it
            if len(buf) != vocab:
                continue
            buf[:] = [0.0] * vocab
            return buf
        return None


@dataclass
class DraftState:
    slot: int
    tree: list[int] = field(default_factory=list)
    logits: list[list[float]] = field(default_factory=list)


@dataclass
class SpecRequest:
    rid: str
    target_slot: int = -1
    draft: Optional[DraftState] = None
    paused: bool = False


class SpeculativeWorker:
    def __init__(self, target: SlotTable, draft: SlotTable, logits: LogitBuffers, vocab: int) -> None:
        self.target = target
        self.draft = draft
        self.logits = logits
        self.vocab = vocab
        self.requests: dict[str, SpecRequest] = {}

    def add(self, rid: str, speculate: bool) -> bool:
        if rid in self.requests:
            return False
        req = SpecRequest(rid)
        req.target_slot = self.target.occupy()  # clean: near miss, vacated when no draft slot is left and by remove() afterwards
        if req.target_slot < 0:
            return False
        if speculate:
            slot = self.draft.occupy()  # clean: moved into the draft state, which pause() and remove() dissolve
            if slot < 0:
                self.target.vacate(req.target_slot)
                return False
            req.draft = DraftState(slot)
        self.requests[rid] = req
        return True

    def _dissolve(self, req: SpecRequest) -> None:
        if req.draft is None:
            return
        self.draft.vacate(req.draft.slot)
        for buf in req.draft.logits:
            self.logits.push(buf)
        req.draft = None

    def pause(self, rid: str) -> None:
        req = self.requests[rid]
        self._dissolve(req)
        req.paused = True

    def resume(self, rid: str) -> bool:
        req = self.requests[rid]
        if not req.paused or req.draft is not None:
            return True
        slot = self.draft.occupy()  # clean: near miss, only a request with no draft comes this far
        if slot < 0:
            return False
        req.draft = DraftState(slot)
        req.paused = False
        return True

    def reset_draft(self, rid: str) -> bool:
        req = self.requests[rid]
        slot = self.draft.occupy()  # leak: takes the place of a draft state whose slot nobody vacates
        if slot < 0:
            return False
        for buf in req.draft.logits if req.draft is not None else ():
            self.logits.push(buf)
        req.draft = DraftState(slot)
        return True

    def propose(self, rid: str, k: int) -> int:
        state = self.requests[rid].draft
        if state is None:
            return 0
        for i in range(k):
            buf = self.logits.pull_zeroed(self.vocab)  # clean: near miss, joins state.logits, which verify() and _dissolve() push back
            if buf is None:
                break
            buf[i % self.vocab] = 1.0
            state.logits.append(buf)
            state.tree.append(i)
        return len(state.tree)

    def verify(self, rid: str, accepted: int) -> int:
        state = self.requests[rid].draft
        if state is None:
            return 0
        scratch = self.logits.pull()  # leak: a draft with nothing proposed returns with the scratch buffer in hand
        if scratch is None or not state.tree:
            return 0
        scratch[: self.vocab] = state.logits[0]
        self.logits.push(scratch)
        while state.logits:
            self.logits.push(state.logits.pop())
        kept = state.tree[:accepted]
        state.tree.clear()
        return len(kept)

    def score(self, tokens: list[int]) -> float:
        buf = self.logits.pull()  # clean: near miss, pushed back after the loop that break leaves early
        if buf is None:
            return 0.0
        total = 0.0
        for tok in tokens:
            if tok >= len(buf):
                break
            total += buf[tok]
        self.logits.push(buf)
        return total

    def branch(self, width: int) -> Optional[list[int]]:
        slots: list[int] = []
        for _ in range(width):
            slot = self.draft.occupy()  # leak: a tree wider than the table gives up and forgets the slots in the list
            if slot < 0:
                return None
            slots.append(slot)
        return slots

    def score_branches(self, width: int) -> int:
        slots = self.branch(width)  # clean: near miss, None carries nothing for the caller and the list is vacated one by one
        if slots is None:
            return 0
        best = max(slots, default=0)
        for slot in slots:
            self.draft.vacate(slot)
        return best

    def iter_slots(self, count: int) -> Iterator[int]:
        for _ in range(count):
            slot = self.draft.occupy()  # clean: near miss, an abandoned loop vacates in the finally around the yield
            if slot < 0:
                return
            try:
                yield slot
            finally:
                self.draft.vacate(slot)

    def remove(self, rid: str) -> None:
        req = self.requests.pop(rid, None)
        if req is None:
            return
        self._dissolve(req)
        self.target.vacate(req.target_slot)
