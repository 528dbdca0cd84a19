"""Activation checkpointing with host offload and RNG stashes.

The forward pass moves the inputs of every checkpointed block to pooled host
tensors; the backward pass brings them back, replays the block under the stashed
RNG state and lets the host tensor go.
"""
from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import contextmanager
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch.utils._pytree import tree_flatten

log = logging.getLogger("train.actckpt")


class HostTensorPool:
    def __init__(self, byte_limit: int):
        self.byte_limit = byte_limit
        self.bytes_out = 0
        self._lru: "OrderedDict[Tuple, List[torch.Tensor]]" = OrderedDict()

    def lease(self, shape, dtype) -> Optional[torch.Tensor]:
        key = (tuple(shape), dtype)
        found = self._lru.get(key)
        if found:
            t = found.pop()
        else:
            t = torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
        n = t.numel() * t.element_size()
        if self.bytes_out + n > self.byte_limit:
            self._lru.setdefault(key, []).append(t)
            return None
        self.bytes_out += n
        return t

    def unlease(self, t: torch.Tensor) -> None:
        self.bytes_out -= t.numel() * t.element_size()
        key = (tuple(t.shape), t.dtype)
        self._lru.setdefault(key, []).append(t)
        self._lru.move_to_end(key)

    def lease_like(self, src: torch.Tensor) -> Optional[torch.Tensor]:
        host = self.lease(src.shape, src.dtype)  # clean: handed to the caller
        if host is not None:
            host.copy_(src, non_blocking=True)
        return host


class RngVault:
    """Saved generator states; slots are few because a state is about 5 kB."""

    def __init__(self, slots: int):
        self._states: List[Optional[torch.Tensor]] = [None] * slots
        self._used = [False] * slots

    def stash(self) -> Optional[int]:
        for i, used in enumerate(self._used):
            if not used:
                self._used[i] = True
                self._states[i] = torch.get_rng_state()
                return i
        return None

    def unstash(self, slot: int) -> None:
        self._used[slot] = False
        self._states[slot] = None

    def state(self, slot: int) -> torch.Tensor:
        return self._states[slot]


@contextmanager
def replay_rng(vault: RngVault, slot: int):
    before = vault.stash()  # clean: near miss, unstashed in finally under the same None test
    if before is None:
        log.debug("vault is full, replaying without a way back")
    torch.set_rng_state(vault.state(slot))
    try:
        yield
    finally:
        if before is not None:
            torch.set_rng_state(vault.state(before))
            vault.unstash(before)


class Frame:
    __slots__ = ("fn", "host", "slot", "device")

    def __init__(self, fn, host, slot, device):
        self.fn = fn
        self.host = host
        self.slot = slot
        self.device = device


