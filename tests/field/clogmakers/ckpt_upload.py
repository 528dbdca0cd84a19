"""Writes sharded checkpoints to an object store.

Two things have to be kept in order: the bytes of host memory that serialised shards may take
(reserve / give_back) and the multipart uploads (begin, then finish or abort).
"""
import contextlib
import hashlib
import io
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import torch

log = logging.getLogger("ckpt")

PART = 64 << 20
MAX_OPEN = 128
_open_uploads = {}
_open_lock = threading.Lock()


class TooManyUploads(RuntimeError):
    pass


class StoreError(IOError):
    pass


def make_budget(limit):
    cond = threading.Condition()
    left = [limit]

    def reserve(nbytes, wait=True):
        """Takes up to nbytes and returns what was taken, 0 if it would have to wait."""
        nbytes = min(nbytes, limit)
        with cond:
            if not wait and left[0] < nbytes:
                return 0
            cond.wait_for(lambda: left[0] >= nbytes)
            left[0] -= nbytes
        return nbytes

    def give_back(nbytes):
        with cond:
            left[0] += nbytes
            cond.notify_all()

    return reserve, give_back


reserve, give_back = make_budget(8 << 30)


@contextlib.contextmanager
def budgeted(nbytes):
    taken = reserve(nbytes)  # clean: given back in finally
    try:
        yield taken
    finally:
        give_back(taken)


def begin(store, key):
    uid = store.create_multipart(key)  # leak: above the limit it raises and the upload just made is never aborted
    with _open_lock:
        if len(_open_uploads) >= MAX_OPEN:
            raise TooManyUploads(f"{len(_open_uploads)} uploads are open")
        _open_uploads[uid] = (key, time.time())
    return uid


def finish(store, uid, etags):
    with _open_lock:
        key, since = _open_uploads[uid]
    try:
        store.complete_multipart(key, uid, etags)
    except StoreError:
        abort(store, uid)
        raise
    with _open_lock:
        del _open_uploads[uid]
    log.info("%s written in %.1f s", key, time.time() - since)


def abort(store, uid):
    with _open_lock:
        key, _ = _open_uploads.pop(uid, (None, 0))
    if key is not None:
        store.abort_multipart(key, uid)


def sizeof(tensors):
    return sum(t.numel() * t.element_size() for t in tensors.values())


def serialise(tensors):
    out = io.BytesIO()
    torch.save({k: t.detach().cpu() for k, t in tensors.items()}, out)
    return out.getvalue()


def parts(blob):
    for i in range(0, len(blob), PART):
        yield i // PART + 1, blob[i : i + PART]


def put_blob(store, key, blob):
    uid = begin(store, key)  # clean: near miss, finished at the end or aborted before the exception goes on
    try:
        etags = [store.upload_part(key, uid, n, piece) for n, piece in parts(blob)]
    except StoreError:
        abort(store, uid)
        raise
    finish(store, uid, etags)
    return len(blob)


def put_blob_retrying(store, key, blob, tries=4):
    for attempt in range(tries):
        try:
            uid = begin(store, key)  # leak: the next attempt begins another one, the failed one is not aborted
            etags = []
            for n, piece in parts(blob):
                etags.append(store.upload_part(key, uid, n, piece))
            finish(store, uid, etags)
            return len(blob)
        except StoreError as exc:
            log.warning("%s attempt %d: %s", key, attempt, exc)
            time.sleep(2 ** attempt)
    raise StoreError(f"giving up on {key}")


def unchanged(previous, key, blob):
    return previous is not None and previous.get(key) == hashlib.sha1(blob).hexdigest()


def write_shard(store, key, tensors, previous=None):
    taken = reserve(sizeof(tensors))  # leak: a shard that did not change returns without giving back
    blob = serialise(tensors)
    if unchanged(previous, key, blob):
        log.debug("%s is unchanged", key)
        return 0
    try:
        return put_blob(store, key, blob)
    finally:
        give_back(taken)


def write_shard_later(pool, store, key, tensors, on_done=None):
    """Serialises now, uploads on a thread of the pool.  None when the pool has been shut down."""
    taken = reserve(sizeof(tensors))  # leak: submit to a pool that is shut down is caught and there is no future to give back
    blob = serialise(tensors)
    try:
        fut = pool.submit(put_blob, store, key, blob)
    except RuntimeError:
        log.error("%s comes too late", key)
        return None
    fut.add_done_callback(lambda f: give_back(taken))
    if on_done is not None:
        fut.add_done_callback(lambda f: on_done(key, f.exception()))
    return fut


def write_if_room(store, key, tensors):
    taken = reserve(sizeof(tensors), wait=False)  # clean: near miss, 0 stands for nothing taken
    if not taken:
        return False
    try:
        put_blob_retrying(store, key, serialise(tensors))
    except StoreError:
        return False
    finally:
        give_back(taken)
    return True


def stream_shards(state, max_bytes):
    """Groups of tensors with their bytes reserved, the consumer goes on when it has written one."""
    group, size = {}, 0
    for name, tensor in state.items():
        n = tensor.numel() * tensor.element_size()
        if group and size + n > max_bytes:
            with budgeted(size):  # clean: near miss, generator, the with block ends when the consumer goes on or closes it
                yield group
            group, size = {}, 0
        group[name] = tensor
        size += n
    if group:
        with budgeted(size):  # clean: context manager around the yield
            yield group


class Snapshot:
    """All shards of one step, they appear together or not at all."""

    def __init__(self, store, step):
        self.store, self.step = store, step
        self.taken = {}
        self.uploads = {}
        self.etags = {}

    def add(self, key, tensors):
        self.taken[key] = reserve(sizeof(tensors))  # leak: rollback() gives back only the keys that have etags
        blob = serialise(tensors)
        uid = begin(self.store, key)  # clean: near miss, commit() finishes and rollback() aborts all of uploads
        self.uploads[key] = uid
        self.etags[key] = [self.store.upload_part(key, uid, n, p) for n, p in parts(blob)]

    def commit(self):
        for key, uid in self.uploads.items():
            finish(self.store, uid, self.etags[key])
        for nbytes in self.taken.values():
            give_back(nbytes)
        self.uploads.clear()
        self.taken.clear()

    def rollback(self):
        for uid in self.uploads.values():
            abort(self.store, uid)
        for key in self.etags:
            give_back(self.taken.pop(key))
        self.uploads.clear()


def save(store, step, shards):
    snap = Snapshot(store, step)
    try:
        for key, tensors in shards.items():
            snap.add(f"{step:08d}/{key}", tensors)
        snap.commit()
    except (StoreError, TooManyUploads) as exc:
        log.error("step %d not written: %s", step, exc)
        snap.rollback()
        return False
    return True


def save_in_background(store, step, state, workers=8):
    with ThreadPoolExecutor(workers) as pool:  # clean: context manager
        futures = []
        for i, group in enumerate(stream_shards(state, 1 << 30)):
            size = sizeof(group)
            taken = reserve(size)  # clean: near miss, the callback of the future gives back, submit cannot be late here
            fut = pool.submit(put_blob, store, f"{step:08d}/{i:05d}", serialise(group))
            fut.add_done_callback(lambda f, n=taken: give_back(n))
            futures.append(fut)
        done, _ = wait(futures)
    return all(f.exception() is None for f in done)


def sweep(store, older_than):
    """Uploads that a dead writer has left in the store."""
    now = time.time()
    with _open_lock:
        stale = [uid for uid, (_, since) in _open_uploads.items() if now - since > older_than]
    for uid in stale:
        abort(store, uid)
    return len(stale)
