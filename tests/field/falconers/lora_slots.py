"""LoRA adapters in a fixed number of GPU slots. Adapters with users are not evicted."""
import contextlib
import threading
from collections import OrderedDict

import torch


class NoSlot(RuntimeError):
    pass


class AdapterMissing(KeyError):
    pass


class RankTooLarge(ValueError):
    pass


class Slots:
    def __init__(self, count, rank, width):
        self.free = list(range(count))
        self.weights = torch.zeros(count, rank, width, dtype=torch.bfloat16, device="cuda")

    def take(self):
        if not self.free:
            raise NoSlot()
        return self.free.pop()  # clean: returned to the caller

    def take_pair(self):
        """Two neighbouring slots for an adapter of double rank, or None."""
        if not self.free:
            return None
        first = self.free.pop(0)  # leak: without a free neighbour None is returned and the first is not put back
        if first + 1 not in self.free:
            return None
        self.free.remove(first + 1)
        return first, first + 1

    def put(self, slot):
        self.free.append(slot)
        self.free.sort()

    def fill(self, slot, weights):
        rank = weights.shape[0]
        self.weights[slot, :rank].copy_(weights, non_blocking=True)
        self.weights[slot, rank:].zero_()


class Adapter:
    def __init__(self, name, slot):
        self.name = name
        self.slot = slot
        self.users = 0
        self.retired = False


class LoraManager:
    def __init__(self, source, slots, max_rank):
        self.source = source          # name -> tensor, raises AdapterMissing
        self.slots = slots
        self.max_rank = max_rank
        self.loaded = OrderedDict()
        self.wide = {}
        self.lock = threading.RLock()

    def _make_slot(self):
        if self.slots.free:
            return self.slots.take()  # clean: returned to the caller
        for name, adapter in self.loaded.items():
            if adapter.users == 0:
                del self.loaded[name]
                return adapter.slot
        raise NoSlot("all adapters are in use")

    def acquire(self, name):
        with self.lock:
            adapter = self.loaded.get(name)
            if adapter is None:
                slot = self._make_slot()  # leak: an adapter of too large a rank raises and only the missing one is handled
                try:
                    weights = self.source(name)
                except AdapterMissing:
                    self.slots.put(slot)
                    raise
                if weights.shape[0] > self.max_rank:
                    raise RankTooLarge("%s has rank %d" % (name, weights.shape[0]))
                self.slots.fill(slot, weights)
                adapter = Adapter(name, slot)
                self.loaded[name] = adapter
            self.loaded.move_to_end(name)
            adapter.users += 1
            return adapter

    def release(self, adapter):
        with self.lock:
            adapter.users -= 1
            if adapter.retired and adapter.users == 0:
                self.slots.put(adapter.slot)

    def unload(self, name):
        with self.lock:
            adapter = self.loaded.pop(name, None)
            if adapter is None:
                return
            if adapter.users:
                adapter.retired = True
            else:
                self.slots.put(adapter.slot)

    def reload(self, name):
        with self.lock:
            adapter = self.loaded.get(name)
            if adapter is None:
                return False
            weights = self.source(name)
            slot = self.slots.take()  # leak: the next reload overwrites the slot in the adapter, nobody puts the old one
            self.slots.fill(slot, weights)
            adapter.slot = slot
            return True

    def load_wide(self, name):
        with self.lock:
            if name in self.wide:
                return True
            pair = self.slots.take_pair()  # clean: near miss, in the table until unload_wide puts both
            if pair is None:
                return False
            self.wide[name] = pair
        left, right = self.source(name).chunk(2)
        self.slots.fill(pair[0], left)
        self.slots.fill(pair[1], right)
        return True

    def unload_wide(self, name):
        with self.lock:
            for slot in self.wide.pop(name, ()):
                self.slots.put(slot)

    @contextlib.contextmanager
    def using(self, name):
        adapter = self.acquire(name)  # clean: released in the finally
        try:
            yield adapter
        finally:
            self.release(adapter)

    def preload(self, names):
        count = 0
        for name in names:
            try:
                adapter = self.acquire(name)  # clean: an acquire that raises counts no use
            except (AdapterMissing, RankTooLarge):
                continue
            self.release(adapter)
            count += 1
        return count

    def average(self, names):
        with contextlib.ExitStack() as stack:
            total = None
            for name in names:
                adapter = self.acquire(name)  # clean: near miss, the exit stack releases it also when a later one is missing
                stack.callback(self.release, adapter)
                part = self.slots.weights[adapter.slot].float()
                total = part if total is None else total + part
            return total / len(names)

    def norm(self, name):
        with self.using(name) as adapter:  # clean: the with statement releases it
            return float(self.slots.weights[adapter.slot].float().norm())


class Request:
    def __init__(self, id, adapter_name, tokens, deadline):
        self.id = id
        self.adapter_name = adapter_name
        self.tokens = tokens
        self.deadline = deadline
        self.adapter = None

    def bind(self, manager):
        self.adapter = manager.acquire(self.adapter_name)  # leak: expire() filters late requests out without finishing them

    def finish(self, manager):
        if self.adapter is not None:
            manager.release(self.adapter)
            self.adapter = None


class BatchBuilder:
    def __init__(self, manager, budget):
        self.manager = manager
        self.budget = budget
        self.adapters = []
        self.slot_of_token = []

    def add(self, req):
        if len(self.slot_of_token) + len(req.tokens) > self.budget:
            return False
        adapter = self.manager.acquire(req.adapter_name)  # leak: undo_last() drops the adapter from the list unreleased
        self.adapters.append((adapter, len(req.tokens)))
        self.slot_of_token.extend([adapter.slot] * len(req.tokens))
        return True

    def undo_last(self):
        _, count = self.adapters.pop()
        del self.slot_of_token[-count:]

    def done(self):
        for adapter, _ in self.adapters:
            self.manager.release(adapter)
        self.adapters.clear()
        self.slot_of_token.clear()


class Engine:
    def __init__(self, manager, model, budget=8192):
        self.manager = manager
        self.model = model
        self.budget = budget
        self.waiting = []

    def enqueue(self, req):
        req.bind(self.manager)
        self.waiting.append(req)

    def expire(self, now):
        before = len(self.waiting)
        self.waiting = [r for r in self.waiting if r.deadline > now]
        return before - len(self.waiting)

    def cancel(self, req_id):
        for i, req in enumerate(self.waiting):
            if req.id == req_id:
                del self.waiting[i]
                req.finish(self.manager)
                return True
        return False

    def step(self):
        batch = BatchBuilder(self.manager, self.budget)
        taken = []
        try:
            while self.waiting and batch.add(self.waiting[0]):
                taken.append(self.waiting.pop(0))
                if self.model.kv_pressure(taken) > 0.95 and len(taken) > 1:
                    batch.undo_last()
                    self.waiting.insert(0, taken.pop())
                    break
            if taken:
                self.model.forward(taken, torch.tensor(batch.slot_of_token))
        finally:
            batch.done()
        for req in taken:
            req.finish(self.manager)
        return len(taken)
