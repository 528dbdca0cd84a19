"""Runs the encoder for what the cache does not have."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional

from .store import EmbeddingStore, EncoderBudget, Entry


@dataclass
class Prompt:
    rid: str
    digests: List[str]
    entries: Dict[str, Entry] = field(default_factory=dict)
    preview: Optional[Entry] = None
    charged: int = 0


class EncoderRunner:
    def __init__(self, store: EmbeddingStore, budget: EncoderBudget, encode: Callable[[str], Any]) -> None:
        self.store = store
        self.budget = budget
        self.encode = encode
        self.misses = 0

    def _obtain(self, digest: str) -> Entry:
        entry = self.store.hold(digest)  # clean: handed on when it is there
        if entry is not None:
            return entry
        self.misses += 1
        return self.store.publish(digest, self.encode(digest))  # clean: handed to the caller

    def prepare(self, prompt: Prompt, cost: int) -> bool:
        total = cost * len(prompt.digests)
        if not self.budget.withdraw(total):  # clean: near miss, retire() deposits prompt.charged
            return False
        prompt.charged = total
        for digest in prompt.digests:
            if digest not in prompt.entries:
                prompt.entries[digest] = self._obtain(digest)  # clean: retire() unholds all entries
        return True

    def prepare_preview(self, prompt: Prompt) -> None:
        if prompt.preview is None:
            prompt.preview = self._obtain(prompt.digests[0])  # leak: retire() does not unhold the preview

    def retire(self, prompt: Prompt) -> None:
        for entry in prompt.entries.values():
            self.store.unhold(entry)
        prompt.entries.clear()
        prompt.preview = None
        self.budget.deposit(prompt.charged)
        prompt.charged = 0

    def prefetch(self, digests: List[str], cost: int) -> int:
        done = 0
        for digest in digests:
            if not self.budget.withdraw(cost):  # leak: cached digests continue without the deposit
                break
            with self.store.holding(digest) as entry:  # clean: the manager unholds, the continue included
                if entry is not None:
                    continue
            fresh = self._obtain(digest)  # clean: unheld at once, the store keeps the value
            self.store.unhold(fresh)
            self.budget.deposit(cost)
            done += 1
        return done

    def concat(self, digests: List[str]) -> List[Any]:
        """The values are copied, so that the cache may evict them afterwards."""
        return [self._obtain(d).value.clone() for d in digests]  # leak: the held entries are temporaries

    def replace(self, prompt: Prompt, old: str, new: str) -> None:
        """An attachment was edited by the client."""
        fresh = self._obtain(new)  # clean: near miss, stored, and what it displaces is unheld
        for key in (old, new):
            stale = prompt.entries.pop(key, None)
            if stale is not None:
                self.store.unhold(stale)
        prompt.entries[new] = fresh
        prompt.digests = [new if d == old else d for d in prompt.digests]
