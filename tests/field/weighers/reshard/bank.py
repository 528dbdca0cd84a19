"""What a conversion holds: host tensors by length and type, and readers of shard files by path."""
import torch


class TensorBank:
    def __init__(self):
        self._idle = {}

    def lease(self, numel, dtype):
        idle = self._idle.setdefault((numel, dtype), [])
        return idle.pop() if idle else torch.empty(numel, dtype=dtype)

    def end(self, tensor):
        self._idle.setdefault((tensor.numel(), tensor.dtype), []).append(tensor)


class ReaderCache:
    """Readers are opened once; a pinned reader is not closed by trim()."""

    def __init__(self, opener, limit):
        self.opener = opener
        self.limit = limit
        self._readers = {}
        self._pins = {}

    def pin(self, path):
        if path not in self._readers:
            self.trim()
            self._readers[path] = self.opener(path)
            self._pins[path] = 0
        self._pins[path] += 1
        return self._readers[path]

    def unpin(self, reader):
        self._pins[reader.path] -= 1

    def trim(self):
        for path in [p for p, n in self._pins.items() if n == 0]:
            if len(self._readers) < self.limit:
                break
            self._readers.pop(path).shutdown()
            del self._pins[path]
