"""Leased scratch files of an external merge sort."""
import os


class ScratchDir:
    def __init__(self, root, limit):
        self.root = root
        self._ids = list(range(limit))

    def take_id(self):
        return self._ids.pop()

    def drop_id(self, ident):
        self._ids.append(ident)


class Run:
    """A sorted run on disk; close() ends its id."""

    def __init__(self, scratch):
        self.scratch = scratch
        self.ident = scratch.take_id()  # clean: close drops it
        self.path = os.path.join(scratch.root, f"run{self.ident}")
        self.count = 0

    def write(self, rows):
        with open(self.path, "a", encoding="utf-8") as out:
            for row in rows:
                out.write(row + "\n")
                self.count += 1

    def read(self):
        with open(self.path, encoding="utf-8") as src:
            return src.read().splitlines()

    def close(self):
        self.scratch.drop_id(self.ident)


class CompressedRun(Run):
    def write(self, rows):
        super().write(row.strip() for row in rows)

    def close(self):
        self.count = 0
        super().close()


class SharedRun(Run):
    def close(self):
        if os.path.exists(self.path):
            os.remove(self.path)


def sort_small(scratch, rows):
    run = Run(scratch)  # clean: closed
    run.write(sorted(rows))
    out = run.read()
    run.close()
    return out


def sort_large(scratch, rows, chunk):
    runs = []
    for start in range(0, len(rows), chunk):
        run = CompressedRun(scratch)  # clean: all runs are closed after the merge
        run.write(sorted(rows[start:start + chunk]))
        runs.append(run)
    merged = sorted(line for run in runs for line in run.read())
    for run in runs:
        run.close()
    return merged


def distinct(scratch, rows):
    run = CompressedRun(scratch)  # leak: never closed
    run.write(sorted(set(rows)))
    return run.count


def publish(scratch, rows):
    run = SharedRun(scratch)  # leak: SharedRun.close removes the file and keeps the id
    run.write(rows)
    lines = run.read()
    run.close()
    return lines
