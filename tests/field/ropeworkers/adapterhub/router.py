"""Per-request use of adapters."""

import contextlib


class Session:
    def __init__(self, rid, adapter):
        self.rid = rid
        self.adapter = adapter


class Router:
    def __init__(self, registry, catalog):
        self.registry = registry
        self.catalog = catalog
        self.sessions = {}

    def open(self, rid, name):
        if rid in self.sessions:
            return False
        path, rank = self.catalog[name]
        ad = self.registry.ensure(name, path, rank)  # clean: in a session that close() checks in
        if ad is None:
            return False
        self.sessions[rid] = Session(rid, ad)
        return True

    def switch(self, rid, name):
        path, rank = self.catalog[name]
        s = self.sessions[rid]
        ad = self.registry.ensure(name, path, rank)  # leak: checked out once more for a session that uses this adapter already
        if ad is None or ad is s.adapter:
            return False
        self.registry.checkin(s.adapter)
        s.adapter = ad
        return True

    def close(self, rid):
        s = self.sessions.pop(rid, None)
        if s is not None:
            self.registry.checkin(s.adapter)

    @contextlib.contextmanager
    def using(self, name):
        ad = self.registry.checkout(name)  # clean: checked in in finally when there is one
        try:
            yield ad
        finally:
            if ad is not None:
                self.registry.checkin(ad)

    def score(self, name, prompts, run):
        with self.using(name) as ad:  # clean: the context manager checks it in
            if ad is None:
                return []
            return [run(p, ad.row) for p in prompts]

    def rank_of(self, name):
        ad = self.registry.checkout(name)  # leak: only its row is read and it is never checked in
        return ad.row[0] if ad is not None else 0
