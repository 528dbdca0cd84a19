"""Allocation by step: everything a step took is freed at the end of the step."""
from contextlib import contextmanager


class StepAllocator:
    def __init__(self):
        self.next_handle = 0
        self.live = set()
        self.step = []

    def take(self):
        self.next_handle += 1
        self.live.add(self.next_handle)
        return self.next_handle

    def untake(self, handle):
        self.live.discard(handle)


class Step:
    """Notes each handle it takes; finish() gives back all of them."""

    def __init__(self, allocator):
        self.allocator = allocator
        self.notes = []
        self.named = {}

    def temp(self):
        handle = self.allocator.take()  # clean: near miss, noted, so callers need not give it back
        self.notes.append(handle)
        return handle

    def named_temp(self, name):
        if name not in self.named:
            handle = self.allocator.take()  # clean: near miss, one a name, finish empties the names too
            self.named[name] = handle
        return self.named[name]

    def finish(self):
        for handle in self.notes:
            self.allocator.untake(handle)
        self.notes.clear()
        while self.named:
            _, handle = self.named.popitem()
            self.allocator.untake(handle)


@contextmanager
def step(allocator):
    s = Step(allocator)
    try:
        yield s
    finally:
        s.finish()


class ForgetfulStep:
    def __init__(self, allocator):
        self.allocator = allocator
        self.notes = []

    def temp(self):
        handle = self.allocator.take()  # leak: finish replaces the list of notes without giving anything back
        self.notes.append(handle)
        return handle

    def temp_unless(self, cold):
        handle = self.allocator.take()  # leak: the cold ones are neither noted nor returned
        if cold:
            return None
        self.allocator.untake(handle)
        return handle

    def finish(self):
        n = len(self.notes)
        self.notes = []
        return n


def attention_step(allocator, layers):
    total = 0
    with step(allocator) as s:
        for layer in range(layers):
            q = s.temp()  # clean: near miss, the step gives it back when it finishes
            k = s.named_temp(f"k{layer}")  # clean: near miss, the step gives it back when it finishes
            if q > 1000:
                break
            total += q * k
    return total


def mlp_step(allocator, layers):
    handles = set()
    for _ in range(layers):
        handles.add(allocator.take())  # clean: near miss, kept in a set that is emptied by pop
    total = sum(handles)
    while handles:
        allocator.untake(handles.pop())
    return total


def norm_step(allocator, layers):
    handles = set()
    for _ in range(layers):
        handles.add(allocator.take())  # leak: only the smallest is given back
    allocator.untake(min(handles))
    return len(handles)
