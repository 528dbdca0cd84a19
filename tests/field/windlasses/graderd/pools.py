"""The two things a grading run needs: a jail and, for some graders, a licence."""
from collections import Counter, deque


class NoJail(Exception):
    pass


class Jail:
    def __init__(self, ident):
        self.ident = ident
        self.dirty = False
        self.runs = 0

    def run(self, source, tests):
        self.dirty = True
        self.runs += 1
        return {"passed": len(tests), "failed": 0, "source": len(source)}

    def wipe(self):
        if self.runs > 500:
            return False
        self.dirty = False
        return True


class JailPool:
    def __init__(self, n):
        self._ready = deque(Jail(i) for i in range(n))
        self._busy = {}

    def confine(self):
        if not self._ready:
            raise NoJail
        jail = self._ready.popleft()  # clean: in _busy, and returned
        self._busy[jail.ident] = jail
        return jail

    def confine_clean(self):
        """A jail that has been wiped, or None."""
        if not self._ready:
            return None
        jail = self._ready.popleft()  # leak: a jail that cannot be wiped is neither ready nor busy afterwards
        if jail.dirty and not jail.wipe():
            return None
        self._busy[jail.ident] = jail
        return jail

    def parole(self, jail):
        if self._busy.pop(jail.ident, None) is not None:
            self._ready.append(jail)


class LicenceServer:
    def __init__(self, seats):
        self.seats = dict(seats)
        self.used = Counter()

    def sign_out(self, product):
        if self.used[product] >= self.seats.get(product, 0):
            return False
        self.used[product] += 1
        return True

    def sign_in(self, product):
        self.used[product] -= 1
