"""Scratch stack for draft models: mark the top, push, rewind."""


class ScratchStack:
    def __init__(self, size):
        self.size = size
        self._top = 0
        self._marks = []

    def mark(self):
        self._marks.append(self._top)
        return len(self._marks) - 1

    def push(self, nbytes):
        if self._top + nbytes > self.size:
            raise MemoryError(nbytes)
        at = self._top
        self._top += nbytes
        return at

    def rewind(self, level):
        self._top = self._marks[level]
        del self._marks[level:]


class Speculator:
    def __init__(self, stack: ScratchStack, draft, target):
        self.stack = stack
        self.draft = draft
        self.target = target

    def propose(self, ctx, k):
        level = self.stack.mark()  # clean: rewound in finally
        try:
            logits = self.stack.push(k * self.draft.vocab)  # clean: freed by the rewind of its mark
            return self.draft.run(ctx, k, logits)
        finally:
            self.stack.rewind(level)

    def verify(self, ctx, tokens):
        level = self.stack.mark()  # leak: with no tokens it returns without rewinding
        if not tokens:
            return []
        buf = self.stack.push(len(tokens) * 4)  # clean: freed by the rewind of its mark
        accepted = self.target.check(ctx, tokens, buf)
        self.stack.rewind(level)
        return accepted

    def round(self, ctx, k):
        while True:
            level = self.stack.mark()  # leak: the return from the loop leaves the mark
            tokens = self.draft.sample(ctx, k)
            if self.target.accepts(ctx, tokens):
                return tokens
            self.stack.rewind(level)

    def measure(self, ctx):
        level = self.stack.mark()  # clean: rewound on both branches
        if self.draft.cold:
            self.stack.rewind(level)
            return 0.0
        rate = self.draft.rate(ctx)
        self.stack.rewind(level)
        return rate
