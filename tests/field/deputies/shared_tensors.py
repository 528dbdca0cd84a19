"""Reference-counted tensors shared between engine stages, with borrowed or owned handles."""
from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Callable

import torch


class Registry:
    """retain() adds a reference under a key, drop() takes one away; at zero the tensor is freed."""

    def __init__(self) -> None:
        self._items: dict[str, tuple[torch.Tensor, int]] = {}
        self._lock = threading.Lock()

    def publish(self, key: str, t: torch.Tensor) -> bool:
        with self._lock:
            if key in self._items:
                return False
            self._items[key] = (t, 1)
            return True

    def retain(self, key: str) -> torch.Tensor | None:
        with self._lock:
            entry = self._items.get(key)
            if entry is None:
                return None
            t, n = entry
            self._items[key] = (t, n + 1)
            return t

    def drop(self, key: str) -> None:
        with self._lock:
            t, n = self._items[key]
            if n == 1:
                del self._items[key]
            else:
                self._items[key] = (t, n - 1)


@dataclass
class Handle:
    key: str
    tensor: torch.Tensor
    owned: bool


class Stage:
    def __init__(self, name: str, reg: Registry) -> None:
        self.name = name
        self.reg = reg
        self.local: dict[str, torch.Tensor] = {}
        self.inputs: dict[str, Handle] = {}
        self.watchers: list[Callable[[], None]] = []

    def open(self, key: str) -> Handle | None:
        """Local tensors are lent, others are retained for the caller."""
        if key in self.local:
            return Handle(key, self.local[key], owned=False)
        t = self.reg.retain(key)  # clean: near miss, the handle goes out with owned=True, close() drops it
        if t is None:
            return None
        return Handle(key, t, owned=True)

    def close(self, h: Handle) -> None:
        if h.owned:
            h.owned = False
            self.reg.drop(h.key)

    def open_cast(self, key: str, dtype: torch.dtype) -> Handle | None:
        h = self.open(key)  # leak: after a cast a new handle with owned=False goes out and the retained reference is forgotten
        if h is None or h.tensor.dtype == dtype:
            return h
        return Handle(key, h.tensor.to(dtype), owned=False)

    def bind(self, port: str, key: str) -> bool:
        h = self.open(key)  # clean: near miss, the handle bound to that port before is closed when replaced
        if h is None:
            return False
        before = self.inputs.get(port)
        if before is not None:
            self.close(before)
        self.inputs[port] = h
        return True

    def bind_cast(self, port: str, key: str, dtype: torch.dtype) -> bool:
        h = self.open_cast(key, dtype)  # clean: near miss, held in inputs like any other, the earlier one closed
        if h is None:
            return False
        before = self.inputs.pop(port, None)
        if before is not None:
            self.close(before)
        self.inputs[port] = h
        return True

    def add(self, a: str, b: str, keep: bool) -> torch.Tensor | None:
        ha = self.open(a)  # clean: near miss, closed in the finally with or without hb
        if ha is None:
            return None
        try:
            hb = self.open(b)  # leak: closed only under `not keep`, though nothing else has the handle
            if hb is None:
                return None
            out = ha.tensor + hb.tensor
            if keep:
                self.local[f"{a}+{b}"] = out
                return out
            self.close(hb)
            return out
        finally:
            self.close(ha)

    def gather(self, keys: list[str], pin: bool) -> torch.Tensor | None:
        held: list[Handle] = []
        for k in keys:
            h = self.open(k)  # clean: near miss, on a missing key and at the end alike everything in held is closed
            if h is None:
                break
            held.append(h)
        complete = len(held) == len(keys)
        out = torch.stack([h.tensor for h in held]) if complete else None
        for h in held:
            self.close(h)
        if out is not None and pin:
            out = out.pin_memory()
        return out

    def watch(self, key: str, owner: object) -> bool:
        t = self.reg.retain(key)  # clean: near miss, the finalizer of owner drops it
        if t is None:
            return False
        weakref.finalize(owner, self.reg.drop, key)
        return True

    def subscribe(self, key: str, fn: Callable[[torch.Tensor], None]) -> bool:
        t = self.reg.retain(key)  # leak: the unsubscribe callbacks are made only for watched keys, others are retained for ever
        if t is None:
            return False
        fn(t)
        if key.startswith("watch/"):
            self.watchers.append(lambda: self.reg.drop(key))
        return True

    def shutdown(self) -> None:
        for h in self.inputs.values():
            self.close(h)
        self.inputs.clear()
        for undo in self.watchers:
            undo()
        self.watchers.clear()


def forward(stage: Stage, weight: torch.Tensor, out_key: str) -> bool:
    x = stage.inputs["x"].tensor
    y = x @ weight
    if not stage.reg.publish(out_key, y):  # clean: near miss, a taken key publishes nothing, else retire() drops it
        return False
    return True


def retire(stage: Stage, out_key: str) -> None:
    stage.reg.drop(out_key)
