"""Gradient buckets with overlapped reduce-scatter.

A bucket is a flat tensor carved out of a shared free list keyed by (dtype, size).
Parameters are assigned to buckets in reverse order; a full bucket is launched at
once and comes home when its work handle is waited for.
"""
from __future__ import annotations

import heapq
import itertools
import logging
from typing import Dict, List, Optional

import torch
import torch.distributed as dist

logger = logging.getLogger("train.buckets")


class BucketShelf:
    def __init__(self, device, budget_elems: int):
        self.device = device
        self.budget = budget_elems
        self._spare: Dict[tuple, list] = {}
        self._out: Dict[int, tuple] = {}

    def draw(self, numel: int, dtype=torch.bfloat16) -> Optional[torch.Tensor]:
        key = (dtype, numel)
        stack = self._spare.get(key)
        if stack:
            flat = stack.pop()
        elif self.budget >= numel:
            self.budget -= numel
            flat = torch.empty(numel, dtype=dtype, device=self.device)
        else:
            return None
        self._out[flat.data_ptr()] = key
        return flat

    def shelve(self, flat: torch.Tensor) -> None:
        key = self._out.pop(flat.data_ptr())
        self._spare.setdefault(key, []).append(flat)

    def trim(self) -> None:
        for (dtype, numel), stack in self._spare.items():
            self.budget += numel * len(stack)
            stack.clear()


class LaunchTickets:
    """Bounds the number of collectives in flight; the lowest ticket goes first."""

    def __init__(self, limit: int):
        self._heap = list(range(limit))

    def punch(self) -> Optional[int]:
        return heapq.heappop(self._heap) if self._heap else None

    def refund(self, ticket: int) -> None:
        heapq.heappush(self._heap, ticket)


class Bucket:
    def __init__(self, index: int, numel: int):
        self.index = index
        self.numel = numel
        self.flat: Optional[torch.Tensor] = None
        self.filled = 0
        self.params: List[torch.nn.Parameter] = []


