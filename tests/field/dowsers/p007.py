"""Side streams with a context manager over the explicit pair."""
import contextlib


class StreamBank:
    def __init__(self, factory, count):
        self._idle = [factory() for _ in range(count)]
        self._out = set()

    def checkout_stream(self):
        stream = self._idle.pop()
        self._out.add(stream)
        return stream

    def checkin_stream(self, stream):
        self._out.remove(stream)
        stream.synchronize()
        self._idle.append(stream)

    @contextlib.contextmanager
    def side_stream(self):
        stream = self.checkout_stream()
        try:
            yield stream
        finally:
            self.checkin_stream(stream)


class Offloader:
    def __init__(self, bank: StreamBank):
        self.bank = bank

    def evict(self, tensor, host):
        with self.bank.side_stream() as stream:  # clean: with
            host.copy_from(tensor, stream)

    def evict_all(self, tensors, host):
        stream = self.bank.checkout_stream()  # clean: checked in on the only way out
        for t in tensors:
            host.copy_from(t, stream)
        self.bank.checkin_stream(stream)

    def fetch(self, host, key):
        stream = self.bank.checkout_stream()  # leak: a missing key returns with the stream out
        blob = host.get(key)
        if blob is None:
            return None
        out = blob.to_device(stream)
        self.bank.checkin_stream(stream)
        return out

    def overlap(self, a, b):
        stream = self.bank.checkout_stream()  # leak: overwritten by the second stream
        a.launch(stream)
        stream = self.bank.checkout_stream()  # clean: checked in below
        b.launch(stream)
        self.bank.checkin_stream(stream)
