import torch


class StagingArea:
    """Fixed slab of pinned rows; a view goes out and its row index comes back."""

    def __init__(self, rows, width):
        self.slab = torch.empty(rows, width)
        self.unused = list(range(rows))
        self.row_of = {}

    def view(self):
        row = self.unused.pop()
        tensor = self.slab[row]
        self.row_of[tensor.data_ptr()] = row
        return tensor

    def unview(self, tensor):
        self.unused.append(self.row_of.pop(tensor.data_ptr()))


class Prefetcher:
    def __init__(self, staging, source, depth):
        self.staging = staging
        self.source = iter(source)
        self.ring = [None] * depth
        self.head = 0
        self.filled = 0

    def fill(self):
        for sample in self.source:
            at = (self.head + self.filled) % len(self.ring)
            if self.ring[at] is not None:
                return
            tensor = self.staging.view()  # leak: resize to a smaller ring cuts slots off
            tensor.copy_(sample)
            self.ring[at] = tensor
            self.filled += 1
            if self.filled == len(self.ring):
                return

    def pop(self):
        tensor, self.ring[self.head] = self.ring[self.head], None
        if tensor is None:
            return None
        self.head = (self.head + 1) % len(self.ring)
        self.filled -= 1
        out = tensor.clone()
        self.staging.unview(tensor)
        return out

    def resize(self, depth):
        live = [t for t in self.ring if t is not None]
        self.ring = (live + [None] * depth)[:depth]
        self.head = 0
        self.filled = min(len(live), depth)

    def close(self):
        while self.pop() is not None:
            pass


class Normalizer:
    def __init__(self, staging):
        self.staging = staging
        self.mean = staging.view()  # clean: close gives it back
        self.std = staging.view()  # clean: close gives it back
        self.best = None

    def update(self, batch, loss):
        self.mean.copy_(batch.mean(0))
        self.std.copy_(batch.std(0))
        if loss < 0.1:
            snapshot = self.staging.view()  # leak: a later better batch overwrites self.best
            snapshot.copy_(self.mean)
            self.best = snapshot

    def apply(self, batch):
        work = self.staging.view()  # clean: given back below
        work.copy_(batch[0] - self.mean)
        result = (work / self.std).clone()
        self.staging.unview(work)
        return result

    def close(self):
        for tensor in (self.mean, self.std):
            self.staging.unview(tensor)
        if self.best is not None:
            self.staging.unview(self.best)
            self.best = None