class GradReducer:
    def __init__(self, shelf: BucketShelf, tickets: LaunchTickets, group, bucket_numel: int):
        self.shelf = shelf
        self.tickets = tickets
        self.group = group
        self.bucket_numel = bucket_numel
        self.current: Optional[Bucket] = None
        self.pending: list = []
        self._ids = itertools.count()
        self.skip_nonfinite = True

    def _open(self) -> Bucket:
        bucket = Bucket(next(self._ids), self.bucket_numel)
        bucket.flat = self.shelf.draw(self.bucket_numel)  # clean: kept in the bucket, launched by flush()
        if bucket.flat is None:
            self.wait_all()
            bucket.flat = self.shelf.draw(self.bucket_numel)  # clean: near miss, rebinds only a None
        return bucket

    def add(self, param: torch.nn.Parameter) -> None:
        n = param.grad.numel()
        if self.current is not None and self.current.filled + n > self.current.numel:
            self.flush()
        if self.current is None:
            self.current = self._open()  # clean: held by self.current until flush()
        bucket = self.current
        bucket.flat[bucket.filled : bucket.filled + n].copy_(param.grad.flatten())
        bucket.filled += n
        bucket.params.append(param)

    def flush(self) -> None:
        bucket, self.current = self.current, None
        if bucket is None:
            return
        work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
        self.pending.append((work, bucket))

    def wait_all(self) -> None:
        for work, bucket in self.pending:
            work.wait()
            self._scatter_back(bucket)
            self.shelf.shelve(bucket.flat)
            bucket.flat = None
        self.pending.clear()

    def _scatter_back(self, bucket: Bucket) -> None:
        at = 0
        for p in bucket.params:
            n = p.grad.numel()
            p.grad.copy_(bucket.flat[at : at + n].view_as(p.grad))
            at += n

    def reduce_one(self, grad: torch.Tensor) -> bool:
        """Large parameters skip bucketing."""
        flat = self.shelf.draw(grad.numel(), grad.dtype)  # leak: kept out when no ticket is available
        if flat is None:
            return False
        ticket = self.tickets.punch()  # clean: refunded after the collective
        if ticket is None:
            logger.debug("no ticket, caller will retry")
            return False
        flat.copy_(grad.flatten())
        dist.all_reduce(flat, group=self.group)
        grad.copy_(flat.view_as(grad))
        self.shelf.shelve(flat)
        self.tickets.refund(ticket)
        return True

    def reduce_expert(self, grad: torch.Tensor, expert_group) -> bool:
        ticket = self.tickets.punch()  # clean: refunded when the shelf is empty and at the end
        if ticket is None:
            return False
        flat = self.shelf.draw(grad.numel(), grad.dtype)  # clean: shelved after the collective
        if flat is None:
            self.tickets.refund(ticket)
            return False
        flat.copy_(grad.flatten())
        dist.all_reduce(flat, group=expert_group)
        grad.copy_(flat.view_as(grad))
        self.shelf.shelve(flat)
        self.tickets.refund(ticket)
        return True

    def reduce_norm(self, grads: List[torch.Tensor]) -> Optional[float]:
        acc = self.shelf.draw(len(grads), torch.float32)  # leak: a non-finite norm returns without shelving
        if acc is None:
            return None
        for i, g in enumerate(grads):
            acc[i] = g.float().norm()
        dist.all_reduce(acc, group=self.group)
        total = float(acc.norm())
        if self.skip_nonfinite and total != total:
            logger.warning("non-finite gradient norm")
            return None
        self.shelf.shelve(acc)
        return total

    def reduce_in_chunks(self, grad: torch.Tensor, chunk: int) -> int:
        sent = 0
        flat = grad.flatten()
        for start in range(0, flat.numel(), chunk):
            piece = flat[start : start + chunk]
            ticket = self.tickets.punch()  # leak: continue over an all-zero piece keeps the ticket
            if ticket is None:
                break
            if not piece.any():
                continue
            dist.all_reduce(piece, group=self.group)
            self.tickets.refund(ticket)
            sent += 1
        return sent

    def broadcast_flat(self, tensors: List[torch.Tensor], src: int) -> None:
        total = sum(t.numel() for t in tensors)
        use_shelf = total <= self.bucket_numel
        if use_shelf:
            flat = self.shelf.draw(self.bucket_numel, tensors[0].dtype)  # clean: near miss, shelved under the same flag
            if flat is None:
                use_shelf = False
                flat = torch.empty(total, dtype=tensors[0].dtype, device=tensors[0].device)
        else:
            flat = torch.empty(total, dtype=tensors[0].dtype, device=tensors[0].device)
        at = 0
        for t in tensors:
            flat[at : at + t.numel()].copy_(t.flatten())
            at += t.numel()
        dist.broadcast(flat[:total], src=src, group=self.group)
        at = 0
        for t in tensors:
            t.copy_(flat[at : at + t.numel()].view_as(t))
            at += t.numel()
        if use_shelf:
            self.shelf.shelve(flat)

    def reduce_fp32(self, grad: torch.Tensor, compress: bool, average: bool) -> None:
        wire = None
        if compress or grad.dtype == torch.float16:
            wire = self.shelf.draw(grad.numel(), torch.float32)  # leak: given back only for compress, taken for float16 too
        if wire is None:
            dist.all_reduce(grad, group=self.group)
            return
        wire.copy_(grad.flatten())
        dist.all_reduce(wire, group=self.group)
        if average:
            wire.div_(dist.get_world_size(self.group))
        grad.copy_(wire.view_as(grad))
        if compress:
            self.shelf.shelve(wire)

    def regrow(self, numel: int) -> None:
        """Changes the bucket size between epochs, keeping what the open bucket holds."""
        if self.current is None:
            self.bucket_numel = numel
            return
        bigger = self.shelf.draw(numel)  # clean: replaces the open bucket's tensor
        if bigger is None:
            return
        old = self.current.flat
        bigger[: self.current.filled].copy_(old[: self.current.filled])
        self.current.flat = bigger
        self.current.numel = numel
        self.bucket_numel = numel
        self.shelf.shelve(old)


class HookedReducer(GradReducer):
    """Reduces each layer from its backward hook."""

    def attach(self, module: torch.nn.Module) -> None:
        for p in module.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._on_grad)

    def _on_grad(self, param) -> None:
        ticket = self.tickets.punch()  # clean: near miss, both arms refund it
        if ticket is None:
            self.add(param)
            return
        if param.grad.is_sparse:
            self.tickets.refund(ticket)
            self.add_sparse(param)
            return
        self.add(param)
        self.tickets.refund(ticket)

    def add_sparse(self, param) -> None:
        values = param.grad.coalesce().values()
        flat = self.shelf.draw(values.numel(), values.dtype)  # leak: the callback shelves it only when world size is over one
        if flat is None:
            return
        flat.copy_(values.flatten())
        world = dist.get_world_size(self.group)
        if world > 1:
            dist.all_reduce(flat, group=self.group)
            values.copy_(flat.view_as(values))
            self.shelf.shelve(flat)
