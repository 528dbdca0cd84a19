"""Sequence slots of a batch: a request is admitted to a row and evicted from it."""
import torch


class BatchRows:
    def __init__(self, rows, max_len):
        self.tokens = torch.zeros(rows, max_len, dtype=torch.long)
        self.lengths = torch.full((rows,), -1, dtype=torch.long)

    @property
    def active(self):
        return int((self.lengths >= 0).sum())

    def admit(self, prompt):
        free = (self.lengths < 0).nonzero()
        if free.numel() == 0:
            return None
        row = int(free[0])
        self.tokens[row, : len(prompt)] = torch.tensor(prompt)
        self.lengths[row] = len(prompt)
        return row

    def evict(self, row):
        self.lengths[row] = -1
        self.tokens[row].zero_()


class Engine:
    def __init__(self, rows, step):
        self.rows = rows
        self.step = step
        self.requests = {}

    def add(self, rid, prompt):
        row = self.rows.admit(prompt)  # clean: kept by request, evicted by finish
        if row is None:
            return False
        self.requests[rid] = row
        return True

    def finish(self, rid):
        self.rows.evict(self.requests.pop(rid))

    def generate(self, prompt, n, eos):
        row = self.rows.admit(prompt)  # leak: an end-of-text token returns with the row
        if row is None:
            return []
        out = []
        for _ in range(n):
            token = self.step(row)
            if token == eos:
                return out
            out.append(token)
        self.rows.evict(row)
        return out

    def logprob(self, prompt):
        row = self.rows.admit(prompt)  # clean: evicted before the return
        if row is None:
            return None
        value = self.step(row)
        self.rows.evict(row)
        return value


def warm_batch(engine, prompts):
    for prompt in prompts:
        row = engine.rows.admit(prompt)  # leak: the row number goes nowhere
        if row is not None:
            engine.step(row)
