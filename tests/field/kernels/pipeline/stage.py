"""Pipeline stages and their envelopes in flight."""
import torch
from torch import nn


class Stage(nn.Module):
    def __init__(self, body, box, last=False):
        super().__init__()
        self.body, self.box, self.last = body, box, last
        self.outbox = {}

    def forward(self, x):
        return self.body(x)

    def emit(self, mb, x):
        """Compute and seal the result; the last stage returns it as it is."""
        y = self(x)
        if self.last:
            return y
        env = self.box.draw()  # clean: near miss, kept under the microbatch until collect or abandon discards it
        env.data.copy_(y.detach())
        old = self.outbox.pop(mb, None)
        if old is not None:
            old.discard()
        self.outbox[mb] = env
        return None

    def collect(self, mb):
        env = self.outbox.pop(mb, None)
        if env is None:
            return None
        out = env.data.clone()
        env.discard()
        return out

    def abandon(self):
        while self.outbox:
            _, env = self.outbox.popitem()
            env.discard()

    def seal(self, y):
        env = self.box.draw_now()  # clean: handed to the caller, or None
        if env is not None:
            env.data.copy_(y)
        return env

    def broadcast(self, y, readers):
        env = self.seal(y)  # leak: when no reader accepts it the loop falls through without discard
        if env is None:
            return False
        for r in readers:
            if r.ready():
                r.deliver(env.data)
                env.discard()
                return True
        return False

    def broadcast_all(self, y, readers):
        env = self.seal(y)  # clean: near miss, readers see only the data and the discard follows the loop
        if env is None:
            return 0
        n = 0
        for r in readers:
            if not r.ready():
                continue
            r.deliver(env.data.clone())
            n += 1
        env.discard()
        return n

    def dry_run(self, x):
        env = self.seal(self(x).detach())  # leak: only the shape of the envelope's data leaves
        return None if env is None else tuple(env.data.shape)


class ReplayStage(Stage):
    """Keeps the newest envelope of each microbatch for replays."""

    def __init__(self, *a, **kw):
        super().__init__(*a, **kw)
        self.history = {}

    def record(self, mb, x):
        env = self.seal(self(x).detach())  # leak: an envelope already in the history is replaced without discard
        if env is not None:
            self.history[mb] = env

    def record_once(self, mb, x):
        if mb in self.history:
            return False
        env = self.seal(self(x).detach())  # clean: near miss, new keys only, forget discards it
        if env is None:
            return False
        self.history[mb] = env
        return True

    def replay(self, mb):
        env = self.history.get(mb)
        return None if env is None else env.data.clone()

    def forget(self):
        for env in self.history.values():
            env.discard()
        self.history = {}

    def abandon(self):
        super().abandon()
        self.forget()
