"""LoRA adapter slots of a multi-policy rollout server.

Many policies of one population share the base weights, each has an adapter.
An adapter that is pinned may not leave its slot.
"""
import logging
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

logger = logging.getLogger(__name__)


class AdapterMissing(KeyError):
    pass


class AllPinned(RuntimeError):
    pass


class RankMismatch(ValueError):
    pass


class Slot:
    __slots__ = ("index", "name", "pins", "weights")

    def __init__(self, index):
        self.index = index
        self.name = None
        self.pins = 0
        self.weights = None


class AdapterStore:
    """Reads adapters from disk or from the trainer."""

    def __init__(self, root, max_rank):
        self.root = root
        self.max_rank = max_rank

    def load(self, name):
        path = self.root / f"{name}.safetensors"
        if not path.exists():
            raise AdapterMissing(name)
        return path.read_bytes()

    def check(self, blob, rank):
        if rank > self.max_rank:
            raise RankMismatch(f"rank {rank} > {self.max_rank}")
        return blob


class AdapterTable:
    def __init__(self, store, num_slots):
        self.store = store
        self._vacant = [Slot(i) for i in range(num_slots)]
        self._resident = OrderedDict()
        self._lock = threading.RLock()
        self.loads = 0

    def pin(self, name):
        with self._lock:
            slot = self._resident.get(name)
            if slot is None:
                slot = self._bring_in(name)  # clean: near miss, _resident owns the slot and _evict puts it back
            self._resident.move_to_end(name)
            slot.pins += 1  # clean: the pin is the caller's
            return slot

    def try_pin(self, name):
        """Only when the adapter is there already."""
        with self._lock:
            slot = self._resident.get(name)
            if slot is None:
                return None
            slot.pins += 1  # clean: the pin is the caller's
            return slot

    def unpin(self, slot):
        with self._lock:
            if slot.pins <= 0:
                logger.error("slot %d is not pinned", slot.index)
                return
            slot.pins -= 1

    def _bring_in(self, name):
        if not self._vacant:
            self._evict()
        slot = self._vacant.pop()  # leak: load() raises AdapterMissing and the slot is in no list any more
        slot.weights = self.store.load(name)
        slot.name = name
        slot.pins = 0
        self._resident[name] = slot
        self.loads += 1
        return slot

    def _evict(self):
        for name, slot in self._resident.items():
            if slot.pins == 0:
                del self._resident[name]
                slot.weights = None
                self._vacant.append(slot)
                return
        raise AllPinned(f"{len(self._resident)} adapters")

    def install(self, name, blob, rank):
        """Push path: the trainer hands over the new adapter itself."""
        with self._lock:
            current = self._resident.get(name)
            if current is not None and current.pins:
                raise AllPinned(name)
            if not self._vacant:
                self._evict()
            slot = self._vacant.pop()  # clean: near miss, a bad rank puts it back, else it is resident
            try:
                slot.weights = self.store.check(blob, rank)
            except RankMismatch:
                self._vacant.append(slot)
                raise
            slot.name, slot.pins = name, 0
            previous = self._resident.pop(name, None)
            self._resident[name] = slot
            if previous is not None:
                previous.weights = None
                self._vacant.append(previous)


class PinSet:
    """The pins of one batch; many requests may use the same adapter."""

    def __init__(self, table):
        self.table = table
        self._slots = {}

    def add(self, name):
        if name not in self._slots:
            self._slots[name] = self.table.pin(name)  # clean: near miss, one pin a name, close() unpins
        return self._slots[name].index

    def close(self):
        slots, self._slots = self._slots, {}
        for slot in slots.values():
            self.table.unpin(slot)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class Session:
    """A conversation that stays with one adapter until it is switched."""

    def __init__(self, table, name):
        self.table = table
        self.history = []
        self.slot = table.pin(name)  # leak: switch() rebinds self.slot without unpinning this one

    def switch(self, name):
        if name == self.slot.name:
            return
        self.slot = self.table.pin(name)  # leak: the next switch() rebinds it again
        self.history.append({"role": "system", "content": f"adapter={name}"})

    def close(self):
        self.table.unpin(self.slot)


class Request:
    def __init__(self, rid, adapter, prompt):
        self.rid = rid
        self.adapter = adapter
        self.prompt = prompt
        self.slot = None
        self.output = None


class RolloutServer:
    def __init__(self, engine, table, workers=8):
        self.engine = engine
        self.table = table
        self.inflight = {}
        self._exec = ThreadPoolExecutor(workers)
        self.rejected = 0

    def submit(self, req):
        try:
            req.slot = self.table.pin(req.adapter)  # clean: near miss, the request is in flight and _finish unpins its slot
        except (AdapterMissing, AllPinned) as e:
            self.rejected += 1
            logger.warning("request %s: %s", req.rid, e)
            return None
        self.inflight[req.rid] = req
        fut = self._exec.submit(self.engine.generate, req.prompt, req.slot.index)
        fut.add_done_callback(lambda f: self._finish(req, f))
        return fut

    def _finish(self, req, fut):
        self.inflight.pop(req.rid, None)
        slot, req.slot = req.slot, None
        self.table.unpin(slot)
        if fut.exception() is None:
            req.output = fut.result()

    def score(self, adapter, tokens):
        slot = self.table.pin(adapter)  # clean: unpinned in the finally
        try:
            return self.engine.logprobs(tokens, slot.index)
        finally:
            self.table.unpin(slot)

    def score_resident(self, adapter, tokens, limit=32768):
        slot = self.table.try_pin(adapter)  # leak: a prompt over the limit returns with the pin held
        if slot is None:
            return None
        if len(tokens) > limit:
            logger.info("too long for %s: %d", adapter, len(tokens))
            return None
        out = self.engine.logprobs(tokens, slot.index)
        self.table.unpin(slot)
        return out

    def kl_between(self, first, second, tokens):
        a = self.table.pin(first)  # leak: the second pin may raise AllPinned or AdapterMissing
        b = self.table.pin(second)  # clean: unpinned in the finally
        try:
            return self.engine.kl(tokens, a.index, b.index)
        finally:
            self.table.unpin(a)
            self.table.unpin(b)

    def generate_batch(self, reqs):
        with PinSet(self.table) as pins:
            indices = [pins.add(r.adapter) for r in reqs]  # clean: the set unpins everything at its exit
            return self.engine.generate_many([r.prompt for r in reqs], indices)

    def warm(self, names):
        """Loads the most used adapters before the first request arrives."""
        for name in names:
            try:
                slot = self.table.pin(name)  # leak: an empty probe goes on to the next name without unpinning
            except AllPinned:
                break
            probe = self.engine.generate("", slot.index)
            if not probe:
                logger.error("adapter %s answers nothing", name)
                continue
            self.table.unpin(slot)

    def shutdown(self):
        self._exec.shutdown(wait=True)
