"""Which adapters are loaded and who uses them."""

import time


class Registry:
    def __init__(self, loader):
        self.loader = loader
        self.loaded = {}
        self.last = {}

    def checkout(self, name):
        ad = self.loaded.get(name)
        if ad is None:
            return None
        ad.users += 1
        self.last[name] = time.monotonic()
        return ad

    def checkin(self, ad):
        ad.users -= 1

    def ensure(self, name, path, rank):
        """Checks the adapter out, loading it first if need be."""
        ad = self.checkout(name)  # clean: returned to the caller
        if ad is not None:
            return ad
        ad = self.loader.load(name, path, rank)  # clean: filed in self.loaded, which evict() releases
        if ad is None:
            return None
        self.loaded[name] = ad
        return self.checkout(name)  # clean: returned to the caller

    def preload(self, names, path, rank):
        for ad in self.loader.load_bundle(names, path, rank):  # leak: a member that is loaded already is skipped and its row dropped
            if ad.name in self.loaded:
                continue
            self.loaded[ad.name] = ad

    def preload_one(self, name, path, rank):
        ad = self.loader.load_lazy(name, path, rank)  # clean: near miss, released here when the name is taken, else filed in self.loaded
        if ad is None:
            return False
        if name in self.loaded:
            self.loader.release(ad)
            return False
        self.loaded[name] = ad
        return True

    def evict(self, name):
        ad = self.loaded.get(name)
        if ad is None or ad.users:
            return False
        del self.loaded[name]
        self.loader.release(ad)
        return True
