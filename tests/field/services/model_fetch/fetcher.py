import hashlib
import logging
import os
import shutil
import time

from .leases import PathLocks, Permits

log = logging.getLogger(__name__)


class FetchError(Exception):
    pass


class Fetcher(object):
    def __init__(self, transport, cache_dir, permits=8):
        self.transport = transport
        self.cache_dir = cache_dir
        self.permits = Permits(permits)
        self.locks = PathLocks()
        self.partial = {}

    def dest(self, name):
        return os.path.join(self.cache_dir, name)

    def fetch(self, name):
        path = self.dest(name)
        token = self.locks.lock_path(path)  # clean: finally
        if token is None:
            raise FetchError("busy: " + name)
        try:
            if os.path.exists(path):
                return path
            with open(path + ".part", "wb") as fh:  # clean: with statement
                for chunk in self.transport(name):
                    fh.write(chunk)
            os.rename(path + ".part", path)
            return path
        finally:
            self.locks.unlock_path(token)

    def fetch_fast(self, name):
        path = self.dest(name)
        token = self.locks.lock_path(path)  # leak: a cached file returns with the path locked
        if token is None:
            return None
        if os.path.exists(path):
            return path
        out = open(path, "wb")  # clean: closed after the copy loop
        for chunk in self.transport(name):
            out.write(chunk)
        out.close()
        self.locks.unlock_path(token)
        return path

    def fetch_with_permits(self, name, n=1):
        if not self.permits.acquire_permits(n, wait=1.0):  # clean: near miss, False took nothing, the rest is in a finally
            return None
        try:
            return self.fetch(name)
        except FetchError as e:
            log.warning("%s", e)
            return None
        finally:
            self.permits.release_permits(n)

    def try_fetch(self, name, n=1):
        if self.permits.acquire_permits(n):  # leak: the FetchError handler returns without releasing
            try:
                path = self.fetch(name)
            except FetchError:
                return None
            self.permits.release_permits(n)
            return path
        return None

    def fetch_sized(self, name, shards):
        want = min(len(shards), 4)
        self.permits.acquire_permits(want, wait=60)  # leak: releases one permit however many it took
        for s in shards:
            self.fetch(name + "/" + s)
        self.permits.release_permits(1)

    def retrying(self, name, attempts=3):
        for i in range(attempts):
            token = self.locks.lock_path(self.dest(name))  # leak: an empty answer sleeps and tries again without unlocking
            if token is None:
                time.sleep(0.1)
                continue
            data = b"".join(self.transport(name))
            if not data:
                time.sleep(2 ** i)
                continue
            self.locks.unlock_path(token)
            return data
        raise FetchError(name)

    def begin_partial(self, name):
        if name in self.partial:
            return self.partial[name]
        fh = open(self.dest(name) + ".part", "ab")  # clean: in the table of partial files, end_partial() and close() close it
        self.partial[name] = fh
        return fh

    def end_partial(self, name):
        fh = self.partial.pop(name, None)
        if fh:
            fh.close()

    def close(self):
        for name in list(self.partial):
            self.end_partial(name)

    def append(self, name, data):
        self.begin_partial(name).write(data)  # clean: the table keeps the file

    def cancel(self, names):
        for n in names:
            fh = open(self.dest(n) + ".part", "ab")  # clean: near miss, close before the continue as well
            if fh.tell() == 0:
                fh.close()
                continue
            fh.truncate(0)
            fh.close()


class MirrorFetcher(Fetcher):
    def __init__(self, transports, cache_dir):
        Fetcher.__init__(self, transports[0], cache_dir)
        self.transports = transports
        self.journal = open(os.path.join(cache_dir, "journal"), "a")  # leak: close() is overridden and does not close the journal

    def close(self):
        Fetcher.close(self)
        self.transports = []

    def fetch_any(self, name):
        for t in self.transports:
            token = self.locks.lock_path(self.dest(name))  # clean: near miss, unlocked in the finally of each round
            if token is None:
                continue
            try:
                data = b"".join(t(name))
                if data:
                    return data
            finally:
                self.locks.unlock_path(token)
        return None

    def verify(self, name, digest):
        fh = open(self.dest(name), "rb")  # leak: a wrong digest raises before the close
        h = hashlib.sha256(fh.read()).hexdigest()
        if h != digest:
            shutil.move(self.dest(name), self.dest(name) + ".bad")
            raise FetchError("digest")
        fh.close()
        return True
