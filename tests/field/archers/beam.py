"""Beam search over counted KV pages, in functions. A hypothesis holds one reference to each of its pages."""
from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import Callable, Iterator, NamedTuple

import numpy as np

PAGE = 32

_free: list[int] = []
_refs: Counter[int] = Counter()
_best: dict[int, "Hyp"] = {}

Score = Callable[[list["Hyp"]], np.ndarray]


class PageFault(Exception):
    pass


class Hyp(NamedTuple):
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    score: float


@dataclass(frozen=True)
class Beam:
    width: int
    live: tuple[Hyp, ...] = ()
    done: tuple[Hyp, ...] = ()


def init(count: int) -> None:
    _free[:] = range(count)
    _refs.clear()


def new_page() -> int:
    if not _free:
        raise PageFault
    page = _free.pop()  # clean: returned to the caller with one reference
    _refs[page] = 1
    return page


def retain(page: int) -> int:
    _refs[page] += 1
    return page


def drop(page: int) -> None:
    _refs[page] -= 1
    if not _refs[page]:
        del _refs[page]
        _free.append(page)


def drop_hyp(hyp: Hyp) -> None:
    for page in hyp.pages:
        drop(page)


def retain_hyp(hyp: Hyp) -> Hyp:
    for page in hyp.pages:
        retain(page)  # clean: returned to the caller, who has the hypothesis once more
    return hyp


def fork(hyp: Hyp, token: int, logprob: float) -> Hyp:
    """A child with one more token; the last page is copied by the engine when it is shared."""
    pages = tuple(retain(p) for p in hyp.pages)  # leak: a PageFault in the next lines leaves these references behind
    if len(hyp.tokens) % PAGE == 0:
        pages += (new_page(),)  # clean: belongs to the child
    return Hyp(hyp.tokens + (token,), pages, hyp.score + logprob)


@contextmanager
def kept(hyp: Hyp) -> Iterator[Hyp]:
    held = retain_hyp(hyp)  # clean: dropped by the finally
    try:
        yield held
    finally:
        drop_hyp(held)


def prefill(prompt: tuple[int, ...], run: Callable[[tuple[int, ...], tuple[int, ...]], None]) -> Hyp:
    pages = tuple(new_page() for _ in range(-(-len(prompt) // PAGE)))  # leak: a PageFault in the middle loses the pages before it, generate() catches it
    run(prompt, pages)
    return Hyp(prompt, pages, 0.0)


def top(row: np.ndarray, k: int) -> list[tuple[int, float]]:
    idx = np.argpartition(-row, k)[:k]
    return [(int(i), float(row[i])) for i in idx]


def select(cands: list[Hyp], width: int) -> tuple[Hyp, ...]:
    ranked = sorted(cands, key=lambda h: h.score, reverse=True)
    for loser in ranked[width:]:
        drop_hyp(loser)
    return tuple(ranked[:width])


def advance(beam: Beam, score: Score) -> Beam:
    cands: list[Hyp] = []
    try:
        for hyp, row in zip(beam.live, score(list(beam.live))):
            for tok, lp in top(row, beam.width):
                cands.append(fork(hyp, tok, lp))  # clean: near miss, losers are dropped by select(), all of them after a PageFault, winners are the beam
    except PageFault:
        for cand in cands:
            drop_hyp(cand)
        raise
    live = select(cands, beam.width)
    for parent in beam.live:
        drop_hyp(parent)
    return replace(beam, live=live)


def settle(beam: Beam, eos: int) -> Beam:
    ended = [h for h in beam.live if h.tokens[-1] == eos]
    done = select(list(beam.done) + ended, beam.width)
    return replace(beam, live=tuple(h for h in beam.live if h.tokens[-1] != eos), done=done)


def advance_diverse(beam: Beam, score: Score, banned: set[int], penalty: float) -> Beam:
    used: Counter[int] = Counter()
    live: list[Hyp] = []
    for hyp, row in zip(beam.live, score(list(beam.live))):
        for tok, lp in sorted(top(row, beam.width), key=lambda t: -t[1]):
            child = fork(hyp, tok, lp - penalty * used[tok])  # leak: a banned token is skipped after the child was made
            if tok in banned:
                continue
            used[tok] += 1
            live.append(child)
            break
    for parent in beam.live:
        drop_hyp(parent)
    return replace(beam, live=tuple(live))


def rollout(start: Hyp, score: Score, steps: int, rng: np.random.Generator) -> float:
    """Samples to the end of a horizon and tells the score of the path."""
    hyp = retain_hyp(start)  # leak: bound again in the loop, where only the last child is dropped at the end
    for _ in range(steps):
        row = score([hyp])[0]
        tok = int(rng.choice(len(row), p=np.exp(row) / np.exp(row).sum()))
        hyp = fork(hyp, tok, float(row[tok]))  # leak: the child of the turn before is overwritten
    total = hyp.score
    drop_hyp(hyp)
    return total


def greedy(start: Hyp, score: Score, steps: int) -> Hyp:
    hyp = retain_hyp(start)  # clean: near miss, the parent is dropped before its name is bound to the child
    for _ in range(steps):
        row = score([hyp])[0]
        tok = int(row.argmax())
        try:
            child = fork(hyp, tok, float(row[tok]))  # clean: becomes the parent of the next turn or is returned
        except PageFault:
            break
        drop_hyp(hyp)
        hyp = child
    return hyp


def remember(key: int, hyp: Hyp) -> None:
    old = _best.get(key)
    if old is not None and old.score >= hyp.score:
        return
    _best[key] = retain_hyp(hyp)  # clean: near miss, the entry that it replaces is dropped in the next line
    if old is not None:
        drop_hyp(old)


def forget_all() -> None:
    while _best:
        drop_hyp(_best.popitem()[1])


def measure(hyp: Hyp, probe: Callable[[tuple[int, ...]], float]) -> float:
    with kept(hyp) as h:  # clean: the context manager drops
        return probe(h.pages)


def finish(beam: Beam) -> Hyp | None:
    """The best hypothesis, which the caller has to drop; the others are dropped."""
    pool = list(beam.done) or list(beam.live)
    for hyp in beam.live if beam.done else ():
        drop_hyp(hyp)
    best = nlargest(1, pool, key=lambda h: h.score / max(len(h.tokens), 1))
    for hyp in pool:
        if hyp is not best[0]:
            drop_hyp(hyp)
    return best[0] if best else None


def generate(prompt: tuple[int, ...], run, score: Score, width: int, steps: int, eos: int) -> list[int]:
    try:
        root = prefill(prompt, run)  # clean: near miss, the beam holds it and advance() drops it as a parent, finish() otherwise
    except PageFault:
        return []
    beam = Beam(width, (root,))
    for _ in range(steps):
        try:
            beam = settle(advance(beam, score), eos)
        except PageFault:
            break
        if not beam.live:
            break
    best = finish(beam)
    if best is None:
        return []
    remember(hash(prompt), best)
    drop_hyp(best)
    return list(best.tokens)
