"""Beam search with forked KV handles."""
import heapq
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Sequence, Tuple

import torch


class KVHandlePool:
    """Reference counted cache rows."""

    def __init__(self, rows: int):
        self._idle = list(range(rows))
        self._refs: Dict[int, int] = {}

    def acquire(self) -> int:
        if not self._idle:
            raise MemoryError("no cache row")
        row = self._idle.pop()
        self._refs[row] = 1
        return row

    def release(self, row: int) -> None:
        self._refs[row] -= 1
        if self._refs[row] == 0:
            del self._refs[row]
            self._idle.append(row)


@dataclass(order=True)
class Beam:
    score: float
    tokens: List[int] = field(compare=False)
    row: int = field(compare=False)


class BeamSearch:
    def __init__(self, pool: KVHandlePool, width: int, eos: int, alpha: float = 0.6):
        self.pool = pool
        self.width = width
        self.eos = eos
        self.alpha = alpha

    def _norm(self, b: Beam) -> float:
        return b.score / (len(b.tokens) ** self.alpha)

    def start(self, first: torch.Tensor) -> List[Beam]:
        vals, idx = first.log_softmax(-1).topk(self.width)
        beams = []
        for v, i in zip(vals.tolist(), idx.tolist()):
            beams.append(Beam(v, [i], self.pool.acquire()))  # clean: carried in the returned beams
        return beams

    def _advance(self, beams: Sequence[Beam], logits: torch.Tensor) -> List[Tuple[float, int, int]]:
        logp = logits.log_softmax(-1)
        cand = []
        for bi, b in enumerate(beams):
            v, i = logp[bi].topk(self.width)
            cand.extend((b.score + s, bi, t) for s, t in zip(v.tolist(), i.tolist()))
        return heapq.nlargest(self.width, cand)

    def step(self, beams: List[Beam], logits: torch.Tensor) -> List[Beam]:
        fresh = []
        for score, bi, tok in self._advance(beams, logits):
            row = self.pool.acquire()  # clean: each new beam carries its row out
            fresh.append(Beam(score, beams[bi].tokens + [tok], row))
        for b in beams:
            self.pool.release(b.row)
        return fresh

    def step_pruned(self, beams: List[Beam], logits: torch.Tensor, floor: float) -> List[Beam]:
        fresh = []
        for score, bi, tok in self._advance(beams, logits):
            row = self.pool.acquire()  # leak: candidates below the floor are skipped with their row
            if score < floor:
                continue
            fresh.append(Beam(score, beams[bi].tokens + [tok], row))
        for b in beams:
            self.pool.release(b.row)
        return fresh

    def run(self, model, prompt: torch.Tensor, max_len: int) -> List[int]:
        beams = self.start(model.prefill(prompt))  # clean: released after the loop, steps replace them
        done: List[Tuple[float, List[int]]] = []
        for _ in range(max_len):
            logits = model.decode([b.row for b in beams], [b.tokens[-1] for b in beams])
            beams = self.step(beams, logits)  # clean: near miss, step releases the rows it replaces
            live = []
            for b in beams:
                if b.tokens[-1] == self.eos:
                    done.append((self._norm(b), b.tokens))
                    self.pool.release(b.row)
                else:
                    live.append(b)
            beams = live
            if not beams:
                break
        for b in beams:
            done.append((self._norm(b), b.tokens))
            self.pool.release(b.row)
        return max(done)[1]

    def run_first_finished(self, model, prompt: torch.Tensor, max_len: int) -> Optional[List[int]]:
        beams = self.start(model.prefill(prompt))  # clean: the loop replaces them by way of step
        for _ in range(max_len):
            logits = model.decode([b.row for b in beams], [b.tokens[-1] for b in beams])
            beams = self.step(beams, logits)  # leak: on a finished beam only its own row is released before the return
            for b in beams:
                if b.tokens[-1] == self.eos:
                    self.pool.release(b.row)
                    return b.tokens
        for b in beams:
            self.pool.release(b.row)
        return None

    def rerank(self, prompts: torch.Tensor, scorer) -> List[float]:
        out = []
        rows = [self.pool.acquire() for _ in range(len(prompts))]  # clean: every row is released in the loop
        for row, p in zip(rows, prompts):
            out.append(float(scorer(row, p)))
            self.pool.release(row)
        return out

    def greedy(self, model, prompt: torch.Tensor, max_len: int) -> List[int]:
        row = self.pool.acquire()  # leak: the return at end of sequence comes before the release
        toks = [int(model.prefill(prompt).argmax())]
        while len(toks) < max_len:
            nxt = int(model.decode([row], [toks[-1]])[0].argmax())
            if nxt == self.eos:
                return toks
            toks.append(nxt)
        self.pool.release(row)
        return toks
