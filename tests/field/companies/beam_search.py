"""Beam search over pooled hypothesis rows (quick research code)."""
import torch


class RowPool:
    def __init__(self, rows, width):
        self.data = torch.zeros(rows, width, dtype=torch.long)
        self.free = list(range(rows))
        self.refs = [0] * rows

    def new_row(self):
        r = self.free.pop()  # clean: handed to the caller
        self.refs[r] = 1
        return r

    def keep(self, r):
        self.refs[r] += 1
        return r

    def drop(self, r):
        self.refs[r] -= 1
        if self.refs[r] == 0:
            self.free.append(r)


class Beam:
    def __init__(self, row, score, length=0):
        self.row = row
        self.score = score
        self.length = length


def expand(pool, beam, tok, logp):
    r = pool.new_row()  # clean: in the new beam, which goes to the caller
    pool.data[r].copy_(pool.data[beam.row])
    pool.data[r, beam.length] = tok
    return Beam(r, beam.score + logp, beam.length + 1)


def search(pool, model, width, steps, eos):
    beams = [Beam(pool.new_row(), 0.0)]  # clean: near miss, every generation drops the one before
    for _ in range(steps):
        cand = []
        for b in beams:
            lp, tk = model(pool.data[b.row]).topk(width)
            for l, t in zip(lp.tolist(), tk.tolist()):
                cand.append(expand(pool, b, t, l))  # clean: near miss, those cut are dropped, those kept are the next beams
        cand.sort(key=lambda c: -c.score)
        for b in beams + cand[width:]:
            pool.drop(b.row)
        beams = cand[:width]
    best = pool.data[beams[0].row].clone()
    for b in beams:
        pool.drop(b.row)
    return best


def search_pruned(pool, model, width, steps, eos):
    beams = [Beam(pool.new_row(), 0.0)]  # leak: the generation before is replaced, not dropped
    for _ in range(steps):
        cand = []
        for b in beams:
            lp, tk = model(pool.data[b.row]).topk(width)
            for l, t in zip(lp.tolist(), tk.tolist()):
                cand.append(expand(pool, b, t, l))  # leak: the slice cuts the tail of the candidates
        cand.sort(key=lambda c: -c.score)
        beams = cand[:width]
    best = pool.data[beams[0].row].clone()
    for b in beams:
        pool.drop(b.row)
    return best


def search_eos(pool, model, width, steps, eos):
    beam = Beam(pool.new_row(), 0.0)  # leak: an eos in the first step returns with the row
    for _ in range(steps):
        lp, tk = model(pool.data[beam.row]).topk(1)
        if int(tk[0]) == eos:
            return pool.data[beam.row].clone()
        nxt = expand(pool, beam, int(tk[0]), float(lp[0]))  # leak: the eos in a later step returns with it
        pool.drop(beam.row)
        beam = nxt
    out = pool.data[beam.row].clone()
    pool.drop(beam.row)
    return out


def search_eos_break(pool, model, width, steps, eos):
    beam = Beam(pool.new_row(), 0.0)  # clean: near miss, eos breaks to the drop
    for _ in range(steps):
        lp, tk = model(pool.data[beam.row]).topk(1)
        if int(tk[0]) == eos:
            break
        nxt = expand(pool, beam, int(tk[0]), float(lp[0]))  # clean: near miss, it is the beam that is dropped later
        pool.drop(beam.row)
        beam = nxt
    out = pool.data[beam.row].clone()
    pool.drop(beam.row)
    return out


class Hypotheses:
    def __init__(self, pool, n):
        self.pool = pool
        self.n = n
        self.items = []

    def add(self, beam):
        self.items.append((beam.score, self.pool.keep(beam.row)))  # clean: near miss, the worst is dropped and clear() does the rest
        if len(self.items) > self.n:
            self.items.sort()
            _, worst = self.items.pop(0)
            self.pool.drop(worst)

    def add_scored(self, beam, floor):
        row = self.pool.keep(beam.row)  # leak: a score under the floor returns False with the reference
        if beam.score < floor:
            return False
        self.items.append((beam.score, row))
        return True

    def best(self):
        return max(self.items) if self.items else None

    def clear(self):
        for _, row in self.items:
            self.pool.drop(row)
        self.items = []


class NBest(Hypotheses):
    def __init__(self, pool, n):
        super().__init__(pool, n)
        self.extra = {}

    def note(self, name, beam):
        self.extra[name] = self.pool.keep(beam.row)  # leak: neither a second note of the name nor clear() drops it


def score_only(pool, model, prompt):
    r = pool.new_row()  # leak: the empty prompt returns at once
    n = len(prompt)
    if n == 0:
        return 0.0
    pool.data[r, :n] = torch.tensor(prompt)
    s = float(model(pool.data[r]).max())
    pool.drop(r)
    return s


def score_pair(pool, model, a, b):
    rows = [pool.new_row() for _ in (a, b)]  # clean: both are dropped
    for r, p in zip(rows, (a, b)):
        pool.data[r, : len(p)] = torch.tensor(p)
    s = [float(model(pool.data[r]).max()) for r in rows]
    for r in rows:
        pool.drop(r)
    return s
