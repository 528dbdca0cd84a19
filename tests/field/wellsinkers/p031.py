"""File watches shared by path, counted."""
import os


class WatchList:
    def __init__(self, limit=8192):
        self.limit = limit
        self._ids = {}
        self._rows = []

    def _row(self, path):
        wd = self._ids.get(path)
        if wd is None:
            if len(self._rows) >= self.limit:
                raise OSError("watch limit")
            wd = self._ids[path] = len(self._rows)
            self._rows.append([path, 0, None])
        return wd

    def add_watch(self, path):
        wd = self._row(path)
        self._rows[wd][1] += 1
        self._rows[wd][2] = os.stat(path).st_mtime
        return wd

    def rm_watch(self, wd):
        self._rows[wd][1] -= 1

    def changed(self, wd):
        path, _, seen = self._rows[wd]
        return os.stat(path).st_mtime != seen


class Reloader:
    def __init__(self, watches, path):
        self.watches = watches
        self.path = path
        self.wd = None

    def start(self):
        self.wd = self.watches.add_watch(self.path)  # clean: stored, removed by stop

    def stop(self):
        self.watches.rm_watch(self.wd)
        self.wd = None


def edited_during(watches, path, work):
    wd = watches.add_watch(path)  # clean: removed before the return
    work()
    changed = watches.changed(wd)
    watches.rm_watch(wd)
    return changed


def first_changed(watches, paths, work):
    for path in paths:
        wd = watches.add_watch(path)  # leak: the changed path returns with its watch
        work(path)
        if watches.changed(wd):
            return path
        watches.rm_watch(wd)
    return None


def total_bytes(watches, paths):
    for path in paths:
        watches.add_watch(path)  # leak: number dropped
    return sum(map(os.path.getsize, paths))
