"""Activation offload through autograd saved-tensor hooks, backed by a table of pinned host slots."""
import collections
import contextlib
import threading

import torch

MIN_BYTES = 1 << 20


class Slot:
    __slots__ = ("index", "host", "event", "meta")

    def __init__(self, index, nbytes):
        self.index = index
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.event = None
        self.meta = None

    def write(self, t, stream):
        self.meta = (t.shape, t.dtype)
        flat = t.contiguous().view(torch.uint8).flatten()
        with torch.cuda.stream(stream):
            self.host[: flat.numel()].copy_(flat, non_blocking=True)
            self.event = stream.record_event()

    def read(self, device):
        shape, dtype = self.meta
        n = torch.empty(shape, dtype=dtype, device="meta").numel() * torch.empty((), dtype=dtype).element_size()
        self.event.synchronize()
        return self.host[:n].to(device, non_blocking=True).view(dtype).view(shape)


class SlotTable:
    """check_out() hands out a pinned slot or None; check_in() takes it back."""

    def __init__(self, n, nbytes):
        self.nbytes = nbytes
        self._idle = collections.deque(Slot(i, nbytes) for i in range(n))
        self._busy = {}
        self._cv = threading.Condition()

    def check_out(self):
        with self._cv:
            if not self._idle:
                return None
            slot = self._idle.popleft()
            self._busy[slot.index] = slot
            return slot

    def check_out_wait(self, timeout):
        with self._cv:
            if not self._cv.wait_for(lambda: self._idle, timeout):
                return None
            slot = self._idle.popleft()
            self._busy[slot.index] = slot
            return slot

    def check_in(self, slot):
        with self._cv:
            del self._busy[slot.index]
            slot.meta = slot.event = None
            self._idle.append(slot)
            self._cv.notify()

    @contextlib.contextmanager
    def slot(self):
        s = self.check_out()  # clean: the finally checks it in
        try:
            yield s
        finally:
            if s is not None:
                self.check_in(s)


class Offloaded:
    """What pack() leaves on the autograd graph."""

    def __init__(self, slot, device):
        self.slot = slot
        self.device = device


class OffloadHooks:
    def __init__(self, table, stream):
        self.table = table
        self.stream = stream
        self.stats = collections.Counter()

    def pack(self, t):
        nbytes = t.numel() * t.element_size()
        if nbytes < MIN_BYTES or nbytes > self.table.nbytes or not t.is_cuda:
            self.stats["kept"] += 1
            return t
        slot = self.table.check_out()  # clean: travels in Offloaded and unpack checks it in
        if slot is None:
            self.stats["full"] += 1
            return t
        slot.write(t, self.stream)
        self.stats["moved"] += 1
        return Offloaded(slot, t.device)

    def unpack(self, packed):
        if not isinstance(packed, Offloaded):
            return packed
        out = packed.slot.read(packed.device)
        self.table.check_in(packed.slot)
        return out


