"""KV page accounting for rollout decode workers.

Pages are counted per sequence; samples of one prompt share the full pages of
that prompt and only own the tail page they write into.
"""
from __future__ import annotations

import collections
import logging
from dataclasses import dataclass, field
from typing import Callable, Optional

log = logging.getLogger(__name__)


class OutOfPages(RuntimeError):
    pass


class PageLedger:
    """Free list plus one reference count per page."""

    def __init__(self, num_pages: int, page_size: int = 16):
        self.page_size = page_size
        self.num_pages = num_pages
        self._free = collections.deque(range(num_pages))
        self._refs = [0] * num_pages

    @property
    def available(self) -> int:
        return len(self._free)

    def grab(self) -> Optional[int]:
        if not self._free:
            return None
        page = self._free.popleft()  # clean: handed to the caller with one reference
        self._refs[page] = 1
        return page

    def grab_many(self, n: int) -> list[int]:
        """All or nothing."""
        if n > len(self._free):
            raise OutOfPages(f"need {n}, have {len(self._free)}")
        out = []
        for _ in range(n):
            out.append(self.grab())  # clean: near miss, the length was checked above and the list is returned
        return out

    def retain(self, page: int) -> int:
        assert self._refs[page] > 0
        self._refs[page] += 1
        return page

    def shared(self, page: int) -> bool:
        return self._refs[page] > 1

    def drop(self, page: int) -> None:
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free.append(page)

    def drop_many(self, pages) -> None:
        for page in pages:
            self.drop(page)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


@dataclass
class Sequence:
    uid: str
    tokens: list[int]
    pages: list[int] = field(default_factory=list)


class DecodeMemory:
    """Owns the pages of every running sequence."""

    def __init__(self, ledger: PageLedger):
        self.ledger = ledger
        self.seqs: dict[str, Sequence] = {}
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.copy_queue: list[tuple[int, int]] = []

    def admit(self, seq: Sequence) -> bool:
        need = self.ledger.pages_for(len(seq.tokens) + 1)
        try:
            seq.pages = self.ledger.grab_many(need)  # clean: moved into the sequence, which retire() drops
        except OutOfPages:
            self.waiting.append(seq)
            return False
        self.seqs[seq.uid] = seq
        return True

    def admit_group(self, uid: str, prompt: list[int], n: int) -> list[Sequence]:
        full = len(prompt) // self.ledger.page_size
        shared = self.ledger.grab_many(full)  # leak: not dropped when a member finds no tail page
        members: list[Sequence] = []
        for i in range(n):
            tail = self.ledger.grab()  # clean: goes into the member's pages, dropped on rollback
            if tail is None:
                log.info("group %s: %d of %d fit", uid, i, n)
                for m in members:
                    self.ledger.drop_many(m.pages)
                return []
            pages = [self.ledger.retain(p) for p in shared]  # clean: in the member's pages
            members.append(Sequence(f"{uid}/{i}", list(prompt), pages + [tail]))
        for m in members:
            self.seqs[m.uid] = m
        self.ledger.drop_many(shared)
        return members

    def fork(self, parent: Sequence, uid: str) -> Optional[Sequence]:
        shared = [self.ledger.retain(p) for p in parent.pages[:-1]]  # leak: counts stay up when the tail page is None
        tail = self.ledger.grab()  # clean: in the child's pages
        if tail is None:
            return None
        self.copy_queue.append((parent.pages[-1], tail))
        child = Sequence(uid, list(parent.tokens), shared + [tail])
        self.seqs[uid] = child
        return child

    def append_token(self, seq: Sequence, token: int) -> bool:
        if len(seq.tokens) % self.ledger.page_size == 0:
            page = self.ledger.grab()  # clean: appended to the sequence's pages
            if page is None:
                return False
            seq.pages.append(page)
        seq.tokens.append(token)
        return True

    def make_writable(self, seq: Sequence) -> bool:
        last = seq.pages[-1]
        if not self.ledger.shared(last):
            return True
        fresh = self.ledger.grab()  # clean: takes the place of the shared page, which is dropped
        if fresh is None:
            return False
        self.copy_queue.append((last, fresh))
        seq.pages[-1] = fresh
        self.ledger.drop(last)
        return True

    def relocate(self, seq: Sequence, below: int) -> int:
        """Move exclusively owned pages under ``below`` so the top can be unmapped."""
        moved = 0
        for i, page in enumerate(seq.pages):
            if page < below or self.ledger.shared(page):
                continue
            target = self.ledger.grab()  # leak: a target that is not lower is neither used nor dropped
            if target is None:
                break
            if target >= page:
                continue
            self.copy_queue.append((page, target))
            seq.pages[i] = target
            self.ledger.drop(page)
            moved += 1
        return moved

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        keep = self.ledger.pages_for(num_tokens)
        surplus = seq.pages[keep:]
        del seq.pages[keep:]
        del seq.tokens[num_tokens:]
        self.ledger.drop_many(surplus)

    def preempt(self, uid: str) -> None:
        seq = self.seqs.pop(uid)
        self.ledger.drop_many(seq.pages)
        seq.pages = []
        self.waiting.appendleft(seq)

    def retire(self, uid: str) -> None:
        seq = self.seqs.pop(uid, None)
        if seq is None:
            return
        self.ledger.drop_many(seq.pages)
        seq.pages = []


class PromptScorer:
    """Log-probs of finished samples under the reference model, on borrowed pages."""

    def __init__(self, ledger: PageLedger, model_fn: Callable):
        self.ledger = ledger
        self.model_fn = model_fn

    def score(self, samples: dict[str, list[int]]) -> dict[str, list[float]]:
        out = {}
        for uid, tokens in samples.items():
            pages = self.ledger.grab_many(self.ledger.pages_for(len(tokens)))  # leak: `continue` on a short result skips the drop
            logprobs = self.model_fn(tokens, pages)
            if logprobs is None or len(logprobs) != len(tokens):
                log.warning("sample %s: no log-probs", uid)
                continue
            out[uid] = logprobs
            self.ledger.drop_many(pages)
        return out

    def score_windows(self, tokens: list[int], window: int) -> float:
        total = 0.0
        pages: list[int] = []
        for start in range(0, len(tokens), window):
            chunk = tokens[start:start + window]
            pages = self.ledger.grab_many(self.ledger.pages_for(len(chunk)))  # leak: rebound by the next window, only the last is dropped
            total += sum(self.model_fn(chunk, pages))
        self.ledger.drop_many(pages)
        return total

    def score_growing(self, tokens: list[int], window: int) -> float:
        total = 0.0
        held: list[int] = []
        try:
            for start in range(0, len(tokens), window):
                chunk = tokens[start:start + window]
                held += self.ledger.grab_many(self.ledger.pages_for(len(chunk)))  # clean: near miss, held grows and finally drops all of it
                total += sum(self.model_fn(chunk, held))
        finally:
            self.ledger.drop_many(held)
        return total
