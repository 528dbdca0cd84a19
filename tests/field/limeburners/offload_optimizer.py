"""AdamW whose states live in host memory; shards are staged through a few device windows.

The stager counts windows with a budget.  Two kinds of lease exist: a window (device memory) and
a stream ticket (permission to have one more copy in flight).
"""
from __future__ import annotations

import contextlib
import enum
import threading
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Tuple

import torch


class Window:
    __slots__ = ("mem", "tag")

    def __init__(self, numel: int, device):
        self.mem = torch.empty(numel, device=device)
        self.tag = ""


class WindowStager:
    def __init__(self, windows: int, numel: int, device="cuda"):
        self.numel = numel
        self._idle = [Window(numel, device) for _ in range(windows)]
        self._quarantine: List[Window] = []
        self._lock = threading.Lock()

    def reserve(self, tag: str) -> Optional[Window]:
        with self._lock:
            if not self._idle:
                return None
            w = self._idle.pop()
        w.tag = tag
        return w

    def relinquish(self, w: Window) -> None:
        w.tag = ""
        with self._lock:
            self._idle.append(w)

    def scrub(self) -> int:
        """Looks for windows with NaNs after an overflow step; good ones return to service."""
        seen: List[Window] = []
        bad = 0
        while True:
            w = self.reserve("scrub")  # clean: near miss, relinquished after the loop, good or bad
            if w is None:
                break
            if torch.isnan(w.mem).any():
                w.mem.zero_()
                bad += 1
            seen.append(w)
        for w in seen:
            self.relinquish(w)
        return bad

    def shrink(self, keep: int) -> int:
        """Puts surplus windows aside for `restore`."""
        while len(self._idle) > keep:
            w = self.reserve("aside")  # clean: near miss, restore relinquishes what is in quarantine
            if w is None:
                break
            self._quarantine.append(w)
        return len(self._quarantine)

    def restore(self) -> None:
        while self._quarantine:
            self.relinquish(self._quarantine.pop())


class CopyTickets:
    def __init__(self, limit: int):
        self._left = limit

    def enter(self) -> bool:
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def leave(self) -> None:
        self._left += 1


class Mode(enum.Enum):
    RESIDENT = 0
    STAGED = 1


@dataclass
class ParamState:
    name: str
    param: torch.Tensor
    host_m: torch.Tensor
    host_v: torch.Tensor
    mode: Mode = Mode.STAGED
    win_m: Optional[Window] = None
    win_v: Optional[Window] = None
    resident: Optional[Window] = None
    steps: int = 0


class OffloadedAdamW:
    def __init__(self, stager: WindowStager, tickets: CopyTickets, lr: float = 1e-4):
        self.stager = stager
        self.tickets = tickets
        self.lr = lr
        self.states: Dict[str, ParamState] = {}

    def add(self, st: ParamState) -> None:
        self.states[st.name] = st

    def _fetch(self, st: ParamState) -> bool:
        st.win_m = self.stager.reserve(st.name + ".m")  # clean: near miss, taken back below or by _flush
        if st.win_m is None:
            return False
        st.win_v = self.stager.reserve(st.name + ".v")  # clean: _flush relinquishes it, or None
        if st.win_v is None:
            self.stager.relinquish(st.win_m)
            st.win_m = None
            return False
        n = st.param.numel()
        st.win_m.mem[:n].copy_(st.host_m.flatten(), non_blocking=True)
        st.win_v.mem[:n].copy_(st.host_v.flatten(), non_blocking=True)
        return True

    def _flush(self, st: ParamState) -> None:
        n = st.param.numel()
        st.host_m.flatten().copy_(st.win_m.mem[:n])
        st.host_v.flatten().copy_(st.win_v.mem[:n])
        self.stager.relinquish(st.win_m)
        self.stager.relinquish(st.win_v)
        st.win_m = st.win_v = None

    def _adam(self, st: ParamState) -> None:
        n = st.param.numel()
        g = st.param.grad.flatten()
        m, v = st.win_m.mem[:n], st.win_v.mem[:n]
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.95).addcmul_(g, g, value=0.05)
        st.param.data.flatten().addcdiv_(m, v.sqrt().add_(1e-8), value=-self.lr)
        st.steps += 1

    def step(self) -> int:
        stepped = 0
        for st in self.states.values():
            if st.param.grad is None:
                continue
            if not self._fetch(st):
                continue
            self._adam(st)
            self._flush(st)
            stepped += 1
        return stepped

    def step_throttled(self) -> int:
        stepped = 0
        for st in self.states.values():
            if not self.tickets.enter():  # leak: the continue for a missing gradient does not leave
                break
            if st.param.grad is None:
                continue
            if self._fetch(st):
                self._adam(st)
                self._flush(st)
                stepped += 1
            self.tickets.leave()
        return stepped

    def clip_moments(self, limit: float) -> int:
        """Clamps second moments in the host copies by way of a window."""
        touched = 0
        for st in self.states.values():
            if not self.tickets.enter():  # clean: left on both ways of the turn
                break
            w = self.stager.reserve("clip")  # clean: relinquished at the end of the turn, or None
            if w is None:
                self.tickets.leave()
                continue
            n = st.host_v.numel()
            w.mem[:n].copy_(st.host_v.flatten())
            if float(w.mem[:n].amax()) > limit:
                st.host_v.flatten().copy_(w.mem[:n].clamp_max_(limit))
                touched += 1
            self.stager.relinquish(w)
            self.tickets.leave()
        return touched

    def make_resident(self, name: str) -> bool:
        """Small hot parameters keep a window for their first moment over steps."""
        st = self.states[name]
        if st.mode is Mode.RESIDENT:
            return True
        w = self.stager.reserve(name + ".resident")  # clean: near miss, make_staged relinquishes by the mode
        if w is None:
            return False
        st.resident = w
        st.mode = Mode.RESIDENT
        return True

    def make_staged(self, name: str) -> None:
        st = self.states[name]
        if st.mode is Mode.RESIDENT:
            self.stager.relinquish(st.resident)
            st.resident = None
            st.mode = Mode.STAGED

    def rebuild(self, name: str, fresh: torch.Tensor) -> ParamState:
        """Replaces a parameter after a resize and prepares windows for the first step."""
        st = ParamState(name, fresh, torch.zeros_like(fresh), torch.zeros_like(fresh))
        old = self.states.get(name)
        if old is not None and old.mode is Mode.RESIDENT:
            self.make_staged(name)
        self.states[name] = st
        return st


