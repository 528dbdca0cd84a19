"""Ulysses style sequence parallelism: all-to-all over heads with staging buffers and a bound on calls in flight."""
from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from typing import Callable, Deque, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

log = logging.getLogger("sp.a2a")


class Role(enum.Enum):
    SEND = 0
    RECV = 1


class StagingRing:
    """Two rings of equal-size stages. rent() blocks nothing: an empty ring gives None."""

    def __init__(self, n: int, numel: int, dtype, device):
        self._slots = torch.empty(2 * n, numel, dtype=dtype, device=device)
        self._avail: Dict[Role, Deque[int]] = {
            Role.SEND: deque(range(n)),
            Role.RECV: deque(range(n, 2 * n)),
        }

    def rent(self, role: Role) -> Optional["Stage"]:
        if not self._avail[role]:
            return None
        return Stage(self, self._avail[role].popleft(), role)  # clean: returned in the Stage

    def _reclaim(self, index: int, role: Role) -> None:
        self._avail[role].append(index)


class Stage:
    def __init__(self, ring: StagingRing, index: int, role: Role):
        self.ring = ring
        self.index = index
        self.role = role
        self._out = False

    @property
    def data(self) -> torch.Tensor:
        return self.ring._slots[self.index]

    def vacate(self) -> None:
        if not self._out:
            self._out = True
            self.ring._reclaim(self.index, self.role)

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *exc) -> None:
        self.vacate()


class Inflight:
    def __init__(self, work, send: Stage, recv: Stage, permits: threading.Semaphore):
        self.work = work
        self.send = send
        self.recv = recv
        self.permits = permits

    def finish(self) -> Stage:
        """Waits; the receive stage passes to the caller."""
        self.work.wait()
        self.send.vacate()
        self.permits.release()
        return self.recv


class HeadExchange:
    def __init__(self, ring: StagingRing, group, max_calls: int):
        self.ring = ring
        self.group = group
        self.permits = threading.Semaphore(max_calls)

    def launch(self, x: torch.Tensor) -> Optional[Inflight]:
        if not self.permits.acquire(blocking=False):  # leak: the permit is kept when the recv ring is empty
            return None
        send = self.ring.rent(Role.SEND)  # clean: vacated when recv is None, else in the Inflight
        if send is None:
            self.permits.release()
            return None
        recv = self.ring.rent(Role.RECV)  # clean: leaves in the Inflight
        if recv is None:
            send.vacate()
            return None
        send.data[: x.numel()].copy_(x.reshape(-1))
        work = dist.all_to_all_single(
            recv.data[: x.numel()], send.data[: x.numel()], group=self.group, async_op=True
        )
        return Inflight(work, send, recv, self.permits)

    def sync(self, x: torch.Tensor) -> torch.Tensor:
        call = self.launch(x)  # clean: finish() settles it
        if call is None:
            out = torch.empty_like(x)
            dist.all_to_all_single(out, x, group=self.group)
            return out
        with call.finish() as recv:  # clean: with
            return recv.data[: x.numel()].view(x.shape).clone()

    def sync_into(self, x: torch.Tensor, out: torch.Tensor) -> bool:
        call = self.launch(x)  # clean: finish() settles it
        if call is None:
            return False
        out.copy_(call.finish().data[: x.numel()].view(x.shape))  # leak: the recv stage is copied out and dropped
        return True

    def qkv(self, q, k, v) -> Optional[List[Stage]]:
        calls: List[Inflight] = []
        for t in (q, k, v):
            c = self.launch(t)  # clean: near miss, when one launch fails the earlier ones are finished and vacated
            if c is None:
                for done in calls:
                    done.finish().vacate()  # clean: vacated at once
                return None
            calls.append(c)
        return [c.finish() for c in calls]  # clean: returned to the caller in the list


def attend_sharded(ex: HeadExchange, q, k, v, attn: Callable, shape) -> Optional[torch.Tensor]:
    stages = ex.qkv(q, k, v)  # leak: the numel mismatch returns with three stages rented
    if stages is None:
        return None
    n = q.numel()
    if n % shape[-1]:
        log.error("cannot view %d elements as %s", n, shape)
        return None
    out = attn(*(s.data[:n].view(shape) for s in stages))
    for s in stages:
        s.vacate()
    return out


class GradQueue:
    """Backward all-to-alls: pushed by hooks, drained by the optimizer step."""

    def __init__(self, ex: HeadExchange):
        self.ex = ex
        self.q: Deque[Tuple[str, Inflight]] = deque()

    def push(self, name: str, grad: torch.Tensor) -> bool:
        call = self.ex.launch(grad)  # clean: queued and settled by drain()
        if call is None:
            return False
        self.q.append((name, call))
        return True

    def drain(self, sink: Dict[str, torch.Tensor]) -> None:
        while self.q:
            name, call = self.q.popleft()
            recv = call.finish()  # leak: a name that sink does not want skips the vacate
            target = sink.get(name)
            if target is None:
                continue
            target.view(-1).add_(recv.data[: target.numel()])
            recv.vacate()


class OutputGate:
    """Limits concurrent output projections; owner=True means that the gate also owns the stage handed in."""

    def __init__(self, width: int):
        self._sem = threading.BoundedSemaphore(width)

    def project(self, st: Stage, weight: torch.Tensor, rows: int, owner: bool) -> torch.Tensor:
        self._sem.acquire()  # clean: released in finally
        try:
            x = st.data[: rows * weight.shape[1]].view(rows, -1)
            return x @ weight.t()
        finally:
            self._sem.release()
            if owner:
                st.vacate()


def project_all(ring: StagingRing, gate: OutputGate, xs: List[torch.Tensor], weight, keep: bool) -> List[torch.Tensor]:
    outs: List[torch.Tensor] = []
    for x in xs:
        st = ring.rent(Role.SEND)  # clean: near miss, project vacates it as owner, or it is vacated below when keep
        if st is None:
            break
        st.data[: x.numel()].copy_(x.reshape(-1))
        outs.append(gate.project(st, weight, x.shape[0], owner=not keep))
        if keep:
            torch.cuda.current_stream().synchronize()
            st.vacate()
    return outs


def project_last(ring: StagingRing, gate: OutputGate, x: torch.Tensor, weight) -> Optional[torch.Tensor]:
    st = ring.rent(Role.SEND)  # leak: project is told it is not the owner and nobody else vacates
    if st is None:
        return None
    st.data[: x.numel()].copy_(x.reshape(-1))
    return gate.project(st, weight, x.shape[0], owner=False)
