from .loader import Loader
from .pages import PageBank


class Entry:
    def __init__(self, name, pages):
        self.name = name
        self.pages = pages
        self.users = 0


class Registry:
    def __init__(self, bank: PageBank, loader: Loader):
        self.bank = bank
        self.loader = loader
        self.entries = {}

    def ensure(self, name):
        """True when the adapter's pages are resident."""
        if name in self.entries:
            return True
        pages = self.loader.load(name)  # clean: near miss, stored in the entry, drop() pushes them
        if pages is None:
            return False
        self.entries[name] = Entry(name, pages)
        return True

    def refresh(self, name):
        pages = self.loader.load(name)  # leak: pages for an adapter that is in use are dropped
        if pages is None:
            return False
        entry = self.entries[name]
        if entry.users:
            return False
        old, entry.pages = entry.pages, pages
        self.bank.push_list(old)
        return True

    def acquire(self, name):
        entry = self.entries.get(name)
        if entry is not None:
            entry.users += 1
        return entry

    def release(self, entry):
        entry.users -= 1

    def drop(self, name):
        entry = self.entries[name]
        if entry.users:
            return False
        del self.entries[name]
        self.bank.push_list(entry.pages)
        return True
