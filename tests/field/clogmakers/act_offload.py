# Offloads activations that autograd has saved to pinned host memory and brings them back during
# the backward pass.  install() gives a pair of hooks for torch.autograd.graph.saved_tensors_hooks.
import collections
import itertools
import logging
import weakref

import torch

_logger = logging.getLogger(__name__)

MIN_BYTES = 1 << 20

Packed = collections.namedtuple("Packed", "key shape dtype")


class HostExhausted(RuntimeError):
    pass


def size_class(nbytes):
    return 1 << max(12, (nbytes - 1).bit_length())


class HostSlabs:
    """Pinned slabs by power of two, at most `limit` bytes of them."""

    def __init__(self, limit):
        self.limit = limit
        self.total = 0
        self.free = collections.defaultdict(list)

    def borrow(self, nbytes):
        cls = size_class(nbytes)
        if self.free[cls]:
            return self.free[cls].pop()  # clean: handed to the caller
        if self.total + cls > self.limit:
            raise HostExhausted(f"{nbytes} bytes, {self.total} of {self.limit} in use")
        self.total += cls
        return torch.empty(cls, dtype=torch.uint8, pin_memory=True)  # clean: a new slab for the caller, restore() lists it later

    def borrow_larger(self, nbytes):
        """Whatever free slab is large enough, None rather than pinning more memory."""
        for cls in sorted(self.free):
            if cls < nbytes:
                continue
            while self.free[cls]:
                slab = self.free[cls].pop()  # leak: slabs that are not pinned any more are dropped but stay counted in total
                if slab.is_pinned():
                    return slab
        return None

    def restore(self, slab):
        self.free[slab.numel()].append(slab)


class EventBox:
    def __init__(self, n):
        self._events = [torch.cuda.Event() for _ in range(n)]

    def draw(self):
        return self._events.pop() if self._events else None  # clean: handed to the caller

    def drop(self, ev):
        self._events.append(ev)