class LayerOffloader:
    """Explicit variant: the trainer calls stash(layer) after forward and fetch(layer) in backward."""

    def __init__(self, table, stream, wait_s=0.5):
        self.table = table
        self.stream = stream
        self.wait_s = wait_s
        self._by_layer = {}
        self._pinned_layers = {}
        self._order = []

    def stash(self, layer, tensors):
        if layer in self._by_layer:
            return False
        slots = []
        for t in tensors:
            s = self.table.check_out_wait(self.wait_s)  # clean: rolled back on a short table, else kept for fetch
            if s is None:
                for held in slots:
                    self.table.check_in(held)
                return False
            s.write(t, self.stream)
            slots.append(s)
        self._by_layer[layer] = slots
        self._order.append(layer)
        return True

    def fetch(self, layer, device):
        slots = self._by_layer.pop(layer, None)
        if slots is None:
            return None
        out = []
        for s in slots:
            out.append(s.read(device))
            self.table.check_in(s)
        return out

    def stash_shared(self, layer, tensor):
        """Embedding output, read by several backward stages and removed by drop_shared."""
        s = self.table.check_out()  # leak: drop_shared takes the entry out of the dict and never checks it in
        if s is None:
            return False
        s.write(tensor, self.stream)
        self._pinned_layers[layer] = s
        return True

    def peek_shared(self, layer, device):
        s = self._pinned_layers.get(layer)
        return None if s is None else s.read(device)

    def drop_shared(self, layer):
        s = self._pinned_layers.pop(layer, None)
        if s is None:
            return
        s.event.synchronize()
        self._order = [x for x in self._order if x != layer]

    def reset(self):
        for slots in self._by_layer.values():
            for s in slots:
                self.table.check_in(s)
        self._by_layer.clear()
        self._order.clear()

    def roundtrip_error(self, t):
        s = self.table.check_out()  # leak: the early return for integer tensors keeps the slot
        if s is None:
            return None
        s.write(t, self.stream)
        back = s.read(t.device)
        if not t.is_floating_point():
            return float((back != t).sum())
        err = (back - t).abs().max().item()
        self.table.check_in(s)
        return err

    def bandwidth(self, t, rounds):
        ev0, ev1 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with self.table.slot() as s:  # clean: the context manager checks it in
            if s is None:
                return 0.0
            ev0.record(self.stream)
            for _ in range(rounds):
                s.write(t, self.stream)
            ev1.record(self.stream)
            ev1.synchronize()
        return rounds * t.numel() * t.element_size() / (ev0.elapsed_time(ev1) * 1e-3)


class OffloadScope:
    """Keeps one staging slot for the duration of a `with` block."""

    def __init__(self, table, verify=False):
        self.table = table
        self.verify = verify
        self.slot = None
        self.failed = None

    def __enter__(self):
        self.slot = self.table.check_out()  # leak: __exit__ returns before the check_in when the block raised
        return self

    def __exit__(self, exc_type, exc, tb):
        if exc_type is not None:
            self.failed = exc_type.__name__
            return True
        if self.slot is not None:
            self.table.check_in(self.slot)
            self.slot = None
        return False


class QuietScope:
    def __init__(self, table):
        self.table = table
        self.slot = None
        self.failed = None

    def __enter__(self):
        self.slot = self.table.check_out()  # clean: near miss, __exit__ checks in before it looks at the error
        return self

    def __exit__(self, exc_type, exc, tb):
        slot, self.slot = self.slot, None
        if slot is not None:
            self.table.check_in(slot)
        if exc_type is None:
            return False
        self.failed = exc_type.__name__
        return issubclass(exc_type, torch.cuda.OutOfMemoryError)


def checksum(table, stream, tensors):
    """Host side checksums, for comparing replicas."""
    sums = []
    with QuietScope(table) as scope:  # clean: left through __exit__ on every way
        if scope.slot is None:
            return sums
        for t in tensors:
            scope.slot.write(t, stream)
            stream.synchronize()
            sums.append(int(scope.slot.host.sum()))
    return sums


def take_slot(table, tries, wait_s):
    """A slot after up to `tries` waits."""
    for _ in range(tries):
        s = table.check_out_wait(wait_s)  # clean: handed to the caller
        if s is not None:
            return s
    return None


def copy_all(table, stream, tensors, device):
    outs = []
    for t in tensors:
        s = take_slot(table, 3, 0.1)  # clean: checked in on both branches
        if s is None:
            outs.append(t.to(device))
            continue
        s.write(t, stream)
        if t.numel() == 0:
            table.check_in(s)
            continue
        outs.append(s.read(device))
        table.check_in(s)
    return outs


def find_large_slot(table, nbytes, tries):
    """Look for a slot whose host buffer lies on a 2 MiB boundary."""
    for _ in range(tries):
        s = take_slot(table, 1, 0.05)  # leak: a misaligned slot is overwritten by the next try
        if s is None:
            continue
        if s.host.data_ptr() % (2 << 20) == 0 and s.host.numel() >= nbytes:
            return s
    return None


def to_host(table, stream, t):
    """Host copy of the bytes of t."""
    s = table.check_out()  # leak: a clone is returned and the slot is dropped
    if s is None:
        return t.cpu()
    s.write(t, stream)
    stream.synchronize()
    return s.host[: t.numel() * t.element_size()].clone()
