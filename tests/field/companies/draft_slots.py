# slots for the draft tokens of speculative decoding
from collections import namedtuple
import torch

Proposal = namedtuple("Proposal", "seq slots tokens")


class SlotStack:
    """LIFO of integer slot ids, backed by a tensor."""

    def __init__(self, n):
        self.ids = torch.arange(n - 1, -1, -1)
        self.top = n

    def take(self, k):
        if k > self.top:
            return None
        self.top -= k
        return self.ids[self.top : self.top + k].clone()

    def return_(self, slots):
        k = slots.numel()
        self.ids[self.top : self.top + k] = slots
        self.top += k


class Drafter:
    def __init__(self, model, stack, k, adaptive=False):
        self.model = model
        self.stack = stack
        self.k = k
        self.adaptive = adaptive
        self.open = {}

    def propose(self, seq, hidden):
        if seq in self.open:
            self.drop(seq)
        slots = self.stack.take(self.k)  # clean: the proposal is kept, accept() and drop() return the slots
        if slots is None:
            return None
        tokens = self.model(hidden, slots).argmax(-1)
        p = Proposal(seq, slots, tokens)
        self.open[seq] = p
        return p

    def accept(self, seq, n):
        p = self.open.pop(seq)
        kept, rest = p.slots[:n], p.slots[n:]
        self.stack.return_(rest)
        self.stack.return_(kept)
        return p.tokens[:n]

    def drop(self, seq):
        p = self.open.pop(seq, None)
        if p:
            self.stack.return_(p.slots)

    def verify_now(self, hidden, target):
        slots = self.stack.take(self.k)  # leak: only the rejected tail is returned
        if slots is None:
            return hidden.new_empty(0)
        tokens = self.model(hidden, slots).argmax(-1)
        n = int((tokens == target).cumprod(0).sum())
        self.stack.return_(slots[n:])
        return tokens[:n]

    def verify_split(self, hidden, target):
        slots = self.stack.take(self.k)  # clean: near miss, head and tail are both returned
        if slots is None:
            return hidden.new_empty(0)
        tokens = self.model(hidden, slots).argmax(-1)
        n = int((tokens == target).cumprod(0).sum())
        self.stack.return_(slots[n:])
        self.stack.return_(slots[:n])
        return tokens[:n]

    def depth(self, hidden):
        extra = None
        if self.adaptive:
            extra = self.stack.take(1)  # leak: returned for a confident draft only
        score = float(self.model(hidden, extra).softmax(-1).max())
        if extra is not None and score > 0.5:
            self.stack.return_(extra)
        return self.k + 1 if score > 0.5 else self.k

    def depth2(self, hidden):
        extra = self.stack.take(1) if self.adaptive else None  # clean: near miss, None or returned
        score = float(self.model(hidden, extra).softmax(-1).max())
        if extra is not None:
            self.stack.return_(extra)
        return self.k + (score > 0.5)

    def tree(self, hidden, widths):
        levels = []
        for w in widths:
            s = self.stack.take(w)  # leak: the shortage returns [] while upper levels hold their slots
            if s is None:
                return []
            levels.append(s)
        out = [self.model(hidden, s).argmax(-1) for s in levels]
        for s in levels:
            self.stack.return_(s)
        return out

    def tree_partial(self, hidden, widths):
        levels = []
        for w in widths:
            s = self.stack.take(w)  # clean: near miss, the break only shortens the tree and all levels are returned
            if s is None:
                break
            levels.append(s)
        out = [self.model(hidden, s).argmax(-1) for s in levels]
        while levels:
            self.stack.return_(levels.pop())
        return out

    def tree_cat(self, hidden, w1, w2):
        a = self.stack.take(w1)  # clean: near miss, the joined tensor holds the same slots
        if a is None:
            return None
        b = self.stack.take(w2)  # clean: near miss, the joined tensor holds the same slots
        if b is None:
            self.stack.return_(a)
            return None
        both = torch.cat([a, b])
        out = self.model(hidden, both)
        self.stack.return_(both)
        return out

    def resample(self, seq, hidden):
        self.drop(seq)
        p = self.propose(seq, hidden)  # clean: kept in the open table
        return p is not None

    def reset(self):
        for seq in list(self.open):
            self.drop(seq)


class LookaheadDrafter(Drafter):
    def __init__(self, model, stack, k, window):
        Drafter.__init__(self, model, stack, k)
        self.window = [stack.take(1) for _ in range(window)]  # leak: close() clears the list without returning them
        self.anchor = stack.take(1)  # clean: close() returns it

    def slide(self):
        oldest = self.window.pop(0)
        self.stack.return_(oldest)
        self.window.append(self.stack.take(1))  # leak: goes into the window, which close() clears

    def close(self):
        self.stack.return_(self.anchor)
        self.anchor = None
        self.window.clear()
