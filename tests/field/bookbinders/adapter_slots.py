"""Low-rank adapters in a fixed number of device slots, loaded through pinned host pages."""
import queue
import threading
from collections import OrderedDict, deque
from contextlib import ExitStack, contextmanager


class BankFull(Exception): pass
class AdapterMissing(Exception): pass
class OutOfPages(Exception): pass


class HostPages:
    def __init__(self, n):
        self._lock = threading.Lock()
        self._free = list(range(n))
        self.low = n

    def get(self, n):
        with self._lock:
            if len(self._free) < n:
                raise OutOfPages(f"{n} pages wanted, {len(self._free)} there")
            pages = [self._free.pop() for _ in range(n)]  # clean: go to the caller
            self.low = min(self.low, len(self._free))
            return pages

    def put(self, pages):
        with self._lock:
            self._free.extend(pages)


class Slot:
    def __init__(self, name, index, rank):
        self.name, self.index, self.rank = name, index, rank
        self.refs = 1


class AdapterBank:
    def __init__(self, store, pages, n_slots):
        self._store = store
        self._pages = pages
        self._lock = threading.RLock()
        self._vacant = list(range(n_slots))
        self._lru = OrderedDict()
        self.hits = self.misses = 0

    def _free_index(self):
        if self._vacant:
            return self._vacant.pop()  # clean: goes to the caller
        for name, slot in self._lru.items():
            if slot.refs == 0:
                del self._lru[name]
                return slot.index
        return None

    def attach(self, name):
        """The adapter's slot with one reference more; detach() gives it back."""
        with self._lock:
            slot = self._lru.get(name)
            if slot is not None:
                self.hits += 1
                slot.refs += 1
                self._lru.move_to_end(name)
                return slot
            self.misses += 1
            index = self._free_index()  # leak: AdapterMissing is raised with the index in no slot and not among the vacant
            if index is None:
                raise BankFull(name)
            weights = self._store.fetch(name)
            if weights is None:
                raise AdapterMissing(name)
            self._lru[name] = slot = Slot(name, index, weights.rank)
            self._upload(weights, index)
            return slot

    def _upload(self, weights, index):
        pages = self._pages.get(weights.n_pages)  # clean: put back in the finally
        try:
            self._store.copy(weights, pages, index)
        finally:
            self._pages.put(pages)

    def detach(self, slot):
        with self._lock:
            slot.refs -= 1


@contextmanager
def adapter(bank, name):
    slot = bank.attach(name)  # clean: detached when the block ends
    try:
        yield slot
    finally:
        bank.detach(slot)


class Request:
    def __init__(self, rid, adapter_name, prompt):
        self.id, self.adapter, self.prompt = rid, adapter_name, prompt
        self.slot = self.result = None

    def done(self):
        return self.result is not None


class Scheduler:
    def __init__(self, bank, engine, max_running=32):
        self._bank, self._engine, self._max = bank, engine, max_running
        self._waiting = deque()
        self._running = {}

    def add(self, req):
        self._waiting.append(req)

    def admit(self):
        while self._waiting and len(self._running) < self._max:
            req = self._waiting[0]
            try:
                req.slot = self._bank.attach(req.adapter)  # leak: abort() takes a running request out of the table without detach
            except BankFull:
                break
            except AdapterMissing:
                self._waiting.popleft()
                req.result = "error: no such adapter"
                continue
            self._waiting.popleft()
            self._running[req.id] = req

    def step(self):
        self.admit()
        for req in list(self._running.values()):
            self._engine.advance(req, req.slot.index)
            if req.done():
                self._finish(req)

    def _finish(self, req):
        del self._running[req.id]
        self._bank.detach(req.slot)
        req.slot = None

    def abort(self, rid):
        req = self._running.pop(rid, None)
        if req is None:
            self._waiting = deque(r for r in self._waiting if r.id != rid)
            return False
        req.result = "aborted"
        return True


def generate(bank, engine, prompt, name, fallback="base"):
    slot = bank.attach(name)  # leak: for a rank that isn't supported the fallback is bound over it
    if slot.rank not in engine.ranks:
        slot = bank.attach(fallback)  # clean: detached in the finally
    try:
        return engine.run(prompt, slot.index)
    finally:
        bank.detach(slot)


def blend(bank, engine, prompt, weights):
    """Several adapters at once, each with its weight."""
    with ExitStack() as stack:
        parts = []
        for name, w in weights.items():
            slot = bank.attach(name)  # clean: near miss, the stack detaches it also when a later attach fails
            stack.callback(bank.detach, slot)
            parts.append((slot.index, w))
        return engine.run_blend(prompt, parts)


def prefetch(bank, names):
    loaded = []
    for name in names:
        try:
            slot = bank.attach(name)  # clean: near miss, detached at once and still resident, with no reference
        except (BankFull, AdapterMissing):
            continue
        bank.detach(slot)
        loaded.append(name)
    return loaded


class TenantPins:
    """One adapter of every tenant stays on the device."""

    def __init__(self, bank):
        self._bank, self._pins = bank, {}

    def pin(self, tenant, name):
        fresh = self._bank.attach(name)  # clean: near miss, the old one of the entry is detached below, this one by the next or by clear()
        old = self._pins.get(tenant)
        self._pins[tenant] = fresh
        if old is not None:
            self._bank.detach(old)

    def clear(self):
        while self._pins:
            _, slot = self._pins.popitem()
            self._bank.detach(slot)


class Staged:
    def __init__(self, a, b):
        self.a, self.b = a, b

    def release(self, pages):
        pages.put(self.a)
        pages.put(self.b)


def stage(pages, weights):
    a = pages.get(weights.pages_a)  # leak: for the second matrix get() raises OutOfPages, and a is lost
    b = pages.get(weights.pages_b)  # clean: goes to the caller in the Staged
    return Staged(a, b)


def convert(pages, store, weights, dtype):
    staged = stage(pages, weights)  # clean: released in the finally
    try:
        return store.cast(weights, staged.a, staged.b, dtype)
    finally:
        staged.release(pages)


class Loader(threading.Thread):
    """Copies adapters into host memory before somebody asks for them."""

    def __init__(self, pages, store):
        super().__init__(daemon=True)
        self._pages, self._store = pages, store
        self._q, self._cancelled = queue.Queue(), set()

    def enqueue(self, weights):
        pages = self._pages.get(weights.n_pages)  # leak: run() passes over a cancelled adapter with its pages
        self._q.put((weights, pages))

    def cancel(self, name):
        self._cancelled.add(name)

    def run(self):
        while True:
            weights, pages = self._q.get()
            if weights is None:
                break
            if weights.name in self._cancelled:
                self._cancelled.discard(weights.name)
                continue
            try:
                self._store.warm(weights, pages)
            finally:
                self._pages.put(pages)

    def shutdown(self):
        self._q.put((None, None))
        self.join()


def perplexity(bank, engine, name, texts):
    with adapter(bank, name) as slot:  # clean: the context manager detaches it
        return [engine.nll(t, slot.index) for t in texts]
