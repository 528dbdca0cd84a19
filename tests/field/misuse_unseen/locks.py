"""Locks released that are not held. In our own words after the reports named."""

import asyncio
import threading
from contextlib import contextmanager


class Player:
    """After Tauon issue 1312: once stopped, every frame releases the lock again."""

    def __init__(self):
        self.player_lock = threading.Lock()
        self.stopping = False

    def loop(self, frames):
        self.player_lock.acquire()
        for frame in frames:
            if self.stopping:
                self.player_lock.release()
            frame.draw()

    def loop_fixed(self, frames):
        self.player_lock.acquire()
        for frame in frames:
            if self.stopping:
                self.player_lock.release()
                return
            frame.draw()
        self.player_lock.release()

    def loop_by_frame(self, frames):
        for frame in frames:
            self.player_lock.acquire()
            frame.draw()
            self.player_lock.release()


@contextmanager
def unlocked(repository_lock):
    """After DVC PR 8105: the lock is let go for a while, and may not be had again."""
    repository_lock.acquire()
    try:
        repository_lock.release()
        try:
            yield
        finally:
            repository_lock.acquire(timeout=3)
    finally:
        repository_lock.release()


@contextmanager
def unlocked_fixed(repository_lock):
    repository_lock.acquire()
    repository_lock.release()
    try:
        yield
    finally:
        repository_lock.acquire()
    repository_lock.release()


class Guard:
    """After redlock PR 3: entering does not ask whether the lock was got, leaving releases it."""

    def __init__(self, lock):
        self.lock = lock

    def __enter__(self):
        self.lock.acquire(blocking=False)
        return self

    def __exit__(self, *exception):
        self.lock.release()


class GuardFixed:
    def __init__(self, lock):
        self.lock = lock

    def __enter__(self):
        if not self.lock.acquire(blocking=False):
            raise TimeoutError("somebody else has the lock")
        return self

    def __exit__(self, *exception):
        self.lock.release()


class GuardWaiting:
    def __init__(self, lock):
        self.lock = lock

    def __enter__(self):
        self.lock.acquire()
        return self

    def __exit__(self, *exception):
        self.lock.release()


async def serve(connections, semaphore: asyncio.Semaphore):
    """After aioftp issue 13: what fails before the acquire is released all the same."""
    try:
        greeting = await connections.greet()
        await semaphore.acquire()
        await connections.dispatch(greeting)
    finally:
        semaphore.release()


async def serve_fixed(connections, semaphore: asyncio.Semaphore):
    greeting = await connections.greet()
    await semaphore.acquire()
    try:
        await connections.dispatch(greeting)
    finally:
        semaphore.release()


async def serve_noting(connections, semaphore: asyncio.Semaphore):
    acquired = False
    try:
        greeting = await connections.greet()
        await semaphore.acquire()
        acquired = True
        await connections.dispatch(greeting)
    finally:
        if acquired:
            semaphore.release()


async def upload(files, semaphore: asyncio.Semaphore):
    """After Files PR 7112: a wait that is cancelled has acquired nothing."""
    for file in files:
        try:
            await asyncio.wait_for(semaphore.acquire(), 10)
            await file.send()
        except asyncio.TimeoutError:
            file.skip()
        finally:
            semaphore.release()


async def upload_fixed(files, semaphore: asyncio.Semaphore):
    for file in files:
        async with semaphore:
            await file.send()
        file.done()


class Listings:
    """After pathofmodifiersapp PR 338: the handler releases the lock on ways on which nobody took it."""

    def __init__(self):
        self.stash_lock = threading.Lock()
        self.stashes = []

    def poll(self, client):
        try:
            answer = client.fetch()
            self.stash_lock.acquire()
            self.stashes.extend(answer)
        except ConnectionError:
            self.stash_lock.release()
            raise
        self.stash_lock.release()

    def poll_fixed(self, client):
        answer = client.fetch()
        self.stash_lock.acquire()
        try:
            self.stashes.extend(answer)
        finally:
            self.stash_lock.release()

    def drain(self, sink):
        if not self.stash_lock.acquire(timeout=1):
            return
        try:
            sink.write(self.stashes)
        finally:
            self.stash_lock.release()


class Meter:
    """After btlewrap PR 8: the destructor releases a lock that leaving has released."""

    def __init__(self, backend):
        self.backend = backend
        self.lock = threading.Lock()

    def connect(self):
        self.lock.acquire()
        self.backend.connect()

    def disconnect(self):
        self.backend.disconnect()
        self.lock.release()

    def __del__(self):
        self.lock.release()


class MeterFixed:
    def __init__(self, backend):
        self.backend = backend
        self.lock = threading.Lock()

    def read(self):
        self.lock.acquire()
        try:
            return self.backend.read()
        finally:
            self.lock.release()

    def __del__(self):
        if self.lock.locked():
            self.lock.release()
