"""Streaming batches through reusable host buffers."""
import torch


class BatchBuffers:
    def __init__(self, rows, cols):
        self.rows, self.cols = rows, cols
        self._cached = []
        self._out = {}

    def obtain(self):
        batch = self._cached.pop() if self._cached else torch.zeros(self.rows, self.cols)
        self._out[id(batch)] = batch
        return batch

    def recycle(self, batch):
        if self._out.pop(id(batch), None) is None:
            return
        batch.zero_()
        self._cached.append(batch)


def batches(source, buffers):
    """Each batch is valid until the next one is asked for."""
    for rows in source:
        batch = buffers.obtain()  # clean: near miss, generator with finally round the yield
        try:
            for i, row in enumerate(rows):
                batch[i].copy_(row)
            yield batch
        finally:
            buffers.recycle(batch)


def nonempty(source, buffers):
    for rows in source:
        batch = buffers.obtain()  # leak: an empty group continues before the try
        if len(rows) == 0:
            continue
        try:
            for i, row in enumerate(rows):
                batch[i].copy_(row)
            yield batch
        finally:
            buffers.recycle(batch)


def until_sentinel(source, buffers):
    for rows in source:
        batch = buffers.obtain()  # leak: the sentinel ends the generator with the buffer out
        if rows is None:
            return
        for i, row in enumerate(rows):
            batch[i].copy_(row)
        total = float(batch.sum())
        buffers.recycle(batch)
        yield total


def owned(source, buffers):
    """The consumer recycles."""
    for rows in source:
        batch = buffers.obtain()  # clean: near miss, yielded to consumers that recycle
        for i, row in enumerate(rows):
            batch[i].copy_(row)
        yield batch


def mean_of_all(source, buffers):
    total, n = 0.0, 0
    for batch in owned(source, buffers):
        total += float(batch.mean())
        n += 1
        buffers.recycle(batch)
    return total / max(n, 1)


def copy_of(rows, buffers):
    batch = buffers.obtain()  # leak: what goes back is a clone, not the buffer
    for i, row in enumerate(rows):
        batch[i].copy_(row)
    snapshot = batch.clone()
    buffers.recycle(snapshot)
    return len(rows)
