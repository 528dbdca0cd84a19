import torch


class DraftBank:
    """Row views of one tensor, handed back by view."""

    def __init__(self, rows, vocab):
        self.base = torch.zeros(rows, vocab)
        self.rows = list(range(rows))

    def loan(self):
        return self.base[self.rows.pop()]

    def payback(self, view):
        self.rows.append(view.storage_offset() // self.base.shape[1])


class Speculator:
    def __init__(self, bank, k):
        self.bank = bank
        self.k = k
        self.draft = None
        self.target = None
        self.accepted = 0

    def start(self):
        if self.draft is not None:
            return
        self.draft = self.bank.loan()  # leak: verify exchanges the two and drops the one behind
        self.target = self.bank.loan()  # clean: becomes the draft in verify, stop pays it back

    def propose(self, model):
        self.draft.copy_(model(self.k))
        return int(self.draft.argmax())

    def verify(self, model):
        if self.target is None:
            return False
        self.target.copy_(model(self.k))
        same = bool(self.draft.argmax() == self.target.argmax())
        self.accepted += same
        if not same:
            self.draft, self.target = self.target, None
        return same

    def stop(self):
        for view in (self.draft, self.target):
            if view is not None:
                self.bank.payback(view)
        self.draft = self.target = None
        return self.accepted


class Sampler:
    def __init__(self, bank):
        self.bank = bank
        self.bias = {}
        self.noise = bank.loan()  # clean: close pays it back

    def set_bias(self, rid, values):
        if rid not in self.bias:
            self.bias[rid] = self.bank.loan()  # leak: prune rebuilds the dict without the dead ones
        self.bias[rid].copy_(values)

    def sample(self, rid, logits):
        work = self.bank.loan()  # clean: paid back below
        work.copy_(logits)
        if rid in self.bias:
            work += self.bias[rid]
        self.noise.uniform_()
        token = int((work + self.noise).argmax())
        self.bank.payback(work)
        return token

    def prune(self, alive):
        self.bias = {rid: self.bias[rid] for rid in alive if rid in self.bias}

    def close(self):
        for view in self.bias.values():
            self.bank.payback(view)
        self.bias = {}
        self.bank.payback(self.noise)
