"""Offload manager: moves activations of windows into host cells."""
import threading


class OffloadBase:
    """Keeps the cells of a window; subclasses say what is worth keeping."""

    def __init__(self, cellar):
        self.cellar = cellar
        self.kept = {}
        self.turn = threading.Lock()

    def wants(self, t):
        return True

    def put_away(self, key, t):
        if not self.wants(t):
            return False
        cell = self.cellar.fill(t)  # clean: near miss, a former cell under the key is unheld and this one kept until flush
        if cell is None:
            return False
        former = self.kept.pop(key, None)
        if former is not None:
            former.unhold()
        self.kept[key] = cell
        return True

    def bring_back(self, key, like):
        cell = self.kept.pop(key, None)
        if cell is None:
            return None
        out = cell.mem[: like.numel()].view_as(like).to(like.device, copy=True)
        cell.unhold()
        return out

    def alias(self, key, new_key):
        if new_key in self.kept or key not in self.kept:
            return False
        self.kept[new_key] = self.kept[key].hold()  # clean: near miss, both entries are unheld one by one
        return True

    def rename(self, key, new_key):
        if key not in self.kept or new_key in self.kept:
            return
        self.kept[new_key] = self.kept[key].hold()  # leak: the old entry is deleted without unhold so one hold too many stays
        del self.kept[key]

    def flush(self):
        for cell in self.kept.values():
            cell.unhold()
        self.kept.clear()


class LargeOnly(OffloadBase):
    def __init__(self, cellar, floor):
        super().__init__(cellar)
        self.floor = floor
        self.side = []

    def wants(self, t):
        return t.numel() >= self.floor

    def put_side(self, t):
        cell = self.cellar.fill(t)  # leak: the side list is not emptied by flush nor by anything else
        if cell is None:
            return False
        self.side.append(cell)
        return True

    def side_numel(self):
        return sum(c.mem.numel() for c in self.side)


class Locked(OffloadBase):
    """Only one window may be moved at a time."""

    def __enter__(self):
        self.turn.acquire()  # leak: __exit__ returns before the release when nothing is kept
        return self

    def __exit__(self, *exc):
        if not self.kept:
            return False
        self.flush()
        self.turn.release()
        return False

    def try_put(self, key, t):
        if not self.turn.acquire(timeout=0.1):  # clean: near miss, the result is computed first and then the lock released
            return False
        done = self.put_away(key, t)  # clean: kept in the table until flush
        self.turn.release()
        return done
