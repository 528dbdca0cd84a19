"""Released though not taken. Written in our own words after the bug reports that each function names."""

import asyncio
import contextlib
import threading


@contextlib.contextmanager
def prefix_read_lock(store, spec):
    """After spack issue 9166: the acquire stands in the try, so that its own failure releases."""
    prefix_lock = store.lock_of(spec)
    try:
        prefix_lock.acquire(timeout=60)
        yield store
    finally:
        prefix_lock.release()


@contextlib.contextmanager
def prefix_read_lock_fixed(store, spec):
    prefix_lock = store.lock_of(spec)
    prefix_lock.acquire()
    try:
        yield store
    finally:
        prefix_lock.release()


def edit_tree(tree, tree_lock, change):
    """After MDSplus PR 21: a first statement that fails is followed by an unlock of what was never locked."""
    try:
        tree.open(change.path)
        tree_lock.acquire()
        tree.apply(change)
    finally:
        tree_lock.release()


def edit_tree_fixed(tree, tree_lock, change):
    tree_lock.acquire()
    try:
        tree.open(change.path)
        tree.apply(change)
    finally:
        tree_lock.release()


class Nest:
    """After python-nest PR 136: acquire(False) may have failed, and nobody looks."""

    def __init__(self):
        self.queue_lock = threading.Lock()
        self.queue = []

    def status(self):
        self.queue_lock.acquire(False)
        if not self.queue:
            self.open_stream()
        self.queue_lock.release()
        return self.queue[0]

    def status_fixed(self):
        self.queue_lock.acquire()
        if not self.queue:
            self.open_stream()
        self.queue_lock.release()
        return self.queue[0]

    def status_or_none(self):
        if not self.queue_lock.acquire(False):
            return None
        try:
            return self.queue[0]
        finally:
            self.queue_lock.release()


async def with_timeout(lock: asyncio.Lock, work):
    """After aiorwlock issue 409: on a time-out there is nothing to release."""
    try:
        await asyncio.wait_for(lock.acquire(), timeout=5)
        await work()
    finally:
        lock.release()


async def with_timeout_fixed(lock: asyncio.Lock, work):
    try:
        await asyncio.wait_for(lock.acquire(), timeout=5)
    except asyncio.TimeoutError:
        return False
    try:
        await work()
    finally:
        lock.release()
    return True


def run_locked(lock, timeout, work):
    """After fishtest PR 2433: the result of a time-limited acquire is not asked in the finally."""
    taken = lock.acquire(timeout=timeout)
    try:
        if taken:
            work()
    finally:
        lock.release()


def run_locked_fixed(lock, timeout, work):
    taken = lock.acquire(timeout=timeout)
    try:
        if taken:
            work()
    finally:
        if taken:
            lock.release()


def forget(hot_cache, allocator, key):
    """After LMCache issue 3650: a lookup that found nothing pinned nothing, and is unpinned all the same."""
    block = allocator.allocate_block()
    hot_cache.note(key, block.address)
    if block.wanted:
        allocator.free_block(block)
    else:
        allocator.free_block(hot_cache.peek(key))
        allocator.free_block(block)


class Worker:
    """After kbase assembly issue 264: another branch than the one that took the lock releases it."""

    def __init__(self):
        self.job_list_lock = threading.Lock()

    def compute(self, job):
        if job.tracked:
            self.job_list_lock.acquire()
            job.list()
        job.run()
        self.job_list_lock.release()

    def compute_fixed(self, job):
        if job.tracked:
            self.job_list_lock.acquire()
            job.list()
        job.run()
        if job.tracked:
            self.job_list_lock.release()
