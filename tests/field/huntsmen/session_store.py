"""
Recurrent decode states of chat sessions.

A state-space model keeps a fixed-size state per conversation.  The store holds the
states of the conversations that are live, expires the ones that have gone quiet, moves
them between replicas and spills them to disk when the pool has run dry.
"""
import collections
import logging
import os
import pickle
import threading
import time
import uuid

import numpy

logger = logging.getLogger("session_store")


class PoolDry(Exception):
    """No state cell is free."""


class UnknownSession(KeyError):
    pass


class SpillError(Exception):
    """A spilled state could not be read again."""


class StateCell(object):
    """A fixed place in the big state array."""

    def __init__(self, index, array):
        self.index = index
        self.array = array
        self.dirty = False

    def clear(self):
        self.array[...] = 0
        self.dirty = False


class CellPool(object):
    def __init__(self, count, width):
        storage = numpy.zeros((count, width), dtype=numpy.float32)
        self._cells = [StateCell(i, storage[i]) for i in range(count)]
        self._mutex = threading.Lock()
        self.checkouts = 0
        self.checkins = 0

    def checkout(self):
        with self._mutex:
            if not self._cells:
                raise PoolDry()
            self.checkouts += 1
            return self._cells.pop()  # clean: handed to the caller

    def checkin(self, cell):
        cell.clear()
        with self._mutex:
            self.checkins += 1
            self._cells.append(cell)

    def checkout_clean(self):
        """A cell that is known to be zero, which some kernels insist on."""
        with self._mutex:
            dirty = []
            found = None
            while self._cells and found is None:
                cell = self._cells.pop()  # clean: near miss, a dirty one goes to the list and back, a clean one is returned
                if cell.dirty:
                    dirty.append(cell)
                else:
                    found = cell
            self._cells.extend(dirty)
        if found is None:
            raise PoolDry()
        return found

    def checkout_many(self, count):
        """Several cells at once, for a batched prefill."""
        taken = []
        with self._mutex:
            for _ in range(count):
                if not self._cells:
                    raise PoolDry()
                taken.append(self._cells.pop())  # leak: running dry half way loses the cells that were taken so far
            self.checkouts += count
        return taken


class Session(object):
    def __init__(self, key, user, cell):
        self.key = key
        self.user = user
        self.cell = cell
        self.turns = 0
        self.touched = time.time()
        self.draft_cell = None

    def touch(self):
        self.turns += 1
        self.touched = time.time()


