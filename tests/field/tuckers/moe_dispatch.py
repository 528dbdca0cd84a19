"""Expert dispatch: token rows are placed in per-expert capacity ranges of one big arena."""
import bisect
import logging
from contextlib import ExitStack
from typing import NamedTuple

import torch

log = logging.getLogger(__name__)


class Range(NamedTuple):
    start: int
    size: int


class RowArena:
    """First-fit allocator over rows of a preallocated activation tensor."""

    def __init__(self, rows, hidden, device="cuda"):
        self.data = torch.empty(rows, hidden, dtype=torch.bfloat16, device=device)
        self.holes = [Range(0, rows)]

    def carve(self, n):
        for i, h in enumerate(self.holes):
            if h.size >= n:
                if h.size == n:
                    del self.holes[i]
                else:
                    self.holes[i] = Range(h.start + n, h.size - n)
                return Range(h.start, n)
        return None

    def fill_in(self, rng):
        i = bisect.bisect(self.holes, rng)
        self.holes.insert(i, rng)
        self._merge(max(i - 1, 0))

    def _merge(self, i):
        last = i + 2
        while i + 1 < len(self.holes) and i < last:
            a, b = self.holes[i], self.holes[i + 1]
            if a.start + a.size != b.start:
                i += 1
                continue
            self.holes[i] = Range(a.start, a.size + b.size)
            del self.holes[i + 1]

    def view(self, rng):
        return self.data[rng.start : rng.start + rng.size]

    def regrow(self, rng, n):
        """Bigger range with the old rows copied; the old range goes back. None leaves rng untouched."""
        new = self.carve(n)  # clean: handed to the caller, the old range is filled in
        if new is None:
            return None
        self.view(new)[: rng.size].copy_(self.view(rng))
        self.fill_in(rng)
        return new

    def carve_all(self, sizes):
        """One range per size, or None and nothing taken."""
        got = []
        for n in sizes:
            r = self.carve(n)  # clean: filled in again on a failure, else handed over in the list
            if r is None:
                for g in got:
                    self.fill_in(g)
                return None
            got.append(r)
        return got


class Dispatcher:
    def __init__(self, arena, experts, capacity):
        self.arena = arena
        self.experts = experts
        self.capacity = capacity
        self.inflight = {}
        self.residual = {}
        self.dropped = 0

    def route(self, step, hidden, assign):
        """Place the rows of every expert, run them, keep the ranges for backward."""
        table = {}
        for e in range(len(self.experts)):
            idx = (assign == e).nonzero().flatten()
            if idx.numel() == 0:
                continue
            rng = self.arena.carve(min(idx.numel(), self.capacity))  # clean: kept in inflight, retire fills it in
            if rng is None:
                self.dropped += idx.numel()
                continue
            self.arena.view(rng).copy_(hidden[idx[: rng.size]])
            table[e] = (rng, idx[: rng.size])
        self.inflight[step] = table
        return table

    def retire(self, step):
        for rng, _ in self.inflight.pop(step, {}).values():
            self.arena.fill_in(rng)

    def route_topk(self, step, hidden, assign, weights, k):
        """The k heaviest experts; the others' ranges are not wanted."""
        table = {}
        for e in range(len(self.experts)):
            idx = (assign == e).nonzero().flatten()
            rng = self.arena.carve(self.capacity)  # leak: the experts cut from `best` lose their ranges
            if rng is None:
                break
            n = min(idx.numel(), rng.size)
            self.arena.view(rng)[:n].copy_(hidden[idx[:n]])
            table[e] = (rng, idx[:n])
        best = sorted(table, key=lambda e: -weights[e])[:k]
        self.inflight[step] = {e: table[e] for e in best}

    def keep_residual(self, step, rows):
        rng = self.arena.carve(rows.shape[0])  # clean: near miss, both add_residual and forget fill it in
        if rng is None:
            return
        self.arena.view(rng).copy_(rows)
        prev = self.residual.pop(step, None)
        if prev is not None:
            self.arena.fill_in(prev)
        self.residual[step] = rng

    def add_residual(self, step, out):
        rng = self.residual.pop(step, None)
        if rng is not None:
            out.add_(self.arena.view(rng))
            self.arena.fill_in(rng)
        return out

    def forget(self):
        for rng in self.residual.values():
            self.arena.fill_in(rng)
        self.residual = {}

    def run_expert(self, e, rows):
        rng = self.arena.carve(rows.shape[0])  # clean: replaced by regrow or kept, filled in once at the end
        if rng is None:
            return None
        x = self.arena.view(rng)
        x.copy_(rows)
        if rows.shape[0] < 64:
            bigger = self.arena.regrow(rng, 64)  # clean: near miss, becomes rng, which is filled in below
            if bigger is not None:
                rng = bigger
        out = self.experts[e](self.arena.view(rng)[: rows.shape[0]]).clone()
        self.arena.fill_in(rng)
        return out

    def run_padded(self, e, rows, pad):
        rng = self.arena.carve(rows.shape[0])  # clean: taken back by regrow or filled in when that fails
        if rng is None:
            return None
        self.arena.view(rng).copy_(rows)
        wide = self.arena.regrow(rng, pad)  # leak: the padded range is dropped, regrow only took back the old one
        if wide is None:
            self.arena.fill_in(rng)
            return None
        return self.experts[e](self.arena.view(wide))[: rows.shape[0]].clone()

    def balance(self, sizes):
        ranges = self.arena.carve_all(sizes)  # leak: the slice skips the first range when filling in
        if ranges is None:
            return 0.0
        norms = [self.arena.view(r).float().norm().item() for r in ranges]
        for r in ranges[1:]:
            self.arena.fill_in(r)
        return max(norms) - min(norms)

    def shuffle(self, blocks):
        with ExitStack() as stack:
            views = []
            for b in blocks:
                rng = self.arena.carve(b.shape[0])  # clean: near miss, the stack's callback fills it in
                if rng is None:
                    return None
                stack.callback(self.arena.fill_in, rng)
                self.arena.view(rng).copy_(b)
                views.append(self.arena.view(rng))
            return torch.cat(views[::-1])

    def shuffle_keep(self, blocks):
        stack = ExitStack()
        for b in blocks:
            rng = self.arena.carve(b.shape[0])  # leak: pop_all moves the callbacks to a stack that nobody closes
            if rng is None:
                stack.close()
                return None
            stack.callback(self.arena.fill_in, rng)
            self.arena.view(rng).copy_(b)
        stack.pop_all()
        stack.close()
        return len(blocks)


def token_loss(arena, logits, labels, chunk):
    total, pos = 0.0, 0
    while pos < logits.shape[0]:
        rng = arena.carve(min(chunk, logits.shape[0] - pos))  # leak: the break on a bad loss skips fill_in
        if rng is None:
            chunk //= 2
            if chunk == 0:
                return None
            continue
        x = arena.view(rng)
        x.copy_(logits[pos : pos + rng.size])
        loss = torch.nn.functional.cross_entropy(x.float(), labels[pos : pos + rng.size], reduction="sum")
        if loss.isnan():
            log.warning("nan at row %d", pos)
            break
        total += loss.item()
        pos += rng.size
        arena.fill_in(rng)
    return total
