"""What the request handlers call."""
import logging

from .adapters import mount_all, mounted
from .memory import Headroom

log = logging.getLogger(__name__)


class Hub:
    def __init__(self, registry, ledger, deck):
        self.registry = registry
        self.ledger = ledger
        self.deck = deck
        self.sessions = {}

    def infer(self, name, batch, adapter=None):
        entry = self.registry.use(name)  # clean: unused in finally
        if entry is None:
            return None
        try:
            if adapter is None:
                return entry.model(batch)
            with mounted(self.deck, adapter) as place:  # clean: context manager
                return entry.model(batch, place=place)
        finally:
            self.registry.unuse(entry)

    def infer_many(self, name, batch, adapters):
        entry = self.registry.use(name)  # clean: unused in finally
        if entry is None:
            return None
        try:
            places = mount_all(self.deck, adapters)  # clean: unmounted in the inner finally
            try:
                return [entry.model(batch, place=p) for p in places]
            finally:
                for p in places:
                    self.deck.unmount(p)
        finally:
            self.registry.unuse(entry)

    def begin(self, sid, name):
        if sid in self.sessions:
            return True
        entry = self.registry.use(name)  # clean: kept in sessions, end() takes it out
        if entry is None:
            return False
        self.sessions[sid] = entry
        return True

    def end(self, sid):
        entry = self.sessions.pop(sid, None)
        if entry is not None:
            self.registry.unuse(entry)

    def switch(self, sid, name):
        """Another model for a running session."""
        entry = self.registry.use(name)  # leak: an unknown session returns with the use counted
        if entry is None:
            return False
        old = self.sessions.get(sid)
        if old is None:
            log.warning("no session %s", sid)
            return False
        self.sessions[sid] = entry
        self.registry.unuse(old)
        return True

    def calibrate(self, path, nbytes):
        with Headroom(self.ledger, nbytes) as gid:  # leak: OSError of the open leaves the grant
            if not gid:
                return None
            with open(path, "rb") as f:  # clean: with statement
                return f.read(nbytes)
        return None
