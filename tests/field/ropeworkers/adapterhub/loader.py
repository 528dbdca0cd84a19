"""Reads adapters from archives into rows."""

import logging

log = logging.getLogger(__name__)


class LoadedAdapter:
    def __init__(self, name, row, path=None):
        self.name = name
        self.row = row
        self.path = path
        self.users = 0


class Loader:
    def __init__(self, bank, handles, upload):
        self.bank = bank
        self.handles = handles
        self.upload = upload

    def load(self, name, path, rank):
        arc = self.handles.enter(path)  # clean: left in finally
        if arc is None:
            return None
        try:
            row = self.bank.seat(rank)  # clean: unseated when the upload fails, else owned by the adapter
            if row is None:
                return None
            if not self.upload(arc.read(name), row):
                self.bank.unseat(row)
                return None
            return LoadedAdapter(name, row)
        finally:
            self.handles.leave(path)

    def load_lazy(self, name, path, rank):
        """Keeps the archive open; weights are uploaded at first use and release() leaves it."""
        arc = self.handles.enter(path)  # leak: the reader stays counted when no row is free
        if arc is None:
            return None
        row = self.bank.seat(rank)  # clean: owned by the adapter
        if row is None:
            log.info("no row of rank %d for %s", rank, name)
            return None
        return LoadedAdapter(name, row, path)

    def load_bundle(self, names, path, rank):
        """All adapters of an archive; those that are corrupt are left out."""
        arc = self.handles.enter(path)  # clean: left after the loop, which has no other way out
        if arc is None:
            return []
        out = []
        for name in names:
            row = self.bank.seat(rank)  # leak: a corrupt member is skipped with its row seated
            if row is None:
                break
            blob = arc.read(name)
            if not blob:
                log.warning("%s in %s is empty", name, path)
                continue
            self.upload(blob, row)
            out.append(LoadedAdapter(name, row))
        self.handles.leave(path)
        return out

    def inspect(self, name, path):
        arc = self.handles.enter(path)  # leak: a missing member returns before leave()
        if arc is None:
            return None
        meta = arc.stat(name)
        if meta is None:
            return None
        self.handles.leave(path)
        return meta

    def upgrade(self, ad, rank):
        row = self.bank.reseat(ad.row, rank)  # clean: the adapter's row from now on, the old one is back in the bank
        if row is None:
            return False
        ad.row = row
        return True

    def release(self, ad):
        self.bank.unseat(ad.row)
        if ad.path is not None:
            self.handles.leave(ad.path)
