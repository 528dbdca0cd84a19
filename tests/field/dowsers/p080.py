"""A mixin which counts leases over any class that has _make and _park."""


class LeaseMixin:
    quota = 8

    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self._leases = 0

    def hand_out(self):
        if self._leases == self.quota:
            raise RuntimeError("quota")
        self._leases += 1
        return self._make()

    def hand_in(self, item):
        self._leases -= 1
        self._park(item)


class _TorchStreams:
    def __init__(self, cuda):
        self._cuda = cuda
        self._parked = []

    def _make(self):
        return self._parked.pop() if self._parked else self._cuda.Stream()

    def _park(self, stream):
        self._parked.append(stream)


class StreamLeases(LeaseMixin, _TorchStreams):
    quota = 4


class Overlapper:
    def __init__(self, cuda):
        self.leases = StreamLeases(cuda)
        self.side = None

    def overlap(self, compute, comm):
        stream = self.leases.hand_out()  # clean: handed in in finally
        try:
            return compute(), comm(stream)
        finally:
            self.leases.hand_in(stream)

    def overlap_if_large(self, compute, comm, nbytes):
        stream = self.leases.hand_out()  # leak: a small message returns with the stream
        if nbytes < 1 << 20:
            return compute.run_alone(comm)
        compute.run_with(comm, stream)
        self.leases.hand_in(stream)

    def open_side(self):
        self.side = self.leases.hand_out()  # clean: close_side() hands it in

    def close_side(self):
        self.leases.hand_in(self.side)
        self.side = None

    def any_ready(self, works):
        for work in works:
            stream = self.leases.hand_out()  # leak: returns from the loop with the stream
            if work.query(stream):
                return work
            self.leases.hand_in(stream)
        return None
