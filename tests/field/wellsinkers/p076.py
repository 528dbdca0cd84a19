"""Interned strings: a number for each text, counted, and freed at zero."""
from array import array


class Interner:
    def __init__(self):
        self._ids = {}
        self._texts = []
        self._counts = array("l")
        self._holes = []

    def intern(self, text):
        sid = self._ids.get(text)
        if sid is None:
            if self._holes:
                sid = self._holes.pop()
                self._texts[sid] = text
            else:
                sid = len(self._texts)
                self._texts.append(text)
                self._counts.append(0)
            self._ids[text] = sid
        self._counts[sid] += 1
        return sid

    def unintern(self, sid):
        self._counts[sid] -= 1
        if self._counts[sid] == 0:
            del self._ids[self._texts[sid]]
            self._texts[sid] = None
            self._holes.append(sid)


class Symbols:
    def __init__(self, interner):
        self.interner = interner
        self.scope = {}

    def declare(self, name, value):
        sid = self.interner.intern(name)  # leak: a second declaration keeps a count too many
        if sid in self.scope:
            return False
        self.scope[sid] = value
        return True

    def close(self):
        for sid in self.scope:
            self.interner.unintern(sid)
        self.scope.clear()

    def lookup(self, name):
        sid = self.interner.intern(name)  # clean: counted down before the return
        value = self.scope.get(sid)
        self.interner.unintern(sid)
        return value

    def dump(self, names):
        for name in names:
            sid = self.interner.intern(name)  # clean: counted down in finally
            try:
                yield name, self.scope.get(sid)
            finally:
                self.interner.unintern(sid)


def known(symbols, names):
    return sum(symbols.interner.intern(n) in symbols.scope for n in names)  # leak: number not kept