class Offloader:
    def __init__(self, slabs, events, stream=None):
        self.slabs = slabs
        self.events = events
        self.stream = stream or torch.cuda.Stream()
        self.table = {}
        self.fetched = {}
        self.keys = itertools.count()
        self.kept = 0

    # ---- hooks

    def pack(self, tensor):
        if not tensor.is_cuda or tensor.numel() * tensor.element_size() < MIN_BYTES:
            self.kept += 1
            return tensor
        try:
            slab = self._copy_out(tensor)  # leak: graphs that are never run backward are swept by reset(), which only clears the table
        except HostExhausted:
            self.kept += 1
            return tensor
        key = next(self.keys)
        self.table[key] = slab
        return Packed(key, tensor.shape, tensor.dtype)

    def _copy_out(self, tensor):
        src = tensor.contiguous().view(-1).view(torch.uint8)
        slab = self.slabs.borrow(src.numel())  # clean: returned to the caller
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            slab[: src.numel()].copy_(src, non_blocking=True)
            src.record_stream(self.stream)
        return slab

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        ready = self.fetched.pop(packed.key, None)
        if ready is not None:
            flat, ev = ready
            torch.cuda.current_stream().wait_event(ev)
        else:
            flat = self._copy_in(packed)
        self.slabs.restore(self.table.pop(packed.key))
        return flat.view(packed.dtype).view(packed.shape)

    def _copy_in(self, packed):
        n = packed.shape.numel() * torch.empty(0, dtype=packed.dtype).element_size()
        return self.table[packed.key][:n].to("cuda", non_blocking=True)

    def prefetch(self, packed):
        """Starts the way back before autograd asks."""
        ev = self.events.draw()  # leak: unpack() waits for the event of a fetched tensor and does not drop it
        if ev is None:
            return False
        with torch.cuda.stream(self.stream):
            flat = self._copy_in(packed)
            ev.record(self.stream)
        self.fetched[packed.key] = (flat, ev)
        return True

    def reset(self):
        if self.table:
            _logger.info("%d saved tensors were not asked for", len(self.table))
        for _, ev in self.fetched.values():
            self.events.drop(ev)
        self.fetched.clear()
        self.table.clear()

    def install(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def step_end(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        self.reset()

    # ---- parameters

    def park(self, module):
        """Moves the parameters of a module to the host until the returned function is called."""
        held = []
        try:
            for p in module.parameters():
                slab = self._copy_out(p.data)  # clean: near miss, held is restored here when one fails and by bring_back otherwise
                held.append((p, slab, p.shape, p.dtype))
        except HostExhausted:
            for _, slab, _, _ in held:
                self.slabs.restore(slab)
            return None
        self.stream.synchronize()
        for p, _, _, dtype in held:
            p.data = torch.empty(0, dtype=dtype, device="cuda")

        def bring_back():
            while held:
                p, slab, shape, dtype = held.pop()
                n = shape.numel() * torch.empty(0, dtype=dtype).element_size()
                p.data = slab[:n].to("cuda").view(dtype).view(shape)
                self.slabs.restore(slab)

        return bring_back

    def park_state(self, states):
        """Optimizer state, two tensors for every parameter."""
        parked = {}
        for name, state in states.items():
            try:
                m = self._copy_out(state["exp_avg"])  # leak: the slab of exp_avg is lost when there is none for exp_avg_sq
            except HostExhausted:
                break
            try:
                v = self._copy_out(state["exp_avg_sq"])  # clean: goes to parked together with the first
            except HostExhausted:
                _logger.warning("state of %s stays on the device", name)
                continue
            parked[name] = (m, v)
        return parked

    def unpark_state(self, states, parked):
        for name, pair in parked.items():
            for field, slab in zip(("exp_avg", "exp_avg_sq"), pair):
                t = states[name][field]
                t.copy_(slab[: t.numel() * t.element_size()].view(t.dtype).view_as(t))
                self.slabs.restore(slab)
        parked.clear()


class BlockOffload(torch.nn.Module):
    """Runs a block under the hooks and keeps its input on the host for recomputation."""

    def __init__(self, block, off):
        super().__init__()
        self.block = block
        self.off = off
        self._slab = None
        self._meta = None

    def forward(self, x):
        self.stash(x)
        with self.off.install():
            return self.block(x)

    def stash(self, x):
        slab = self.off.slabs.borrow_larger(x.numel() * x.element_size())  # leak: a second forward before recall() rebinds the slab
        if slab is None:
            return False
        flat = x.detach().contiguous().view(-1).view(torch.uint8)
        slab[: flat.numel()].copy_(flat)
        self._slab = slab
        self._meta = (x.shape, x.dtype, flat.numel())
        return True

    def recall(self):
        if self._slab is None:
            return None
        shape, dtype, n = self._meta
        x = self._slab[:n].to("cuda").view(dtype).view(shape)
        slab, self._slab = self._slab, None
        self.off.slabs.restore(slab)
        return x


class StashOnce:
    def __init__(self, slabs):
        self.slabs = slabs
        self.slab = None

    def keep(self, x):
        n = x.numel() * x.element_size()
        if self.slab is not None:
            self.slabs.restore(self.slab)
            self.slab = None
        self.slab = self.slabs.borrow(n)  # clean: near miss, what was bound before has been restored above
        self.slab[:n].copy_(x.contiguous().view(-1).view(torch.uint8))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.slab is not None:
            self.slabs.restore(self.slab)
            self.slab = None


def tie(slabs, owner, nbytes):
    """A slab that lives as long as some other object."""
    slab = slabs.borrow(nbytes)  # clean: near miss, the finalizer of the owner restores it
    weakref.finalize(owner, slabs.restore, slab)
    return slab


def roundtrip_gbps(off, nbytes, rounds=10):
    ev0, ev1 = off.events.draw(), None  # clean: near miss, dropped in finally when it is not None
    slab = None
    try:
        ev1 = off.events.draw()  # clean: same guard, same finally
        if ev0 is None or ev1 is None:
            return None
        slab = off.slabs.borrow(nbytes)  # clean: restored in finally
        ev0.record()
        for _ in range(rounds):
            slab.to("cuda", non_blocking=True)
        ev1.record()
        ev1.synchronize()
        return nbytes * rounds / ev0.elapsed_time(ev1) / 1e6
    except HostExhausted:
        return None
    finally:
        for ev in (ev0, ev1):
            if ev is not None:
                off.events.drop(ev)
        if slab is not None:
            off.slabs.restore(slab)
