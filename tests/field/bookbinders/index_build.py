"""Building an IVF index on disc under a quota of scratch space."""
import functools
import itertools
import logging
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

log = logging.getLogger("ivf.build")


class NoSpace(OSError):
    pass


class EmptyList(ValueError):
    pass


class Ticket(NamedTuple):
    no: int
    nbytes: int
    label: str


class Run(NamedTuple):
    path: Path
    ticket: Ticket


class Quota(NamedTuple):
    reserve: object
    refund: object
    left: object


def make_quota(total):
    open_tickets = {}
    numbers = itertools.count(1)

    def left():
        return total - sum(t.nbytes for t in open_tickets.values())

    def reserve(nbytes, label):
        if nbytes > left():
            raise NoSpace(f"{label}: {nbytes} bytes, {left()} left")
        t = Ticket(next(numbers), nbytes, label)
        open_tickets[t.no] = t
        return t

    def refund(t):
        if open_tickets.pop(t.no, None) is None:
            log.error("ticket %d (%s) isn't open", t.no, t.label)

    return Quota(reserve, refund, left)


def spool_dir(quota, root, nbytes):
    """A directory with room for nbytes; the caller removes it and refunds."""
    path = tempfile.mkdtemp(dir=root)  # leak: reserve raises NoSpace and the directory stays
    ticket = quota.reserve(nbytes, path)  # clean: goes to the caller
    return Path(path), ticket


def train_centroids(quota, vecs, k, rounds=8):
    ticket = quota.reserve(vecs.nbytes // 4, "kmeans")  # leak: few vectors come back from the return before the refund
    if len(vecs) < k:
        log.warning("%d vectors for %d lists", len(vecs), k)
        return vecs.copy()
    rng = np.random.default_rng(0)
    cents = vecs[rng.choice(len(vecs), k, replace=False)]
    for _ in range(rounds):
        near = np.argmax(vecs @ cents.T, axis=1)
        for c in range(k):
            if (near == c).any():
                cents[c] = vecs[near == c].mean(axis=0)
    quota.refund(ticket)
    return cents


def assign(quota, vecs, cents, root, chunk=100_000):
    """Spill every chunk's vectors by list; returns list -> Run."""
    runs = {}
    for start in range(0, len(vecs), chunk):
        part = vecs[start:start + chunk]
        near = np.argmax(part @ cents.T, axis=1)
        for c in np.unique(near):
            rows = part[near == c]
            ticket = quota.reserve(rows.nbytes, f"list{c}")  # leak: the next chunk's run of the same list overwrites the entry
            path = Path(root) / f"{c}-{start}.npy"
            np.save(path, rows)
            runs[int(c)] = Run(path, ticket)
    return runs


def spill_sorted(quota, source, root, limit):
    """Yields runs, which the consumer drops."""
    for n, block in enumerate(source):
        if not len(block):
            continue
        ticket = quota.reserve(block.nbytes, f"run{n}")  # clean: near miss, yielded inside the Run
        path = Path(root) / f"run{n:05d}.npy"
        np.save(path, block[np.argsort(block[:, 0])][:limit])
        yield Run(path, ticket)


def drop_run(quota, run):
    if not run.path.exists():
        return
    run.path.unlink()
    quota.refund(run.ticket)


def merge_runs(quota, runs, out):
    """Merges the runs into one file and gives up their space as it goes."""
    with out.open("wb") as f:  # clean: closed by the with
        for run in runs:
            np.load(run.path).tofile(f)
            os.unlink(run.path)
            quota.refund(run.ticket)
    return out


def sort_all(quota, source, root, out, limit):
    runs = []
    try:
        for run in spill_sorted(quota, source, root, limit):  # clean: near miss, merge_runs() refunds them all, or else the handler
            runs.append(run)
    except NoSpace:
        for run in runs:
            quota.refund(run.ticket)
        raise
    return merge_runs(quota, runs, out)


def sample_runs(quota, source, root, limit, every=4):
    """Looks into each run and drops it; the sweeper may have removed its file by then."""
    heads = []
    for i, run in enumerate(spill_sorted(quota, source, root, limit)):  # leak: drop_run() doesn't refund a run whose file is gone
        if i % every == 0 and run.path.exists():
            heads.append(np.load(run.path, allow_pickle=False)[:16])
        drop_run(quota, run)
    return np.concatenate(heads) if heads else np.empty((0, 1))


def write_list(quota, c, rows, root):
    if not len(rows):
        raise EmptyList(c)
    path = Path(root) / f"list{c}.bin"
    rows.astype(np.float16).tofile(path)
    return path


def build_async(quota, ex, lists, root, on_list):
    """One task per list; the ticket is refunded when the list is written."""

    def finished(ticket, c, fut):
        if fut.exception() is not None:
            log.error("list %d: %r", c, fut.exception())
            return
        quota.refund(ticket)
        on_list(c, fut.result())

    for c, rows in lists.items():
        ticket = quota.reserve(rows.nbytes // 2, f"write{c}")  # leak: finished() returns before the refund when the task has failed (EmptyList)
        fut = ex.submit(write_list, quota, c, rows, root)
        fut.add_done_callback(functools.partial(finished, ticket, c))


def with_space(quota, nbytes, label, fn, shrink=2):
    """Calls fn(bytes) with as much of nbytes as can be had."""
    while nbytes > 4096:
        try:
            ticket = quota.reserve(nbytes, label)  # clean: near miss, after a NoSpace there's nothing to refund
        except NoSpace:
            nbytes //= shrink
            continue
        try:
            return fn(nbytes)
        finally:
            quota.refund(ticket)
    return None


def build(quota, vecs, k, root, out):
    with ExitStack() as stack:
        spool, ticket = spool_dir(quota, root, vecs.nbytes)  # clean: near miss, both go on the stack
        stack.callback(quota.refund, ticket)
        stack.callback(shutil.rmtree, spool, ignore_errors=True)
        ex = stack.enter_context(ThreadPoolExecutor(4))  # clean: shut down by the stack
        cents = train_centroids(quota, vecs, k)
        near = np.argmax(vecs @ cents.T, axis=1)
        done = {}
        build_async(quota, ex, {c: vecs[near == c] for c in range(k)}, out, done.__setitem__)
    return cents, done


def rebuild_one(quota, c, rows, out):
    ticket = quota.reserve(rows.nbytes // 2, f"rebuild{c}")  # clean: refunded in the finally
    try:
        return write_list(quota, c, rows, out)
    except EmptyList:
        return None
    finally:
        quota.refund(ticket)


def dry_run(quota, sizes):
    """How many of the sizes fit at the same time."""
    tickets = []
    try:
        for n in sizes:
            tickets.append(quota.reserve(n, "dry"))  # clean: near miss, all that were had are refunded
    except NoSpace:
        pass
    n = len(tickets)
    for t in tickets:
        quota.refund(t)
    return n
