"""Ulysses-style head/sequence exchange: registered memory windows and asynchronous work handles."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional

import numpy as np


@dataclass(eq=False)
class Window:
    key: int
    view: np.ndarray
    live: bool = True


class WindowRegistry:
    """Memory registration with the NIC; keys are scarce."""

    def __init__(self, max_keys: int = 16) -> None:
        self.max_keys = max_keys
        self._live: Dict[int, Window] = {}
        self._next = 1

    def register(self, arr: np.ndarray) -> Optional[Window]:
        if len(self._live) >= self.max_keys:
            return None
        w = Window(self._next, arr.reshape(-1))
        self._next += 1
        self._live[w.key] = w
        return w

    def deregister(self, w: Window) -> None:
        w.live = False
        del self._live[w.key]

    @property
    def live(self) -> int:
        return len(self._live)


class AllToAll:
    """One exchange per layer; `overlap` delays completion to the next layer."""

    def __init__(self, reg: WindowRegistry, overlap: bool, zero_copy: bool) -> None:
        self.reg = reg
        self.overlap = overlap
        self.zero_copy = zero_copy
        self._send: Optional[Window] = None
        self._recv: Optional[Window] = None
        self._bounce: Optional[Window] = None
        self._meta: Optional[Window] = None

    def open(self, send: np.ndarray, recv: np.ndarray) -> None:
        self.close()
        if self.zero_copy:
            self._send = self.reg.register(send)  # clean: near miss, close deregisters under the same zero_copy
        else:
            self._bounce = self.reg.register(np.empty_like(send))  # clean: close deregisters in the else branch
        self._recv = self.reg.register(recv)  # clean: close deregisters it whatever the mode
        if self.overlap:
            self._meta = self.reg.register(np.zeros(4, np.int64))  # leak: close forgets the field without deregistering

    def close(self) -> None:
        if self.zero_copy:
            if self._send is not None:
                self.reg.deregister(self._send)
        else:
            if self._bounce is not None:
                self.reg.deregister(self._bounce)
        if self._recv is not None:
            self.reg.deregister(self._recv)
        self._send = self._recv = self._bounce = self._meta = None


class HeadScatter:
    def __init__(self, reg: WindowRegistry, heads: int, gqa: bool) -> None:
        self.reg = reg
        self.heads = heads
        self.gqa = gqa
        self._kv: List[Window] = []
        self._q: Optional[Window] = None

    def bind(self, q: np.ndarray, kv: np.ndarray) -> bool:
        """Registers q and, per head group, kv."""
        self.unbind()
        self._q = self.reg.register(q)  # clean: unbind deregisters it
        if self._q is None:
            return False
        for part in np.array_split(kv, self.heads if not self.gqa else 1):
            w = self.reg.register(part)  # clean: near miss, those already kept go with unbind
            if w is None:
                self.unbind()
                return False
            self._kv.append(w)
        return True

    def unbind(self) -> None:
        for w in self._kv:
            self.reg.deregister(w)
        self._kv = []
        if self._q is not None:
            self.reg.deregister(self._q)
            self._q = None

    def probe(self, q: np.ndarray, kv: np.ndarray) -> bool:
        wq = self.reg.register(q)  # clean: deregistered below when it was got
        wkv = self.reg.register(kv)  # leak: deregistered only in the gqa case
        ok = wq is not None and wkv is not None
        if self.gqa and wkv is not None:
            self.reg.deregister(wkv)
        if wq is not None:
            self.reg.deregister(wq)
        return ok

    def regroup(self, parts: List[np.ndarray]) -> int:
        """Register fresh head groups in place of the bound ones."""
        fresh = [w for w in (self.reg.register(p) for p in parts) if w is not None]  # leak: too few keys returns without undoing those got
        if len(fresh) < len(parts):
            return len(self._kv)
        old, self._kv = self._kv, fresh
        for w in old:
            self.reg.deregister(w)
        return len(fresh)

    def regroup_safe(self, parts: List[np.ndarray]) -> int:
        fresh = [self.reg.register(p) for p in parts]  # clean: near miss, one of the two lists is always deregistered
        complete = all(w is not None for w in fresh)
        drop = self._kv if complete else [w for w in fresh if w is not None]
        if complete:
            self._kv = list(fresh)
        for w in drop:
            self.reg.deregister(w)
        return len(self._kv)


def exchange_once(reg: WindowRegistry, x: np.ndarray, world: int, out: Optional[Window] = None) -> np.ndarray:
    mine = None
    if out is None:
        out = mine = reg.register(np.empty_like(x))  # clean: near miss, mine marks the window made here
    out.view[...] = np.roll(x.reshape(-1), world)
    result = out.view.copy()
    if mine is not None:
        reg.deregister(mine)
    return result


def exchange_chunks(reg: WindowRegistry, x: np.ndarray, chunks: int) -> List[np.ndarray]:
    outs: List[np.ndarray] = []
    win: Optional[Window] = None
    for part in np.array_split(x, chunks):
        if win is None or win.view.size != part.size:
            win = reg.register(np.empty_like(part))  # leak: a chunk of another size rebinds win
        win.view[...] = part.reshape(-1)
        outs.append(win.view.copy())
    if win is not None:
        reg.deregister(win)
    return outs


def main() -> None:
    reg = WindowRegistry(8)
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    a2a = AllToAll(reg, overlap=False, zero_copy=True)
    a2a.open(x, x.copy())
    a2a.close()
    hs = HeadScatter(reg, 4, gqa=False)
    hs.bind(x, x)
    hs.regroup_safe([x[:2], x[2:]])
    hs.unbind()
    exchange_once(reg, x, 2)
    print("live", reg.live)
    a2a.overlap = True
    a2a.open(x, x.copy())
    a2a.close()
    hs.probe(x, x)
    hs.regroup([x] * 9)
    exchange_chunks(WindowRegistry(4), x, 3)
    print("live", reg.live)


if __name__ == "__main__":
    main()
