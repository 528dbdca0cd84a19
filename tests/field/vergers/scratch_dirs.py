"""Scratch directories of the training ranks, and tokens for the shared checkpoint store that lapse by themselves."""
import os
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from itertools import groupby, takewhile
from operator import itemgetter
from pathlib import Path

MAX_DEPTH = 12
_owner = {}
_owner_lock = threading.Lock()


def acquire_scratch(rank):
    """A directory that nobody uses, a new one when all are in use."""
    with _owner_lock:
        for path, owner in _owner.items():
            if owner is None:
                break
        else:
            path = Path(tempfile.mkdtemp(prefix="scratch-"))
        _owner[path] = rank
    return path


def release_scratch(path):
    for entry in path.iterdir():
        entry.unlink()
    with _owner_lock:
        _owner[path] = None


class TimedTokens:
    def __init__(self, count):
        self._until = [0.0] * count

    def grab(self, seconds):
        now = time.monotonic()
        for token, until in enumerate(self._until):
            if until <= now:
                self._until[token] = now + seconds
                return token
        return None

    def drop(self, token):
        self._until[token] = 0.0


class TooDeep(ValueError):
    pass


def merge_tree(node, rank, depth=0):
    if depth > MAX_DEPTH:
        raise TooDeep(node)
    path = acquire_scratch(rank)  # leak: TooDeep from a call further down passes the release of every call above it
    parts = [merge_tree(child, rank, depth + 1) for child in node.children]
    merged = node.merge(parts, path)
    release_scratch(path)
    return merged


def reduce_tree(node, rank, depth=0):
    if depth > MAX_DEPTH:
        raise TooDeep(node)
    path = acquire_scratch(rank)  # clean: each call has a finally of its own, and TooDeep unwinds through all of them
    try:
        parts = [reduce_tree(child, rank, depth + 1) for child in node.children]
        return node.reduce(parts, path)
    finally:
        release_scratch(path)


def scratch_writable(rank, log):
    writable = os.access(acquire_scratch(rank), os.W_OK)  # leak: the check takes a directory only to look at it and keeps the answer, not the directory
    if not writable:
        log.warning("rank %d: scratch is read-only", rank)
    return writable


class ExportJobs:
    def __init__(self, rank):
        self.rank = rank
        self.jobs = {}

    def start(self, job_id, model):
        if job_id in self.jobs:
            raise KeyError(job_id)
        path = acquire_scratch(self.rank)  # leak: cancel() takes the job out of the table and drops the path that was in it
        self.jobs[job_id] = path
        model.export_to(path)

    def finish(self, job_id, store):
        path = self.jobs.pop(job_id)
        try:
            store.upload(path)
        finally:
            release_scratch(path)

    def cancel(self, job_id):
        return self.jobs.pop(job_id, None) is not None


class SnapshotWriter:
    def __init__(self, rank):
        self.rank = rank
        self.lock = threading.Lock()
        self.closed = False
        self.open = {}

    def begin(self, step):
        path = acquire_scratch(self.rank)  # leak: a writer that turns out to be closed under the lock gives None back and forgets the directory
        with self.lock:
            if self.closed or step in self.open:
                return None
            self.open[step] = path
        return path

    def commit(self, step, store):
        with self.lock:
            path = self.open.pop(step, None)
        if path is not None:
            try:
                store.upload(path)
            finally:
                release_scratch(path)

    def close(self):
        with self.lock:
            self.closed = True
            left, self.open = list(self.open.values()), {}
        for path in left:
            release_scratch(path)


def write_checkpoint(rank, parts, store, log):
    path = acquire_scratch(rank)  # leak: the release stands in the else of the loop, which a break at a part that fails passes over
    for part in parts:
        if not part.dump(path):
            log.error("part %s of the checkpoint failed", part)
            break
    else:
        store.upload(path)
        release_scratch(path)


class UploadQueue:
    def __init__(self, rank):
        self.rank = rank
        self.pending = deque()

    def stage(self, step, shard):
        path = acquire_scratch(self.rank)  # leak: upload_next() pops an entry to look at its step and does not put one back that is too new
        self.pending.append((step, path))
        shard.save(path)

    def upload_next(self, store, complete_step):
        if not self.pending:
            return None
        step, path = self.pending.popleft()
        if step > complete_step:
            return None
        try:
            store.upload(path)
        finally:
            release_scratch(path)
        return step


def merge_groups(rank, shards, store):
    staged = []
    for shard in sorted(shards, key=lambda shard: shard.group):
        staged.append((shard.group, acquire_scratch(rank)))  # leak: the first directory of each group goes to chosen, the second and later ones go nowhere
        shard.save(staged[-1][1])
    chosen = [next(members) for _, members in groupby(staged, key=itemgetter(0))]
    try:
        for group, path in chosen:
            store.merge(group, path)
    finally:
        for _, path in chosen:
            release_scratch(path)


def _open_workspace(rank):
    work = acquire_scratch(rank)  # clean: export_model() releases the first of the two
    temp = acquire_scratch(rank)  # leak: the only caller unpacks the second of the two into a name that it does not use
    (work / "TEMP").write_text(str(temp))
    return work, temp


def export_model(rank, model, store):
    work, _ = _open_workspace(rank)
    try:
        model.export_to(work)
        store.upload(work)
    finally:
        release_scratch(work)


def _fresh_dirs(rank):
    while True:
        yield acquire_scratch(rank)  # leak: takewhile takes the directory that fails the test from the generator and does not hand it on


def spread_shards(rank, shards, min_free):
    left = iter(shards)
    for path in takewhile(lambda p: os.statvfs(p).f_bavail > min_free, _fresh_dirs(rank)):
        try:
            shard = next(left, None)
            if shard is None:
                break
            shard.process_in(path)
        finally:
            release_scratch(path)


def _sort_dirs(rank):
    while True:
        yield acquire_scratch(rank)  # leak: zip asks for a directory first and for a shard then, so the last directory finds no shard


def sort_shards(rank, shards):
    for path, shard in zip(_sort_dirs(rank), shards):
        try:
            shard.sort_in(path)
        finally:
            release_scratch(path)


def _index_dirs(rank):
    while True:
        yield acquire_scratch(rank)  # clean: zip asks for a shard first, and takes no directory when there is none


def index_shards(rank, shards):
    for shard, path in zip(shards, _index_dirs(rank)):
        try:
            shard.index_in(path)
        finally:
            release_scratch(path)


def dump_debug_state(rank, trainer, store):
    path = acquire_scratch(rank)  # clean: suppress ends the block at the raise, and the release stands after the block
    with suppress(OSError):
        trainer.dump(path)
        if not any(path.iterdir()):
            raise OSError("nothing dumped")
        store.upload(path)
    release_scratch(path)


def announce_checkpoint(tokens, store, step):
    token = tokens.grab(30.0)  # clean: a token lapses after its seconds, and the next grab() hands it out again
    if token is None:
        return False
    store.announce(step, token)
    return True


class PhaseDirs:
    PHASES = ("train", "eval", "export")

    def __init__(self, rank):
        for phase in self.PHASES:
            setattr(self, f"{phase}_dir", acquire_scratch(rank))  # clean: close() goes over the attributes of the object and releases each one

    def dir_for(self, phase):
        return getattr(self, f"{phase}_dir")

    def close(self):
        for name, path in list(vars(self).items()):
            release_scratch(path)
            delattr(self, name)
