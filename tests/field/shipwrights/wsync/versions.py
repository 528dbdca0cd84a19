"""Flat weight copies by version; a version lives while it is referenced."""
import torch


class Version:
    def __init__(self, no, flat):
        self.no = no
        self.flat = flat
        self.refs = 0


class VersionStore:
    def __init__(self, numel, count):
        self._blank = [torch.empty(numel, pin_memory=True) for _ in range(count)]
        self.known = {}
        self.latest = -1

    def compose(self):
        """An empty flat copy, to be published or scrapped."""
        if not self._blank:
            return None
        return self._blank.pop()  # clean: returned to the caller

    def scrap(self, flat):
        self._blank.append(flat)

    def publish(self, flat):
        self.latest += 1
        self.known[self.latest] = Version(self.latest, flat)
        self._prune()
        return self.latest

    def open(self, no):
        v = self.known[no]
        v.refs += 1
        return v

    def shut(self, v):
        v.refs -= 1
        self._prune()

    def _prune(self):
        for no in [n for n, v in self.known.items() if v.refs == 0 and n != self.latest]:
            self.scrap(self.known.pop(no).flat)
