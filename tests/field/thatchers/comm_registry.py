"""Process-wide registry of communicators shared between parallel layouts."""
from __future__ import annotations

import logging
import threading
from typing import Callable, Optional, Sequence

import torch
import torch.distributed as dist

logger = logging.getLogger("comm")

Key = tuple[str, tuple[int, ...]]


class CommHandle:
    def __init__(self, key: Key, pg: Optional[dist.ProcessGroup]) -> None:
        self.key = key
        self.pg = pg
        self.refs = 0

    @property
    def size(self) -> int:
        return len(self.key[1])


class CommRegistry:
    def __init__(self, max_comms: int = 64) -> None:
        self._table: dict[Key, CommHandle] = {}
        self._max = max_comms
        self._lock = threading.RLock()

    def join(self, ranks: Sequence[int], backend: str = "nccl") -> Optional[CommHandle]:
        key = (backend, tuple(sorted(ranks)))
        with self._lock:
            handle = self._table.get(key)
            if handle is None:
                if len(self._table) >= self._max:
                    return None
                handle = CommHandle(key, dist.new_group(list(key[1]), backend=backend))
                self._table[key] = handle
            handle.refs += 1
            return handle

    def part(self, handle: CommHandle) -> None:
        with self._lock:
            handle.refs -= 1
            if handle.refs == 0:
                del self._table[handle.key]
                dist.destroy_process_group(handle.pg)
                handle.pg = None

    def join_control(self, ranks: Sequence[int]) -> Optional[CommHandle]:
        return self.join(ranks, backend="gloo")  # clean: handed to the caller


class ScopedComm:
    """`with ScopedComm(reg, ranks) as h:` for short collectives."""

    def __init__(self, reg: CommRegistry, ranks: Sequence[int]) -> None:
        self.reg = reg
        self.ranks = ranks
        self.handle: Optional[CommHandle] = None

    def __enter__(self) -> Optional[CommHandle]:
        self.handle = self.reg.join(self.ranks)  # leak: __exit__ swallows a dist error and returns before it parts
        return self.handle

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None and issubclass(exc_type, dist.DistBackendError):
            logger.warning("collective on %s failed: %s", self.ranks, exc)
            return True
        if self.handle is not None:
            self.reg.part(self.handle)
            self.handle = None
        return False


class HybridMesh:
    def __init__(self, reg: CommRegistry, rank: int) -> None:
        self.reg = reg
        self.rank = rank
        self.tp: Optional[CommHandle] = None
        self.dp: Optional[CommHandle] = None
        self.ctrl: Optional[CommHandle] = None
        self.extra: dict[str, CommHandle] = {}
        self.owns_ctrl = False

    def build(self, tp_ranks: Sequence[int], dp_ranks: Sequence[int]) -> bool:
        if self.tp is not None or self.dp is not None:
            return False
        tp = self.reg.join(tp_ranks)  # leak: not parted with when the data-parallel group cannot be had
        if tp is None:
            return False
        dp = self.reg.join(dp_ranks)  # clean: kept in the mesh, close() parts
        if dp is None:
            logger.error("no communicator left for dp=%s", list(dp_ranks))
            return False
        self.tp, self.dp = tp, dp
        return True

    def attach_control(self, ranks: Sequence[int], shared: Optional[CommHandle] = None) -> None:
        if self.ctrl is not None:
            return
        if shared is not None:
            self.ctrl = shared
            self.owns_ctrl = False
            return
        self.ctrl = self.reg.join_control(ranks)  # clean: near miss, the flag that close() looks at is set with it
        self.owns_ctrl = self.ctrl is not None

    def resize_dp(self, ranks: Sequence[int]) -> bool:
        fresh = self.reg.join(ranks)  # clean: near miss, swapped in and the former group is parted with
        if fresh is None:
            return False
        old, self.dp = self.dp, fresh
        if old is not None:
            self.reg.part(old)
        return True

    def resize_tp(self, ranks: Sequence[int]) -> bool:
        self.tp = self.reg.join(ranks)  # leak: the former tensor-parallel group is overwritten
        return self.tp is not None

    def named(self, name: str, ranks: Sequence[int]) -> Optional[CommHandle]:
        if name not in self.extra:
            handle = self.reg.join(ranks)  # clean: near miss, cached by name, close() parts with all
            if handle is None:
                return None
            self.extra[name] = handle
        return self.extra[name]

    def close(self) -> None:
        for handle in (self.tp, self.dp, *self.extra.values()):
            if handle is not None:
                self.reg.part(handle)
        if self.owns_ctrl and self.ctrl is not None:
            self.reg.part(self.ctrl)
        self.tp = self.dp = self.ctrl = None
        self.extra.clear()


def warmup_rings(reg: CommRegistry, rank: int, rings: Sequence[Sequence[int]], probe: torch.Tensor) -> int:
    done = 0
    for ranks in rings:
        handle = reg.join(ranks)  # leak: rings of size one are skipped with the reference held
        if handle is None:
            continue
        if handle.size == 1:
            continue
        dist.all_reduce(probe, group=handle.pg)
        reg.part(handle)
        done += 1
    return done


def broadcast_flags(reg: CommRegistry, ranks: Sequence[int], flags: torch.Tensor, src: int) -> bool:
    handle = reg.join_control(ranks)  # clean: near miss, both the solo shortcut and the normal way part
    if handle is None:
        return False
    if handle.size == 1:
        reg.part(handle)
        return True
    dist.broadcast(flags, src=src, group=handle.pg)
    reg.part(handle)
    return True


def sum_metrics(reg: CommRegistry, ranks: Sequence[int], values: torch.Tensor) -> torch.Tensor:
    with ScopedComm(reg, ranks) as h:
        if h is not None:
            dist.all_reduce(values, group=h.pg)
    return values


def register_debug_probe(reg: CommRegistry, ranks: Sequence[int], hooks: list[Callable[[], None]]) -> bool:
    handle = reg.join_control(ranks)  # clean: near miss, the hook that is run at shutdown parts with it
    if handle is None:
        return False

    def _at_shutdown() -> None:
        dist.barrier(group=handle.pg)
        reg.part(handle)

    hooks.append(_at_shutdown)
    return True


def monitored_barrier(reg: CommRegistry, ranks: Sequence[int], attempts: int) -> bool:
    for attempt in range(attempts):
        handle = reg.join_control(ranks)  # leak: the handler of a timed-out barrier goes on to the next attempt without parting
        if handle is None:
            return False
        try:
            dist.monitored_barrier(group=handle.pg)
        except RuntimeError as err:
            logger.warning("barrier attempt %d: %s", attempt, err)
            continue
        reg.part(handle)
        return True
    return False