class AmsState:
    """Third moment of AMSGrad for one group; attach / detach bracket a phase of training."""

    def __init__(self, stager: WindowStager):
        self.stager = stager
        self.vmax: Optional[Window] = None
        self.scratch: Optional[Window] = None

    def attach(self, tag: str) -> bool:
        self.vmax = self.stager.reserve(tag + ".vmax")  # clean: near miss, detach relinquishes it
        if self.vmax is None:
            return False
        self.scratch = self.stager.reserve(tag + ".scratch")  # leak: detach only sets it to None
        return self.scratch is not None

    def update(self, v: torch.Tensor) -> None:
        n = v.numel()
        self.scratch.mem[:n].copy_(v.flatten())
        torch.maximum(self.vmax.mem[:n], self.scratch.mem[:n], out=self.vmax.mem[:n])

    def detach(self) -> None:
        if self.vmax is not None:
            self.stager.relinquish(self.vmax)
        self.vmax = None
        self.scratch = None


@contextlib.contextmanager
def staged(stager: WindowStager, tag: str) -> Iterator[Optional[Window]]:
    w = stager.reserve(tag)  # clean: relinquished in finally
    try:
        yield w
    finally:
        if w is not None:
            stager.relinquish(w)


def decay_norm(stager: WindowStager, p: torch.Tensor) -> float:
    with staged(stager, "norm") as w:  # clean: relinquished on leaving the block
        if w is None:
            return float(p.norm())
        w.mem[: p.numel()].copy_(p.flatten())
        return float(w.mem[: p.numel()].norm())


def reserve_pair(stager: WindowStager, tag: str) -> Tuple[Optional[Window], Optional[Window]]:
    """Both windows belong to the caller; either may be None."""
    a = stager.reserve(tag + ".0")  # clean: returned to the caller
    b = stager.reserve(tag + ".1")  # clean: returned to the caller
    return a, b


def swap_states(stager: WindowStager, x: ParamState, y: ParamState) -> bool:
    a, b = reserve_pair(stager, "swap")  # leak: with a alone, the return False keeps it
    if a is None or b is None:
        return False
    n = x.host_m.numel()
    a.mem[:n].copy_(x.host_m.flatten())
    b.mem[:n].copy_(y.host_m.flatten())
    x.host_m.flatten().copy_(b.mem[:n])
    y.host_m.flatten().copy_(a.mem[:n])
    stager.relinquish(a)
    stager.relinquish(b)
    return True


def dequantise_error(stager: WindowStager, st: ParamState, q: torch.Tensor, scales: torch.Tensor, block: int):
    """Returns the max error of an 8-bit state against the exact one, or None when no window is idle."""
    w = stager.reserve("dequant")  # leak: the break by-passes the relinquish in else
    if w is None:
        return None
    worst = 0.0
    for i in range(0, q.numel(), block):
        if i // block >= scales.numel():
            worst = float("inf")
            break
        w.mem[i:i + block] = q[i:i + block].float() * scales[i // block]
        worst = max(worst, float((w.mem[i:i + block] - st.host_v.flatten()[i:i + block]).abs().max()))
    else:
        stager.relinquish(w)
    return worst
