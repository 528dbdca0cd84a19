"""Sampling: top-k and top-p on buffers the sampler borrows from the runner."""
import torch


class LogitBuffers:
    def __init__(self, vocab):
        self.vocab = vocab
        self.rack = []

    def unrack(self, rows):
        for i, t in enumerate(self.rack):
            if t.shape[0] >= rows:
                return self.rack.pop(i)
        return torch.empty(rows, self.vocab)

    def rack_up(self, t):
        self.rack.append(t)


class Sampler:
    def __init__(self, buffers):
        self.buffers = buffers
        self.history = []
        self.last = None

    def __call__(self, logits, temperature, top_k=0):
        work = self.buffers.unrack(logits.shape[0])  # clean: near miss, chains of elif that all end in the same rack_up
        view = work[: logits.shape[0]]
        view.copy_(logits)
        if temperature == 0:
            ids = view.argmax(-1)
        elif top_k == 1:
            ids = view.argmax(-1)
        elif top_k > 1:
            ids = view.topk(top_k).indices[:, 0]
        else:
            ids = torch.multinomial(view.softmax(-1), 1)[:, 0]
        self.buffers.rack_up(work)
        return ids

    def greedy(self, logits):
        work = self.buffers.unrack(logits.shape[0])  # leak: a larger buffer is used in the else arm and not racked
        if work.shape[0] == logits.shape[0]:
            work.copy_(logits)
            ids = work.argmax(-1)
            self.buffers.rack_up(work)
        else:
            view = work[: logits.shape[0]]
            view.copy_(logits)
            ids = view.argmax(-1)
        return ids

    def keep_last(self, logits):
        if self.last is not None:
            self.buffers.rack_up(self.last)
        self.last = self.buffers.unrack(logits.shape[0])  # clean: near miss, the former one is racked before, reset racks the final one
        self.last[: logits.shape[0]].copy_(logits)

    def reset(self):
        if self.last is not None:
            self.buffers.rack_up(self.last)
        self.last = None
        while self.history:
            self.buffers.rack_up(self.history.pop())

    def remember(self, logits, depth):
        work = self.buffers.unrack(logits.shape[0])  # clean: near miss, the oldest is racked when there are too many
        work[: logits.shape[0]].copy_(logits)
        self.history.insert(0, work)
        while len(self.history) > depth:
            self.buffers.rack_up(self.history.pop())

    def entropy(self, logits):
        work = self.buffers.unrack(logits.shape[0])  # leak: assigned to a field nobody racks when it is large
        work[: logits.shape[0]].copy_(logits)
        p = work[: logits.shape[0]].softmax(-1)
        value = float(-(p * p.log()).sum())
        if value > 10.0:
            self.worst = work
        else:
            self.buffers.rack_up(work)
        return value

    def perplexity(self, logits, targets):
        if logits.shape[0] != len(targets):
            return None
        work = self.buffers.unrack(logits.shape[0])  # clean: near miss, the early return comes before it
        work[: logits.shape[0]].copy_(logits)
        logp = work[: logits.shape[0]].log_softmax(-1)
        value = float(-logp[torch.arange(len(targets)), targets].mean().exp())
        self.buffers.rack_up(work)
        return value
