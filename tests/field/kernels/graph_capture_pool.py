"""Static input slots and captured CUDA graphs for decode steps."""
import time
import weakref

import torch


class StaticSlots:
    """A set of free slot numbers for one batch size."""

    def __init__(self, n, batch, dim):
        self.tensors = [torch.zeros(batch, dim) for _ in range(n)]
        self.vacant = set(range(n))
        self.batch = batch

    def occupy(self):
        if not self.vacant:
            return None
        return self.vacant.pop()  # clean: handed to the caller

    def evict(self, slot):
        self.tensors[slot].zero_()
        self.vacant.add(slot)

    def occupy_specific(self, slot):
        if slot not in self.vacant:
            return False
        self.vacant.remove(slot)  # clean: the slot named by the caller is now the caller's
        return True


class CapturedStep:
    def __init__(self, graph, slot, output):
        self.graph = graph
        self.slot = slot
        self.output = output
        self.on_drop = None

    def drop(self):
        if self.on_drop is not None:
            self.on_drop(self.slot)
            self.on_drop = None


class GraphRunner:
    max_tries = 5

    def __init__(self, model, slots):
        self.model = model
        self.slots = slots
        self.steps = {}

    def _occupy_retry(self):
        for attempt in range(self.max_tries):
            slot = self.slots.occupy()  # clean: near miss, a failed attempt holds nothing and the first success is returned
            if slot is not None:
                return slot
            self._drop_oldest()
            time.sleep(0.001 * attempt)
        return None

    def _occupy_even(self):
        """A slot with an even number, as the paired kernels want."""
        for _ in range(self.max_tries):
            slot = self.slots.occupy()  # leak: odd slots are passed over without evict
            if slot is None:
                return None
            if slot % 2 == 0:
                return slot
        return None

    def _drop_oldest(self):
        if self.steps:
            key = next(iter(self.steps))
            self.steps.pop(key).drop()

    def capture(self, key):
        if key in self.steps:
            return self.steps[key]
        slot = self._occupy_retry()  # clean: near miss, the drop callback of the step evicts it
        if slot is None:
            return None
        x = self.slots.tensors[slot]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.model(x)
        step = CapturedStep(graph, slot, out)
        step.on_drop = self.slots.evict
        self.steps[key] = step
        return step

    def capture_paired(self, key):
        slot = self._occupy_even()  # leak: the step is made without its on_drop callback so drop evicts nothing
        if slot is None:
            return None
        x = self.slots.tensors[slot]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.model(x)
        step = CapturedStep(graph, slot, out)
        old = self.steps.pop(key, None)
        if old is not None:
            old.drop()
        self.steps[key] = step
        return step

    def replay(self, key, x):
        step = self.steps.get(key)
        if step is None:
            return None
        self.slots.tensors[step.slot].copy_(x)
        step.graph.replay()
        return step.output.clone()

    def eager(self, x):
        slot = self.slots.occupy()  # clean: near miss, the same None test guards the use and the evict
        src = x
        if slot is not None:
            src = self.slots.tensors[slot]
            src.copy_(x)
        y = self.model(src)
        if slot is not None:
            self.slots.evict(slot)
        return y

    def eager_fast(self, x):
        slot = self.slots.occupy()  # leak: slot number zero is falsy, so it is never evicted
        if slot:
            buf = self.slots.tensors[slot]
            buf.copy_(x)
            y = self.model(buf)
            self.slots.evict(slot)
            return y
        return self.model(x)

    def rehearse(self, slot, x):
        if not self.slots.occupy_specific(slot):  # clean: evicted on both ways out
            return False
        self.slots.tensors[slot].copy_(x)
        ok = bool(torch.isfinite(self.model(self.slots.tensors[slot])).all())
        self.slots.evict(slot)
        return ok

    def check_shapes(self, slot, x):
        if self.slots.occupy_specific(slot):  # leak: the mismatch branch returns with the slot occupied
            if x.shape != self.slots.tensors[slot].shape:
                return False
            self.slots.evict(slot)
        return True

    def borrow_for(self, owner):
        """A slot tied to the lifetime of ``owner``."""
        slot = self._occupy_retry()  # clean: near miss, the finalizer evicts it when the owner dies
        if slot is not None:
            weakref.finalize(owner, self.slots.evict, slot)
        return slot

    def close(self):
        for step in self.steps.values():
            step.drop()
        self.steps.clear()