class SessionStore(object):
    def __init__(self, pool, spill_dir, idle_seconds=900.0):
        self.pool = pool
        self.spill_dir = spill_dir
        self.idle_seconds = idle_seconds
        self._by_key = {}
        self._by_user = collections.defaultdict(set)
        self._named = {}
        self._lock = threading.RLock()

    # ------------------------------------------------------------------ life of a session

    def open(self, user):
        """Start a conversation, making room when that is necessary."""
        key = uuid.uuid4().hex
        with self._lock:
            try:
                cell = self.pool.checkout()  # clean: near miss, belongs to the session as does the one of the handler below
            except PoolDry:
                self._spill_oldest()
                cell = self.pool.checkout()  # clean: belongs to the session
            session = Session(key, user, cell)
            self._by_key[key] = session
            self._by_user[user].add(key)
        return key

    def get(self, key):
        with self._lock:
            session = self._by_key.get(key)
            if session is None:
                session = self._unspill(key)
            session.touch()
            return session

    def _drop(self, session):
        self._by_key.pop(session.key, None)
        self._by_user[session.user].discard(session.key)
        if session.draft_cell is not None:
            self.pool.checkin(session.draft_cell)
            session.draft_cell = None
        self.pool.checkin(session.cell)
        session.cell = None

    def close(self, key):
        with self._lock:
            session = self._by_key.get(key)
            if session is None:
                return False
            self._drop(session)
            return True

    def close_user(self, user):
        with self._lock:
            for key in list(self._by_user.pop(user, ())):
                session = self._by_key.pop(key)
                self.pool.checkin(session.cell)

    def expire(self):
        limit = time.time() - self.idle_seconds
        with self._lock:
            for session in list(self._by_key.values()):
                if session.touched < limit:
                    self._drop(session)

    # ------------------------------------------------------------------ drafts and branches

    def begin_draft(self, key):
        """A second state, to try an answer without touching the first."""
        session = self.get(key)
        if session.draft_cell is not None:
            return session.draft_cell
        session.draft_cell = self.pool.checkout()  # leak: close_user() checks in the main cell alone
        session.draft_cell.array[...] = session.cell.array
        session.draft_cell.dirty = True
        return session.draft_cell

    def accept_draft(self, key):
        session = self.get(key)
        if session.draft_cell is None:
            return
        session.cell, session.draft_cell = session.draft_cell, session.cell
        self.pool.checkin(session.draft_cell)
        session.draft_cell = None

    def branch(self, key):
        """A new conversation that begins with the state of an old one."""
        cell = self.pool.checkout()  # leak: get() raises UnknownSession or SpillError while the cell is in hand
        parent = self.get(key)
        cell.array[...] = parent.cell.array
        child = Session(uuid.uuid4().hex, parent.user, cell)
        with self._lock:
            self._by_key[child.key] = child
            self._by_user[child.user].add(child.key)
        return child.key

    def bookmark(self, key, name):
        """Keep a copy of the state under a name, for example after the system prompt."""
        session = self.get(key)
        copy = self.pool.checkout()  # leak: a name that is used again loses the cell stored before
        copy.array[...] = session.cell.array
        copy.dirty = True
        self._named[name] = copy

    def restore(self, key, name):
        session = self.get(key)
        session.cell.array[...] = self._named[name].array
        session.cell.dirty = True

    def forget_bookmark(self, name):
        cell = self._named.pop(name, None)
        if cell is not None:
            self.pool.checkin(cell)

    # ------------------------------------------------------------------ disk

    def _path(self, key):
        return os.path.join(self.spill_dir, key + ".state")

    def _spill_oldest(self):
        if not self._by_key:
            raise PoolDry()
        session = min(self._by_key.values(), key=lambda s: s.touched)
        with open(self._path(session.key), "wb") as stream:  # clean: closed by the with
            pickle.dump((session.user, session.turns, session.cell.array), stream)
        self._drop(session)

    def _load(self, key, cell):
        with open(self._path(key), "rb") as stream:  # clean: closed by the with
            user, turns, array = pickle.load(stream)
        if array.shape != cell.array.shape:
            raise SpillError("state of %s has shape %s" % (key, array.shape))
        cell.array[...] = array
        return user, turns

    def _unspill(self, key):
        if not os.path.exists(self._path(key)):
            raise UnknownSession(key)
        cell = self.pool.checkout()  # clean: near miss, the handler checks it in before it raises again
        try:
            user, turns = self._load(key, cell)
        except SpillError:
            self.pool.checkin(cell)
            raise
        os.unlink(self._path(key))
        session = Session(key, user, cell)
        session.turns = turns
        self._by_key[key] = session
        self._by_user[user].add(key)
        return session

    # ------------------------------------------------------------------ replicas

    def import_(self, key, user, blob):
        cell = self.pool.checkout_clean()  # leak: a blob of the wrong length is refused with the cell in hand
        data = numpy.frombuffer(blob, dtype=numpy.float32)
        if data.size != cell.array.size:
            logger.error("state of %s has %d values", key, data.size)
            return False
        cell.array[...] = data
        cell.dirty = True
        with self._lock:
            self.close(key)
            self._by_key[key] = Session(key, user, cell)
            self._by_user[user].add(key)
        return True

    def score_prefixes(self, prefixes, run):
        """Log-likelihood of several prompts, without conversations for them."""
        try:
            cells = self.pool.checkout_many(len(prefixes))  # clean: on PoolDry there is no list, else all are checked in below
        except PoolDry:
            return None
        scores = run(prefixes, [cell.array for cell in cells])
        for cell in cells:
            self.pool.checkin(cell)
        return scores

    def shutdown(self):
        with self._lock:
            for session in list(self._by_key.values()):
                self._drop(session)
            for name in list(self._named):
                self.forget_bookmark(name)
