"""Decode steps replayed from captured CUDA graphs.

A graph reads its inputs from fixed addresses, so every captured batch size owns a few sets of
static inputs.  Workspaces are scratch memory of kernels that must not move either.
"""
import bisect
import logging
from contextlib import contextmanager
from typing import NamedTuple, Optional

import torch

log = logging.getLogger("graphs")


class NoStaticInputs(RuntimeError):
    pass


class Batch(NamedTuple):
    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor

    @property
    def size(self):
        return self.ids.shape[0]


class StaticInputs:
    def __init__(self, bucket, epoch, device="cuda"):
        self.bucket = bucket
        self.epoch = epoch
        self.ids = torch.zeros(bucket, dtype=torch.long, device=device)
        self.positions = torch.zeros(bucket, dtype=torch.long, device=device)
        self.slots = torch.full((bucket,), -1, dtype=torch.long, device=device)
        self.graph: Optional[torch.cuda.CUDAGraph] = None
        self.logits: Optional[torch.Tensor] = None

    def load(self, batch):
        n = batch.size
        self.ids[:n].copy_(batch.ids, non_blocking=True)
        self.positions[:n].copy_(batch.positions, non_blocking=True)
        self.slots[:n].copy_(batch.slots, non_blocking=True)
        self.slots[n:].fill_(-1)


class InputShelf:
    def __init__(self, buckets, copies):
        self.buckets = sorted(buckets)
        self.epoch = 0
        self.stacks = {b: [StaticInputs(b, 0) for _ in range(copies)] for b in self.buckets}

    def take(self, n):
        """The smallest free set that holds n rows."""
        for b in self.buckets[bisect.bisect_left(self.buckets, n):]:
            while self.stacks[b]:
                s = self.stacks[b].pop()  # leak: a set of an older epoch is skipped and not on its stack any more
                if s.epoch == self.epoch:
                    return s
        raise NoStaticInputs(n)

    def take_exact(self, b):
        stack = self.stacks.get(b)
        return stack.pop() if stack else None  # clean: handed to the caller

    def give(self, s):
        self.stacks[s.bucket].append(s)

    def free(self, b):
        return len(self.stacks[b])


class Workspaces:
    def __init__(self, count, nbytes):
        self._ws = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(count)]

    def lend(self):
        return self._ws.pop() if self._ws else None  # clean: handed to the caller

    def reclaim(self, ws):
        self._ws.append(ws)

    @contextmanager
    def one(self):
        ws = self.lend()  # clean: reclaimed in finally unless there was none
        try:
            yield ws
        finally:
            if ws is not None:
                self.reclaim(ws)


class Pending:
    """The outcome of a step that was launched and not waited for."""

    def __init__(self, shelf, inputs, size):
        self.shelf, self.inputs, self.size = shelf, inputs, size
        self.event = torch.cuda.Event()
        self.event.record()
        self.cancelled = False

    def done(self):
        return self.event.query()

    def cancel(self):
        self.cancelled = True

    def result(self):
        self.event.synchronize()
        if self.cancelled:
            return None
        out = self.inputs.logits[: self.size].clone()
        self.shelf.give(self.inputs)
        self.inputs = None
        return out


class GraphRunner:
    def __init__(self, model, shelf, workspaces):
        self.model = model
        self.shelf = shelf
        self.workspaces = workspaces
        self.mempool = None
        self.eager_steps = self.graph_steps = 0

    # capture

    def _capture_into(self, s, ws):
        self.model(s.ids, s.positions, s.slots, workspace=ws)
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, pool=self.mempool):
            s.logits = self.model(s.ids, s.positions, s.slots, workspace=ws)
        self.mempool = self.mempool or g.pool()
        s.graph = g

    def capture_bucket(self, b):
        ws = self.workspaces.lend()  # leak: out of memory is caught below, the workspace is not reclaimed then
        if ws is None:
            return 0
        sets, captured = [], 0
        while self.shelf.free(b):
            sets.append(self.shelf.take_exact(b))  # clean: finally gives all sets of the list
        try:
            for s in sets:
                self._capture_into(s, ws)
                captured += 1
        except torch.cuda.OutOfMemoryError:
            log.warning("batch size %d: %d of %d sets captured", b, captured, len(sets))
            return captured
        finally:
            for s in sets:
                self.shelf.give(s)
        self.workspaces.reclaim(ws)
        return captured

    def capture_all(self):
        return {b: self.capture_bucket(b) for b in reversed(self.shelf.buckets)}

    # steps

    def _eager(self, batch):
        self.eager_steps += 1
        with self.workspaces.one() as ws:  # clean: context manager
            return self.model(*batch, workspace=ws)

    def run(self, batch):
        try:
            s = self.shelf.take(batch.size)  # leak: a set without a graph is left behind on the way to _eager
        except NoStaticInputs:
            return self._eager(batch)
        if s.graph is None:
            return self._eager(batch)
        s.load(batch)
        s.graph.replay()
        self.graph_steps += 1
        out = s.logits[: batch.size].clone()
        self.shelf.give(s)
        return out

    def launch(self, batch):
        s = self.shelf.take(batch.size)  # clean: near miss, given for lack of a graph, else the Pending has it
        if s.graph is None:
            self.shelf.give(s)
            raise NoStaticInputs(batch.size)
        s.load(batch)
        s.graph.replay()
        self.graph_steps += 1
        return Pending(self.shelf, s, batch.size)

    def run_or_none(self, batch):
        s = self.shelf.take_exact(batch.size)  # clean: near miss, the guard of the give is the guard of the use
        out = None
        if s is not None and s.graph is not None:
            s.load(batch)
            s.graph.replay()
            out = s.logits.clone()
        if s is not None:
            self.shelf.give(s)
        return out

    def speculate(self, batch, accept):
        """Launches the next step before it is known whether it is wanted."""
        pending = self.launch(batch)  # leak: after cancel() result() returns before the give
        if not accept(batch):
            pending.cancel()
        return pending.result()

    def pipeline(self, batches, depth=2):
        ring = [None] * depth
        for i, batch in enumerate(batches):
            at = i % depth
            if ring[at] is not None and ring[at].done():
                yield ring[at].result()
                ring[at] = None
            ring[at] = self.launch(batch)  # leak: a step that is not done yet is overwritten, its inputs with it
        for i in range(depth):
            if ring[i] is not None:
                yield ring[i].result()

    def in_order(self, batches):
        waiting = []
        try:
            for batch in batches:
                if len(waiting) == 2:
                    yield waiting.pop(0).result()
                waiting.append(self.launch(batch))  # clean: near miss, whatever is in the list is waited for in finally
            while waiting:
                yield waiting.pop(0).result()
        finally:
            for p in waiting:
                p.result()

    # epochs

    def invalidate(self):
        """The weights have moved, what was captured must not be replayed again."""
        fresh = {}
        for b in self.shelf.buckets:
            n = self.shelf.free(b)
            fresh[b] = [StaticInputs(b, self.shelf.epoch + 1) for _ in range(n)]
        self.shelf.stacks = fresh
        self.shelf.epoch += 1

    def profile(self, n, rounds=20):
        s = self.shelf.take(n)  # clean: given after the loop, there is no way out of it
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        for _ in range(rounds):
            if s.graph is None:
                break
            s.graph.replay()
        stop.record()
        stop.synchronize()
        self.shelf.give(s)
        return start.elapsed_time(stop) / rounds
