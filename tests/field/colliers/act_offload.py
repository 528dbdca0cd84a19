"""Activation offload through saved-tensor hooks, pinned host slabs underneath."""
from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Callable, Optional

log = logging.getLogger("act_offload")
MIN_BYTES = 1024


class SlabExhausted(RuntimeError):
    pass


class PinnedSlabs:
    """Fixed number of pinned slabs, handed out by index."""

    def __init__(self, count: int, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self._mem = [bytearray(slab_bytes) for _ in range(count)]
        self._free = list(range(count))
        self._cv = threading.Condition()

    def take(self, nbytes: int, timeout: Optional[float] = 0.0) -> int:
        if nbytes > self.slab_bytes:
            raise SlabExhausted(f"{nbytes} > slab")
        with self._cv:
            if not self._free and timeout:
                self._cv.wait_for(lambda: bool(self._free), timeout)
            if not self._free:
                raise SlabExhausted("no slab free")
            return self._free.pop()

    def untake(self, idx: int) -> None:
        with self._cv:
            self._free.append(idx)
            self._cv.notify()

    def view(self, idx: int, nbytes: int) -> memoryview:
        return memoryview(self._mem[idx])[:nbytes]

    @property
    def n_free(self) -> int:
        return len(self._free)


@dataclass
class Saved:
    nbytes: int
    slab: int = -1
    inline: Optional[bytes] = None
    event: Optional["CopyEvent"] = None


@dataclass
class CopyEvent:
    done: bool = False
    callbacks: list[Callable[[], None]] = field(default_factory=list)

    def on_done(self, fn: Callable[[], None]) -> None:
        if self.done:
            fn()
        else:
            self.callbacks.append(fn)

    def fire(self) -> None:
        self.done = True
        for fn in self.callbacks:
            fn()
        self.callbacks.clear()


class OffloadHooks:
    """pack/unpack pair for torch.autograd.graph.saved_tensors_hooks."""

    def __init__(self, slabs: PinnedSlabs, dedup: bool = True) -> None:
        self.slabs = slabs
        self.dedup = dedup
        self.live: dict[int, Saved] = {}
        self.by_key: dict[int, int] = {}
        self.next_id = 0
        self.stats = {"offloaded": 0, "skipped": 0}

    def _copy(self, t: bytes, dst: int) -> CopyEvent:
        self.slabs.view(dst, len(t))[:] = t
        return CopyEvent(done=True)

    def pack(self, t: bytes) -> int:
        hid = self.next_id
        self.next_id += 1
        if len(t) < MIN_BYTES:
            self.live[hid] = Saved(len(t), inline=t)
            return hid
        try:
            slab = self.slabs.take(len(t))  # clean: stored in live, unpack gives it back
        except SlabExhausted:
            self.stats["skipped"] += 1
            self.live[hid] = Saved(len(t), inline=t)
            return hid
        self.live[hid] = Saved(len(t), slab=slab, event=self._copy(t, slab))
        self.stats["offloaded"] += 1
        return hid

    def unpack(self, hid: int) -> bytes:
        s = self.live.pop(hid)
        if s.inline is not None:
            return s.inline
        out = bytes(self.slabs.view(s.slab, s.nbytes))
        self.slabs.untake(s.slab)
        return out

    def pack_dedup(self, t: bytes) -> int:
        """Views of one base share a slab when dedup is on."""
        slab = self.slabs.take(len(t))  # leak: a dedup hit returns the old id and forgets the fresh slab
        key = hash(t)
        if self.dedup and key in self.by_key:
            return self.by_key[key]
        hid = self.next_id
        self.next_id += 1
        self.by_key[key] = hid
        self.live[hid] = Saved(len(t), slab=slab, event=self._copy(t, slab))
        return hid

    def drain(self) -> None:
        """Graph was freed without backward (eval under grad, early stop)."""
        for s in self.live.values():
            if s.slab >= 0:
                self.slabs.untake(s.slab)
        self.live.clear()
        self.by_key.clear()


class LayerOffloader:
    """Whole-layer variant: one slab a layer and microbatch."""

    def __init__(self, slabs: PinnedSlabs, n_layers: int) -> None:
        self.slabs = slabs
        self.n_layers = n_layers
        self.resident: dict[tuple[int, int], Saved] = {}
        self.reload: dict[int, int] = {}
        self.latest: dict[int, int] = {}

    def offload(self, layer: int, mb: int, act: bytes) -> bool:
        if layer == self.n_layers - 1:
            return False  # needed straight away
        if (layer, mb) in self.resident:
            return True
        deadline = time.monotonic() + 0.05
        while True:
            try:
                slab = self.slabs.take(len(act), timeout=0.01)  # clean: near miss, breaks out with it and stores it in resident
                break
            except SlabExhausted:
                if time.monotonic() > deadline:
                    return False
        self.slabs.view(slab, len(act))[:] = act
        self.resident[(layer, mb)] = Saved(len(act), slab=slab)
        return True

    def fetch(self, layer: int, mb: int) -> Optional[bytes]:
        s = self.resident.pop((layer, mb), None)
        if s is None:
            return None
        data = bytes(self.slabs.view(s.slab, s.nbytes))
        self.slabs.untake(s.slab)
        return data

    def offload_latest(self, layer: int, act: bytes) -> None:
        """Recompute input: keeps the newest activation of a layer."""
        slab = self.slabs.take(len(act))  # leak: a previous slab of the layer in latest is overwritten
        self.slabs.view(slab, len(act))[:] = act
        self.latest[layer] = slab

    def replace_reload(self, layer: int, act: bytes) -> None:
        slab = self.slabs.take(len(act))  # clean: near miss, the old slab is popped and given back first
        self.slabs.view(slab, len(act))[:] = act
        old = self.reload.pop(layer, None)
        if old is not None:
            self.slabs.untake(old)
        self.reload[layer] = slab

    def drop_reload(self) -> None:
        while self.reload:
            _, slab = self.reload.popitem()
            self.slabs.untake(slab)

    def drop_latest(self) -> None:
        for slab in self.latest.values():
            self.slabs.untake(slab)
        self.latest.clear()

    def discard_microbatch(self, mb: int) -> int:
        """Loss was inf: forget the microbatch."""
        n = 0
        for key in [k for k in self.resident if k[1] == mb]:
            s = self.resident.pop(key)
            self.slabs.untake(s.slab)
            n += 1
        return n

    def roundtrip_check(self, act: bytes) -> bool:
        slab = self.slabs.take(len(act))  # leak: mismatch returns False before untake
        v = self.slabs.view(slab, len(act))
        v[:] = act
        if bytes(v) != act:
            log.error("slab %d corrupt", slab)
            return False
        self.slabs.untake(slab)
        return True

    def push_async(self, act: bytes, submit: Callable[[int], CopyEvent]) -> None:
        slab = self.slabs.take(len(act))  # clean: the copy's callback gives it back
        self.slabs.view(slab, len(act))[:] = act
        ev = submit(slab)
        ev.on_done(lambda: self.slabs.untake(slab))

    def push_many(self, acts: list[bytes], submit: Callable[[int], CopyEvent]) -> int:
        sent = 0
        for act in acts:
            try:
                slab = self.slabs.take(len(act), timeout=0.01)  # leak: a submit error is logged and the slab is not given back
                self.slabs.view(slab, len(act))[:] = act
                submit(slab).on_done(lambda s=slab: self.slabs.untake(s))
                sent += 1
            except (SlabExhausted, OSError) as e:
                log.warning("push skipped: %s", e)
        return sent

    def warm(self, n: int) -> None:
        """Touch n slabs so that first-use page faults are not in step 0."""
        held: list[int] = []
        for _ in range(min(n, self.slabs.n_free)):
            held.append(self.slabs.take(1))  # clean: held list is given back below
        for s in held:
            self.slabs.view(s, 1)[0] = 0
        for s in held:
            self.slabs.untake(s)


if __name__ == "__main__":
    slabs = PinnedSlabs(8, 4096)
    hooks = OffloadHooks(slabs)
    a = hooks.pack(b"x" * 2048)
    assert hooks.unpack(a) == b"x" * 2048
    lo = LayerOffloader(slabs, 4)
    lo.offload(0, 0, b"y" * 100)
    assert lo.fetch(0, 0) == b"y" * 100
    lo.replace_reload(1, b"z")
    lo.replace_reload(1, b"zz")
    lo.drop_reload()
    lo.push_async(b"q", lambda s: CopyEvent(done=True))
    lo.push_many([b"1", b"2"], lambda s: CopyEvent(done=True))
    lo.warm(4)
    print("free", slabs.n_free, hooks.stats)
