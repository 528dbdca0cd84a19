"""The loading half.  Readers stage file ranges in regions and scatter them."""
import os


class Mismatch(Exception):
    pass


def check_entry(entry, want):
    if entry["n"] != want:
        raise Mismatch(f"{entry['name']}: {entry['n']} bytes, {want} expected")


class RangeReader:
    def __init__(self, pool, path):
        self.pool = pool
        self.path = path
        self._fd = None

    def __enter__(self):
        self._fd = os.open(self.path, os.O_RDONLY)  # clean: a number, closed in __exit__
        return self

    def __exit__(self, *exc):
        os.close(self._fd)

    def fetch(self, entry):
        """A filled region; the caller takes it back."""
        region = self.pool.lend(entry["n"])  # clean: returned to the caller
        region.write(os.pread(self._fd, entry["n"], entry["at"]))
        return region


def load_into(pool, path, entries, targets):
    """Returns the names that could not be loaded."""
    bad = []
    with RangeReader(pool, path) as reader:  # clean: closed by with
        for entry in entries:
            name = entry["name"]
            region = reader.fetch(entry)  # leak: Mismatch is handled by going on to the next entry with the region in hand
            try:
                check_entry(entry, len(targets[name]))
                targets[name][:] = region.seal()
            except Mismatch:
                bad.append(name)
                continue
            pool.take_back(region)
    return bad
