import copy
import heapq
import logging

import torch

log = logging.getLogger(__name__)


class KVFork:
    """Reference counted cache pages for beams."""

    def __init__(self, n_pages):
        self.count = [0] * n_pages
        self.avail = list(range(n_pages))

    def alloc(self):
        if not self.avail:
            return None
        p = self.avail.pop()
        self.count[p] = 1
        return p

    def incref(self, page):
        self.count[page] += 1

    def decref(self, page):
        self.count[page] -= 1
        if self.count[page] == 0:
            self.avail.append(page)


class Beam:
    def __init__(self, tokens, score, pages):
        self.tokens = tokens
        self.score = score
        self.pages = pages

    def __lt__(self, o):
        return self.score < o.score


class BeamSearcher:
    def __init__(self, kv, width, page_size=16):
        self.kv = kv
        self.width = width
        self.page_size = page_size
        self.beams = []

    def start(self, prompt):
        self.finish()
        pages = []
        for _ in range(0, len(prompt), self.page_size):
            p = self.kv.alloc()  # clean: near miss, shortage drops the collected pages, else the beam holds them
            if p is None:
                for x in pages:
                    self.kv.decref(x)
                return False
            pages.append(p)
        self.beams = [Beam(list(prompt), 0.0, pages)]
        return True

    def fork(self, beam, tok, score):
        for p in beam.pages:
            self.kv.incref(p)  # clean: counted for the new beam, dropped by release
        return Beam(beam.tokens + [tok], beam.score + score, list(beam.pages))

    def fork_extend(self, beam, tok, score):
        for p in beam.pages:
            self.kv.incref(p)  # leak: without a page for the tail None is returned and the counts stay
        if len(beam.tokens) % self.page_size == 0:
            tail = self.kv.alloc()  # clean: appended to the pages of the new beam
            if tail is None:
                return None
            return Beam(beam.tokens + [tok], beam.score + score, beam.pages + [tail])
        return Beam(beam.tokens + [tok], beam.score + score, list(beam.pages))

    def release(self, beam):
        for p in beam.pages:
            self.kv.decref(p)
        beam.pages = []

    def step(self, logprobs):
        cands = []
        for b, lp in zip(self.beams, logprobs):
            top = lp.topk(self.width)
            for v, i in zip(top.values.tolist(), top.indices.tolist()):
                cands.append(self.fork(b, i, v))  # clean: near miss, losers are released below and the winners become the beams
        cands.sort(reverse=True)
        for loser in cands[self.width:]:
            self.release(loser)
        for old in self.beams:
            self.release(old)
        self.beams = cands[: self.width]

    def step_pruned(self, logprobs, floor):
        nxt = []
        for b, lp in zip(self.beams, logprobs):
            v, i = lp.max(dim=-1)
            child = self.fork(b, int(i), float(v))  # leak: children under the floor are dropped with their counts
            if child.score < floor:
                continue
            nxt.append(child)
        for old in self.beams:
            self.release(old)
        self.beams = nxt

    def best_only(self):
        top = max(self.beams)
        for b in self.beams:
            if b is not top:
                self.release(b)
        self.beams = [top]
        return top.tokens

    def peek(self, beam, lp):
        child = self.fork(beam, int(lp.argmax()), 0.0)  # clean: released after scoring
        out = float(lp.max()) + child.score
        self.release(child)
        return out

    def snapshot(self):
        snap = [self.fork(b, b.tokens[-1], 0.0) for b in self.beams]  # leak: only the token lists leave, the forks are dropped
        return [copy.copy(s.tokens) for s in snap]

    def finish(self):
        for b in self.beams:
            self.release(b)
        self.beams = []


def nbest(kv, prompt, model, width, steps):
    s = BeamSearcher(kv, width)
    if not s.start(prompt):  # clean: finish releases the beams on either way out
        return []
    for _ in range(steps):
        lps = [model(torch.tensor(b.tokens)) for b in s.beams]
        s.step(lps)
        if all(b.tokens[-1] == 0 for b in s.beams):
            break
    res = heapq.nlargest(width, ((b.score, b.tokens) for b in s.beams))
    s.finish()
    return res


def first_token(kv, prompt, model, width):
    s = BeamSearcher(kv, width)
    if not s.start(prompt):  # leak: the searcher is dropped without finish
        log.info("no pages for %d tokens", len(prompt))
        return None
    s.step([model(torch.tensor(b.tokens)) for b in s.beams])
    return max(s.beams).tokens[-1]
