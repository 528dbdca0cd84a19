"""Detokenizer processes in a queue.Queue."""
import queue


class DetokPool:
    def __init__(self, start, n):
        self._q = queue.Queue()
        for _ in range(n):
            self._q.put(start())

    def rent(self, timeout=None):
        try:
            return self._q.get(timeout=timeout)
        except queue.Empty:
            return None

    def unrent(self, worker):
        self._q.put(worker)


class ResponseBuilder:
    def __init__(self, detoks: DetokPool):
        self.detoks = detoks

    def text(self, ids):
        worker = self.detoks.rent()  # clean: unrented in finally
        try:
            return worker.decode(ids)
        finally:
            self.detoks.unrent(worker)

    def text_or_ids(self, ids):
        worker = self.detoks.rent(timeout=0.2)  # leak: an invalid id returns with the worker
        if worker is None:
            return ids
        if max(ids) >= worker.vocab_size:
            return ids
        text = worker.decode(ids)
        self.detoks.unrent(worker)
        return text

    def texts(self, batch):
        out = []
        for ids in batch:
            worker = self.detoks.rent()  # clean: unrented in each turn
            out.append(worker.decode(ids))
            self.detoks.unrent(worker)
        return out

    def stop_at(self, batches, stop):
        for ids in batches:
            worker = self.detoks.rent()  # leak: break on the stop word keeps the worker
            piece = worker.decode(ids)
            if stop in piece:
                break
            yield piece
            self.detoks.unrent(worker)

    def vocab(self):
        worker = self.detoks.rent(timeout=1)  # clean: unrented if it came
        if worker is None:
            return 0
        size = worker.vocab_size
        self.detoks.unrent(worker)
        return size
