# n-gram draft cache; every n-gram owns a cell of a shared arena
import random
import sys
from collections import OrderedDict, defaultdict

import torch


class CellArena:
    def __init__(self, n, width):
        self.cells = torch.full((n, width), -1, dtype=torch.long)
        self.free = list(range(n))
        self.n = n

    def new_cell(self):
        try:
            return self.free.pop()
        except IndexError:
            return None

    def del_cell(self, c):
        self.cells[c].fill_(-1)
        self.free.append(c)

    def new_cells(self, k):
        out = []
        for _ in range(k):
            c = self.new_cell()  # leak: a short supply gives an empty list and forgets the cells gathered
            if c is None:
                return []
            out.append(c)
        return out

    def new_cells_upto(self, k):
        out = []
        for _ in range(k):
            c = self.new_cell()  # clean: near miss, the caller gets as many as there were
            if c is None:
                break
            out.append(c)
        return out


class NgramCache:
    def __init__(self, arena, n=2, cap=1000):
        self.arena = arena
        self.n = n
        self.cap = cap
        self.lru = OrderedDict()
        self.temp = defaultdict(list)

    def _key(self, toks):
        return tuple(toks[-self.n:])

    def learn(self, toks, nxt):
        k = self._key(toks)
        if k in self.lru:
            self.lru.move_to_end(k)
        else:
            if len(self.lru) >= self.cap:
                self.pop_oldest()
            c = self.arena.new_cell()  # clean: near miss, only keys that are not there get one, and pop_oldest deletes it
            if c is None:
                return False
            self.lru[k] = c
        cell = self.arena.cells[self.lru[k]]
        cell[:-1] = cell[1:].clone()
        cell[-1] = nxt
        return True

    def pop_oldest(self):
        _, c = self.lru.popitem(last=False)
        self.arena.del_cell(c)

    def draft(self, toks, k):
        c = self.lru.get(self._key(toks))
        if c is None:
            return []
        row = self.arena.cells[c]
        return row[row >= 0][-k:].tolist()

    def flush(self):
        while self.lru:
            self.pop_oldest()
        for cells in self.temp.values():
            for c in cells:
                self.arena.del_cell(c)
        self.temp.clear()

    def learn_temp(self, rid, toks):
        c = self.arena.new_cell()  # clean: end_temp and flush delete the cells of the list
        if c is None:
            return
        w = min(len(toks), self.arena.cells.shape[1])
        self.arena.cells[c, :w] = torch.tensor(toks[:w])
        self.temp[rid].append(c)

    def end_temp(self, rid):
        for c in self.temp.pop(rid, []):
            self.arena.del_cell(c)

    def bulk(self, rows):
        cells = self.arena.new_cells(len(rows))  # clean: every cell becomes an entry of the table or is deleted
        n = 0
        for c, r in zip(cells, rows):
            k = self._key(r)
            if k in self.lru:
                self.arena.del_cell(c)
                continue
            self.arena.cells[c, 0] = r[-1]
            self.lru[k] = c
            n += 1
        return n

    def bulk_fast(self, rows):
        cells = self.arena.new_cells_upto(len(rows))  # leak: rows already known continue and their cell is lost
        for c, r in zip(cells, rows):
            k = self._key(r)
            if k in self.lru:
                continue
            self.arena.cells[c, 0] = r[-1]
            self.lru[k] = c
        return len(cells)

    def probe(self, toks):
        c = self.arena.new_cell()  # clean: deleted after the comparison
        if c is None:
            return 0.0
        w = min(len(toks), self.arena.cells.shape[1])
        self.arena.cells[c, :w] = torch.tensor(toks[:w])
        hit = self.lru.get(self._key(toks))
        score = 0.0
        if hit is not None:
            score = float((self.arena.cells[c] == self.arena.cells[hit]).float().mean())
        self.arena.del_cell(c)
        return score

    def probe_known(self, toks):
        c = self.arena.new_cell()  # leak: an unknown n-gram returns zero with the cell taken
        if c is None:
            return 0.0
        w = min(len(toks), self.arena.cells.shape[1])
        self.arena.cells[c, :w] = torch.tensor(toks[:w])
        hit = self.lru.get(self._key(toks))
        if hit is None:
            return 0.0
        score = float((self.arena.cells[c] == self.arena.cells[hit]).float().mean())
        self.arena.del_cell(c)
        return score

    def shuffle_test(self, rounds):
        cell = None
        ok = 0
        for _ in range(rounds):
            cell = self.arena.new_cell()  # leak: the cells of all rounds but the last are overwritten
            if cell is None:
                break
            self.arena.cells[cell].copy_(torch.randperm(self.arena.cells.shape[1]))
            ok += int(self.arena.cells[cell, 0] != 0)
        if cell is not None:
            self.arena.del_cell(cell)
        return ok

    def shuffle_one(self, rounds):
        cell = None
        ok = 0
        for _ in range(rounds):
            if cell is None:
                cell = self.arena.new_cell()  # clean: near miss, a cell in hand is used again instead of taking another
                if cell is None:
                    break
            self.arena.cells[cell].copy_(torch.randperm(self.arena.cells.shape[1]))
            ok += int(self.arena.cells[cell, 0] != 0)
        if cell is not None:
            self.arena.del_cell(cell)
        return ok


def read_corpus(path, cache, stop_at):
    fd = sys.stdin if path == "-" else open(path)  # clean: near miss, only a real file is closed, and on both ends
    n = 0
    for line in fd:
        toks = [int(t) for t in line.split()]
        if len(toks) <= cache.n:
            continue
        cache.learn(toks[:-1], toks[-1])
        n += 1
        if n == stop_at:
            break
    if fd is not sys.stdin:
        fd.close()
    return n


def write_stats(path, cache, verbose):
    fd = open(path, "w")  # leak: closed in the verbose case only
    fd.write("%d\n" % len(cache.lru))
    if verbose:
        for k in random.sample(list(cache.lru), min(10, len(cache.lru))):
            fd.write("%r\n" % (k,))
        fd.close()
