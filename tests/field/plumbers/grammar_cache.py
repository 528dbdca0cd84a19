"""Structured-output support: compiled grammars, matchers and token bitmasks."""
from __future__ import annotations

import threading
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Callable, Dict, Iterator, List, Optional


class Bitmask:
    def __init__(self, words: int) -> None:
        self.words = [0] * words

    def fill(self, value: int) -> None:
        self.words = [value] * len(self.words)


class BitmaskPool:
    def __init__(self, vocab: int, limit: int) -> None:
        self._words = (vocab + 31) // 32
        self._limit = limit
        self._made = 0
        self._spare: List[Bitmask] = []
        self._cv = threading.Condition()

    def lease(self) -> Bitmask:
        with self._cv:
            while not self._spare and self._made >= self._limit:
                self._cv.wait()
            if self._spare:
                return self._spare.pop()
            self._made += 1
            return Bitmask(self._words)

    def unlease(self, mask: Bitmask) -> None:
        mask.fill(0)
        with self._cv:
            self._spare.append(mask)
            self._cv.notify()


@dataclass
class Compiled:
    source: str
    refs: int = 0


class GrammarCache:
    """Compiled grammars, counted; only unreferenced ones are evicted."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: Dict[str, Compiled] = {}

    def retain(self, source: str) -> Compiled:
        entry = self._entries.get(source)
        if entry is None:
            self._trim()
            entry = self._entries[source] = Compiled(source)
        entry.refs += 1
        return entry

    def release(self, entry: Compiled) -> None:
        entry.refs -= 1

    def _trim(self) -> None:
        for key in [k for k, e in self._entries.items() if e.refs == 0]:
            if len(self._entries) < self.capacity:
                return
            del self._entries[key]


class Matcher:
    def __init__(self, cache: GrammarCache, source: str) -> None:
        self._cache = cache
        self.grammar: Optional[Compiled] = cache.retain(source)  # clean: near miss, close releases it
        self.done = False

    def accept(self, token: int) -> bool:
        self.done = token == 0
        return token >= 0

    def close(self) -> None:
        if self.grammar is None:
            return
        self._cache.release(self.grammar)
        self.grammar = None


class MatcherScope:
    """Scoped matcher for offline validation."""

    def __init__(self, cache: GrammarCache, source: str, keep_on_done: bool) -> None:
        self._cache = cache
        self._source = source
        self._keep_on_done = keep_on_done
        self.matcher: Optional[Matcher] = None

    def __enter__(self) -> Matcher:
        self.matcher = Matcher(self._cache, self._source)  # leak: __exit__ returns early for a finished matcher
        return self.matcher

    def __exit__(self, exc_type: object, exc: object, tb: object) -> bool:
        if self.matcher.done and self._keep_on_done:
            return False
        self.matcher.close()
        return False


class StructuredOutputManager:
    def __init__(self, cache: GrammarCache, masks: BitmaskPool, executor: Executor) -> None:
        self.cache = cache
        self.masks = masks
        self.executor = executor
        self.matchers: Dict[str, Matcher] = {}
        self.row_masks: Dict[str, Bitmask] = {}

    def add(self, rid: str, source: str) -> None:
        self.matchers[rid] = Matcher(self.cache, source)  # clean: remove closes it
        self.row_masks[rid] = self.masks.lease()  # leak: remove returns before the mask when the matcher is done

    def remove(self, rid: str) -> None:
        matcher = self.matchers.pop(rid, None)
        if matcher is None:
            return
        matcher.close()
        if matcher.done:
            return
        mask = self.row_masks.pop(rid, None)
        if mask is not None:
            self.masks.unlease(mask)

    def fill(self, rids: List[str]) -> List[Bitmask]:
        out: List[Bitmask] = []
        for rid in rids:
            matcher = self.matchers.get(rid)
            mask = self.masks.lease()  # leak: `continue` for a request without grammar or that is done
            if matcher is None or matcher.done:
                continue
            mask.fill(1)
            out.append(mask)
        return out

    def apply(self, rids: List[str], sample: Callable[[List[Bitmask]], List[int]]) -> List[int]:
        masks = self.fill(rids)  # clean: all that come back are unleased
        tokens = sample(masks)
        for mask in masks:
            self.masks.unlease(mask)
        return tokens

    def fill_async(self, rid: str, then: Callable[[Bitmask], None]) -> "Future[None]":
        mask = self.masks.lease()  # clean: near miss, the done callback unleases
        fut = self.executor.submit(self._fill_one, rid, mask, then)
        fut.add_done_callback(lambda _f: self.masks.unlease(mask))
        return fut

    def _fill_one(self, rid: str, mask: Bitmask, then: Callable[[Bitmask], None]) -> None:
        if rid in self.matchers:
            mask.fill(1)
            then(mask)

    def validate(self, source: str, tokens: List[int]) -> bool:
        matcher = Matcher(self.cache, source)  # leak: a rejected token returns before close
        for tok in tokens:
            if not matcher.accept(tok):
                return False
        matcher.close()
        return True

    def validate_scoped(self, source: str, tokens: List[int]) -> bool:
        with MatcherScope(self.cache, source, keep_on_done=True) as matcher:  # clean: with, the fault is in the scope's own exit
            return all(matcher.accept(t) for t in tokens)

    def jump_forward(self, rid: str) -> Iterator[int]:
        """Yields the tokens a grammar forces, at most one mask at a time."""
        mask = self.masks.lease()  # clean: near miss, finally also runs when the consumer stops
        try:
            for i, word in enumerate(mask.words):
                if word:
                    return
                yield i
        finally:
            self.masks.unlease(mask)

    def swap_grammar(self, rid: str, source: str) -> None:
        fresh = Matcher(self.cache, source)  # clean: near miss, the displaced matcher is closed, remove closes this one
        old, self.matchers[rid] = self.matchers.get(rid), fresh
        if old is not None:
            old.close()
