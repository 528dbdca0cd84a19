"""Draft, verify, commit."""
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Callable, Deque, Dict, List, Optional

from .draft import Draft, DraftWorker, NoLane
from .tree import ArenaFull, NodeArena, TokenTree

log = logging.getLogger(__name__)


class TargetError(RuntimeError):
    pass


@dataclass
class Seq:
    sid: str
    tokens: List[int]
    limit: int
    tree: Optional[TokenTree] = None
    accepted: List[int] = field(default_factory=list)


class VerifyQueue:
    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._items: Deque[Draft] = deque()

    def push(self, draft: Draft) -> bool:
        if len(self._items) >= self.bound:
            return False
        self._items.append(draft)
        return True

    def pop_many(self, n: int) -> List[Draft]:
        out = []
        while self._items and len(out) < n:
            out.append(self._items.popleft())  # clean: the drafts go to the caller
        return out

    def clear(self) -> None:
        while self._items:
            self._items.popleft().close()


class SpecEngine:
    def __init__(self, worker: DraftWorker, target: Callable, arena: NodeArena, max_active: int = 32) -> None:
        self.worker, self.target, self.arena = worker, target, arena
        self.max_active = max_active
        self.queue = VerifyQueue(16)
        self.active: Dict[str, Seq] = {}
        self.waiting: Deque[Seq] = deque()

    def admit(self, seq: Seq) -> bool:
        try:
            seq.tree = TokenTree(self.arena, seq.tokens[-1])  # leak: a sequence that has to wait gets another tree at the next attempt
        except ArenaFull:
            self.waiting.append(seq)
            return False
        if len(self.active) >= self.max_active:
            self.waiting.append(seq)
            return False
        self.active[seq.sid] = seq
        return True

    def branch(self, seq: Seq, sid: str) -> bool:
        """Beam: continue a copy of the sequence under another name."""
        if sid in self.active:
            return False
        try:
            tree = seq.tree.fork()  # clean: near miss, owned by the new sequence, finish() closes it
        except ArenaFull:
            return False
        self.active[sid] = Seq(sid, list(seq.tokens), seq.limit, tree)
        return True

    def draft_round(self) -> int:
        n = 0
        for seq in self.active.values():
            try:
                draft = self.worker.propose(seq)  # leak: a full queue refuses the draft and its lane is not released
            except NoLane:
                break
            if draft is None or not self.queue.push(draft):
                continue
            n += 1
        return n

    def wide_round(self, sids: List[str]) -> None:
        for sid in sids:
            try:
                draft = self.worker.propose_wide(self.active[sid])  # clean: committed here, closed in finally
            except NoLane:
                return
            if draft is None:
                continue
            try:
                self._commit(draft, self.target([draft.path])[0])
            except TargetError as exc:
                log.warning("%s: %s", sid, exc)
            finally:
                draft.close()

    def verify_round(self) -> None:
        for draft in self.queue.pop_many(8):  # leak: a draft whose verification fails is skipped without close()
            try:
                n_ok = self.target([draft.path])[0]
            except TargetError as exc:
                log.warning("%s: %s", draft.seq.sid, exc)
                continue
            self._commit(draft, n_ok)
            draft.close()

    def _commit(self, draft: Draft, n_ok: int) -> None:
        seq = draft.seq
        if seq.tree.root < 0:
            return
        for token in draft.path[:n_ok]:
            seq.tokens.append(token)
            seq.accepted.append(token)
            if not seq.tree.advance(token):
                break

    def finish(self, sid: str) -> List[int]:
        seq = self.active.pop(sid)
        self.worker.forget(sid)
        if seq.tree is not None:
            seq.tree.close()
        return seq.accepted

    def step(self) -> List[str]:
        while self.waiting and len(self.active) < self.max_active:
            if not self.admit(self.waiting.popleft()):
                break
        self.draft_round()
        self.verify_round()
        done = [s.sid for s in self.active.values() if len(s.tokens) >= s.limit]
        for sid in done:
            self.finish(sid)
        return done

    def shutdown(self) -> None:
        self.queue.clear()
        for sid in list(self.active):
            self.finish(sid)
