"""Loaded models with use counts."""
import threading


class Entry:
    def __init__(self, name, model, gid):
        self.name = name
        self.model = model
        self.gid = gid
        self.uses = 0


class Registry:
    def __init__(self, ledger, loader):
        self.ledger = ledger
        self.loader = loader
        self._entries = {}
        self._lock = threading.RLock()

    def use(self, name):
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                entry = self._load(name)
                if entry is None:
                    return None
            entry.uses += 1
            return entry

    def _load(self, name):
        gid = self.ledger.earmark(self.loader.size(name))  # clean: cleared when nothing loads, else kept in the entry
        if not gid:
            return None
        model = self.loader.load(name)
        if model is None:
            self.ledger.clear(gid)
            return None
        entry = self._entries[name] = Entry(name, model, gid)
        return entry

    def unuse(self, entry):
        with self._lock:
            entry.uses -= 1

    def trim(self):
        with self._lock:
            for name, e in list(self._entries.items()):
                if e.uses == 0:
                    del self._entries[name]
                    self.ledger.clear(e.gid)

    def preload(self, names):
        """Loads without counting a use."""
        with self._lock:
            for name in names:
                if name in self._entries:
                    continue
                gid = self.ledger.earmark(self.loader.size(name))  # leak: a model that does not load goes on to the next name
                if not gid:
                    return False
                model = self.loader.load(name)
                if model is None:
                    continue
                self._entries[name] = Entry(name, model, gid)
            return True
