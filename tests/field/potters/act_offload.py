"""Activation offload for training: saved tensors go to pinned host buffers between forward and backward."""
from __future__ import annotations

import logging
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

try:
    import torch
except ImportError:
    torch = None

log = logging.getLogger(__name__)


class HostBuffer:
    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.data: List[float] = [0.0] * numel

    def copy_from(self, values: List[float]) -> None:
        self.data[:len(values)] = values


class PinnedArena:
    def __init__(self, count: int, numel: int) -> None:
        self.numel = numel
        self._stack = [HostBuffer(numel) for _ in range(count)]
        self._guard = threading.Lock()

    def grab(self, numel: int) -> Optional[HostBuffer]:
        if numel > self.numel:
            return None
        with self._guard:
            return self._stack.pop() if self._stack else None

    def ungrab(self, buf: HostBuffer) -> None:
        with self._guard:
            self._stack.append(buf)

    def available(self) -> int:
        with self._guard:
            return len(self._stack)


class Handle:
    """What pack returns to autograd in place of the tensor."""

    def __init__(self, buf: HostBuffer, n: int) -> None:
        self.buf: Optional[HostBuffer] = buf
        self.n = n


Packed = Union[Handle, List[float]]


class SavedTensorHooks:
    def __init__(self, arena: PinnedArena, min_numel: int) -> None:
        self.arena = arena
        self.min_numel = min_numel
        self.by_layer: Dict[int, List[Handle]] = {}
        self.layer = 0

    def pack(self, values: List[float]) -> Packed:
        if len(values) < self.min_numel:
            return values
        buf = self.arena.grab(len(values))  # clean: in the handle, unpack gives it back
        if buf is None:
            return values
        buf.copy_from(values)
        handle = Handle(buf, len(values))
        self.by_layer.setdefault(self.layer, []).append(handle)
        return handle

    def unpack(self, packed: Packed) -> List[float]:
        if not isinstance(packed, Handle):
            return packed
        assert packed.buf is not None
        out = packed.buf.data[:packed.n]
        self.arena.ungrab(packed.buf)
        packed.buf = None
        return out

    def end_step(self) -> None:
        """Handles of branches that backward never visited."""
        for handles in self.by_layer.values():
            for handle in handles:
                if handle.buf is not None:
                    self.arena.ungrab(handle.buf)
                    handle.buf = None
        self.by_layer.clear()


class LayerOffloader:
    """Module hooks; one buffer per layer between forward and backward."""

    def __init__(self, arena: PinnedArena) -> None:
        self.arena = arena
        self.slots: Dict[int, HostBuffer] = {}
        self.skip: set = set()
        self.enabled = True

    def on_forward(self, layer: int, act: List[float]) -> None:
        if not self.enabled:
            return
        buf = self.arena.grab(len(act))  # leak: backward of a skipped layer returns before it pops the buffer
        if buf is None:
            return
        buf.copy_from(act)
        self.slots[layer] = buf

    def on_backward(self, layer: int) -> Optional[List[float]]:
        if layer in self.skip:
            return None
        buf = self.slots.pop(layer, None)
        if buf is None:
            return None
        out = list(buf.data)
        self.arena.ungrab(buf)
        return out

    def recompute(self, layer: int, fn: Callable[[], List[float]]) -> List[float]:
        act = fn()
        tmp = self.arena.grab(len(act))  # clean: near miss, every use is behind the same None test
        if tmp is not None:
            tmp.copy_from(act)
        act = [a * 0.5 for a in act]
        if tmp is not None:
            act = [a + b for a, b in zip(act, tmp.data)]
            self.arena.ungrab(tmp)
        return act

    def grad_pair(self, g: List[float], w: List[float]) -> Optional[float]:
        gb = self.arena.grab(len(g))  # leak: w too large or arena empty returns without it
        if gb is None:
            return None
        wb = self.arena.grab(len(w))  # clean: ungrabbed at the end
        if wb is None:
            return None
        gb.copy_from(g)
        wb.copy_from(w)
        dot = sum(x * y for x, y in zip(gb.data, wb.data))
        self.arena.ungrab(wb)
        self.arena.ungrab(gb)
        return dot


class OptimizerStateMover:
    def __init__(self, arena: PinnedArena) -> None:
        self.arena = arena
        self.state: Dict[str, HostBuffer] = {}

    def evict(self, name: str, values: List[float]) -> bool:
        buf = self.state.get(name)
        if buf is None:
            buf = self.arena.grab(len(values))  # clean: near miss, kept by name and reused, forget gives it back
        if buf is None:
            return False
        buf.copy_from(values)
        self.state[name] = buf
        return True

    def forget(self, name: str) -> None:
        buf = self.state.pop(name, None)
        if buf is not None:
            self.arena.ungrab(buf)

    def rename(self, old: str, new: str) -> None:
        if old in self.state:
            self.forget(new)
            self.state[new] = self.state.pop(old)

    def norm(self, values: List[float]) -> float:
        buf = self._stage(values)  # leak: summed and dropped
        if buf is None:
            return sum(v * v for v in values)
        return sum(v * v for v in buf.data[:len(values)])

    def _stage(self, values: List[float]) -> Optional[HostBuffer]:
        buf = self.arena.grab(len(values))  # clean: the wrapper hands it on
        if buf is not None:
            buf.copy_from(values)
        return buf

    def clip(self, values: List[float], limit: float) -> List[float]:
        buf = self._stage(values)  # clean: a None ends early, otherwise ungrabbed
        if buf is None:
            return [min(v, limit) for v in values]
        out = [min(v, limit) for v in buf.data[:len(values)]]
        self.arena.ungrab(buf)
        return out

    def checkpoint(self, names: List[str], sink: Callable[[str, List[float]], None], arena: PinnedArena) -> int:
        done = 0
        for name in names:
            buf = arena.grab(arena.numel)  # leak: a failing sink is logged and the loop goes on
            if buf is None:
                break
            src = self.state[name] if name in self.state else buf
            try:
                buf.copy_from(src.data)
                sink(name, buf.data)
                arena.ungrab(buf)
                done += 1
            except OSError as err:
                log.warning("%s not written: %s", name, err)
        return done
