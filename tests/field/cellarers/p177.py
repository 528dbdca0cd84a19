"""Shared interrupt lines: handlers are registered on the least loaded vector."""
from contextlib import ExitStack


class VectorTable:
    def __init__(self, n):
        self.handlers = {v: [] for v in range(n)}

    def request_irq(self, handler, shared=True):
        order = sorted(self.handlers, key=lambda v: len(self.handlers[v]))
        for v in order:
            if shared or not self.handlers[v]:
                self.handlers[v].append(handler)
                return v
        raise OSError("no free vector")

    def free_irq(self, v, handler):
        self.handlers[v].remove(handler)

    def dispatch(self, v):
        return any(h() for h in list(self.handlers[v]))


class BlockDriver:
    def __init__(self, vectors, hw):
        self.vectors = vectors
        self.hw = hw
        self.vector = None

    def on_irq(self):
        return self.hw.ack()

    def attach(self):
        self.vector = self.vectors.request_irq(self.on_irq)  # clean: kept, freed by detach()
        self.hw.enable(self.vector)

    def detach(self):
        self.hw.disable()
        self.vectors.free_irq(self.vector, self.on_irq)

    def probe(self):
        v = self.vectors.request_irq(self.on_irq, shared=False)  # leak: a silent device keeps the handler
        self.hw.trigger(v)
        if not self.vectors.dispatch(v):
            return False
        self.vectors.free_irq(v, self.on_irq)
        return True


def loopback(vectors, hw, handlers):
    with ExitStack() as stack:
        for h in handlers:
            v = vectors.request_irq(h)  # clean: the stack frees it
            stack.callback(vectors.free_irq, v, h)
            hw.trigger(v)


def count_spurious(vectors, hw, handler, n):
    v = vectors.request_irq(handler)  # clean: freed after the count
    total = sum(not hw.fire(v) for _ in range(n))
    vectors.free_irq(v, handler)
    return total


def fire_each(vectors, hw, handlers):
    for h in handlers:
        v = vectors.request_irq(h)  # leak: handlers of silent devices continue without being freed
        if not hw.fire(v):
            continue
        vectors.free_irq(v, h)