class Checkpointer:
    def __init__(self, pool: HostTensorPool, vault: RngVault, preserve_rng: bool = True):
        self.pool = pool
        self.vault = vault
        self.preserve_rng = preserve_rng
        self.frames: Dict[int, Frame] = {}
        self._next = 0
        self.capturing = False
        self.side: Optional[torch.Tensor] = None

    def forward(self, fn: Callable, x: torch.Tensor) -> Tuple[torch.Tensor, int]:
        host = self.pool.lease_like(x)  # clean: near miss, rides in the frame, unleased by backward() or abandon()
        if host is None:
            return fn(x), -1
        slot = self.vault.stash() if self.preserve_rng else None  # clean: rides in the frame, unstashed by _release()
        with torch.no_grad():
            out = fn(x)
        ticket = self._next
        self._next += 1
        self.frames[ticket] = Frame(fn, host, slot, x.device)
        return out, ticket

    def backward(self, ticket: int, grad: torch.Tensor) -> torch.Tensor:
        frame = self.frames.pop(ticket)
        x = frame.host.to(frame.device).requires_grad_(True)
        with torch.enable_grad():
            if frame.slot is not None:
                with replay_rng(self.vault, frame.slot):  # clean: the with block unstashes
                    out = frame.fn(x)
            else:
                out = frame.fn(x)
        torch.autograd.backward(out, grad)
        self._release(frame)
        return x.grad

    def _release(self, frame: Frame) -> None:
        self.pool.unlease(frame.host)
        if frame.slot is not None:
            self.vault.unstash(frame.slot)

    def abandon(self) -> None:
        for frame in self.frames.values():
            self._release(frame)
        self.frames.clear()

    def forward_args(self, fn: Callable, *args: Any):
        """As forward(), for blocks that take several tensors."""
        flat, _ = tree_flatten(args)
        hosts: List[torch.Tensor] = []
        for leaf in flat:
            if not torch.is_tensor(leaf):
                continue
            host = self.pool.lease_like(leaf)  # leak: earlier ones are dropped when a later argument does not fit
            if host is None:
                return fn(*args), None
            hosts.append(host)
        return fn(*args), hosts

    def release_args(self, hosts: Optional[List[torch.Tensor]]) -> None:
        for host in hosts or ():
            self.pool.unlease(host)

    def forward_dropout(self, fn: Callable, x: torch.Tensor) -> torch.Tensor:
        slot = self.vault.stash()  # leak: the early return for eval mode keeps the slot
        if slot is None:
            return fn(x)
        if not torch.is_grad_enabled():
            return fn(x)
        out = fn(x)
        torch.set_rng_state(self.vault.state(slot))
        again = fn(x)
        self.vault.unstash(slot)
        return (out + again) * 0.5

    # -- side buffer, used between begin() and end() ----------------------

    def begin(self, shape, capture: bool) -> None:
        self.capturing = capture
        if capture or self.preserve_rng:
            self.side = self.pool.lease(shape, torch.float32)  # leak: end() unleases it for capture only

    def end(self) -> Optional[torch.Tensor]:
        result = None
        if self.capturing and self.side is not None:
            result = self.side.clone()
            self.pool.unlease(self.side)
        self.side = None
        self.capturing = False
        return result

    def peek(self, ticket: int, layer: str) -> Optional[float]:
        frame = self.frames.get(ticket)
        if frame is None:
            return None
        copy = self.pool.lease_like(frame.host)  # clean: unleased after the mean
        if copy is None:
            return None
        value = float(copy.float().mean())
        self.pool.unlease(copy)
        log.debug("%s: mean %.4f", layer, value)
        return value


class SavedTensorHooks:
    """pack/unpack pair for torch.autograd.graph.saved_tensors_hooks."""

    def __init__(self, pool: HostTensorPool, min_numel: int):
        self.pool = pool
        self.min_numel = min_numel
        self.packed = 0

    def pack(self, t: torch.Tensor):
        if t.numel() < self.min_numel:
            return (False, t, t.device)
        host = self.pool.lease_like(t)  # clean: near miss, travels in the packed tuple, unpack() unleases by its flag
        if host is None:
            return (False, t, t.device)
        self.packed += 1
        return (True, host, t.device)

    def unpack(self, entry) -> torch.Tensor:
        offloaded, t, device = entry
        if not offloaded:
            return t
        back = t.to(device)
        self.pool.unlease(t)
        return back


class LayerwiseOffload:
    """Keeps the last window of layer outputs on the host."""

    def __init__(self, pool: HostTensorPool, window: int):
        self.pool = pool
        self.window = window
        self.kept: "OrderedDict[str, torch.Tensor]" = OrderedDict()

    def put(self, name: str, t: torch.Tensor) -> bool:
        self._evict(name)
        host = self.pool.lease_like(t)  # leak: the window's overflow is popped and dropped
        if host is None:
            return False
        self.kept[name] = host
        if len(self.kept) > self.window:
            oldest, _ = self.kept.popitem(last=False)
            log.debug("window moves past %s", oldest)
        return True

    def _evict(self, name: str) -> None:
        host = self.kept.pop(name, None)
        if host is not None:
            self.pool.unlease(host)

    def compare(self, name: str, t: torch.Tensor, tol: float) -> bool:
        if name not in self.kept:
            return False
        fresh = self.pool.lease_like(t)  # leak: the shape mismatch returns without the unlease
        if fresh is None:
            return False
        old = self.kept[name]
        if old.shape != fresh.shape:
            return False
        near = bool(torch.allclose(old, fresh, atol=tol))
        self.pool.unlease(fresh)
        return near

    def clear(self) -> None:
        for name in list(self.kept):
            self._evict(name)
