"""Multimodal encoder cache: token budget with admission control."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional


class EncoderBudget:
    """Counts the encoder tokens that may be cached at one time."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.left = capacity
        self._mu = threading.Lock()

    def try_take(self, n: int) -> bool:
        with self._mu:
            if n > self.left:
                return False
            self.left -= n  # clean: True tells the caller that it holds n
            return True

    def take_upto(self, n: int) -> int:
        with self._mu:
            got = min(n, self.left)
            self.left -= got  # clean: the amount taken is returned
            return got

    def try_take_pair(self, a: int, b: int) -> bool:
        """Take two amounts, or neither."""
        with self._mu:
            if a > self.left:
                return False
            self.left -= a  # leak: if b does not fit, False is returned and a is not given back
            if b > self.left:
                return False
            self.left -= b  # clean: True hands both to the caller
            return True

    def put(self, n: int) -> None:
        with self._mu:
            self.left += n


class MMItem:
    def __init__(self, key: str, num_tokens: int, modality: str):
        self.key = key
        self.num_tokens = num_tokens
        self.modality = modality
        self.charged = 0


class EncoderCacheManager:
    def __init__(self, budget: EncoderBudget):
        self.budget = budget
        self.cached: Dict[str, int] = {}
        self.users: Dict[str, set] = {}

    def count_fitting(self, items: List[MMItem]) -> int:
        n = 0
        for item in items:
            if not self.budget.try_take(item.num_tokens):  # leak: the items are only counted, their tokens never put back
                break
            n += 1
        return n

    def allocate(self, rid: str, item: MMItem) -> bool:
        if item.key in self.cached:
            self.users[item.key].add(rid)
            return True
        if not self.budget.try_take(item.num_tokens):  # clean: near miss, recorded in cached, which drop_request pays back
            return False
        self.cached[item.key] = item.num_tokens
        self.users[item.key] = {rid}
        return True

    def allocate_all(self, rid: str, items: List[MMItem]) -> bool:
        """All items of a request, or none."""
        taken: List[MMItem] = []
        for item in items:
            if item.key in self.cached:
                continue
            if not self.budget.try_take(item.num_tokens):  # clean: near miss, the failed item took nothing and the earlier ones are put back
                for t in taken:
                    self.budget.put(t.num_tokens)
                return False
            taken.append(item)
        for item in taken:
            if item.key in self.cached:
                self.budget.put(item.num_tokens)
                self.users[item.key].add(rid)
                continue
            self.cached[item.key] = item.num_tokens
            self.users[item.key] = {rid}
        return True

    def charge(self, item: MMItem) -> bool:
        if self.budget.try_take(item.num_tokens):  # clean: the item carries the charge, refund pays it back
            item.charged += item.num_tokens
            return True
        return False

    def refund(self, item: MMItem) -> None:
        self.budget.put(item.charged)
        item.charged = 0

    def encode_chunked(self, item: MMItem, step: int) -> int:
        """Run the encoder in slices; returns slices done."""
        done = 0
        remaining = item.num_tokens
        while remaining > 0:
            got = self.budget.take_upto(min(step, remaining))  # leak: the audio cut-off breaks out before put
            if got == 0:
                break
            remaining -= got
            if item.modality == "audio" and done >= 4:
                break
            done += 1
            self.budget.put(got)
        return done

    def profile(self, sizes: List[int]) -> Optional[int]:
        best: Optional[int] = None
        for n in sizes:
            if not self.budget.try_take(n):  # clean: near miss, continue is the path on which nothing was taken
                continue
            best = n if best is None else max(best, n)
            self.budget.put(n)
        return best

    def encode_now(self, item: MMItem) -> str:
        if not self.charge(item):  # leak: the "skip" path zeroes the item's charge without a refund
            return "busy"
        if item.modality not in ("image", "audio", "video"):
            item.charged = 0
            return "skip"
        self.refund(item)
        return "ok"

    def encode_pair(self, a: MMItem, b: MMItem) -> bool:
        if not self.budget.try_take_pair(a.num_tokens, b.num_tokens):  # leak: only the larger of the two amounts is put back
            return False
        peak = max(a.num_tokens, b.num_tokens)
        self.budget.put(peak)
        return True

    def drop_request(self, rid: str) -> None:
        for key in list(self.users):
            self.users[key].discard(rid)
            if not self.users[key]:
                del self.users[key]
                self.budget.put(self.cached.pop(key))
