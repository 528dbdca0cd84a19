# Trajectories travel from the actor processes to the collator through one shared
# memory segment. The parent owns the map of the segment; actors ask for a run of
# pages by pipe, fill it and send the page number along with the metadata.
import logging
import struct
from multiprocessing import shared_memory

import numpy as np

PAGE = 4096
HEADER = struct.Struct("<IIf")

log = logging.getLogger("shm")

_seg = None
_bitmap = []
_runs = {}
_parked = {}
_stats = {"alloc": 0, "fail": 0, "bytes": 0}


class ArenaFull(Exception):
    pass


class Corrupt(Exception):
    pass


def setup(pages):
    global _seg, _bitmap
    teardown()
    _seg = shared_memory.SharedMemory(create=True, size=pages * PAGE)  # clean: teardown() closes and unlinks it
    _bitmap = [False] * pages
    _runs.clear()


def teardown():
    global _seg
    if _seg is None:
        return
    for first in list(_parked.values()):
        shm_free(first)
    _parked.clear()
    _seg.close()
    _seg.unlink()
    _seg = None


def _find_run(n):
    start = 0
    for i, used in enumerate(_bitmap):
        if used:
            start = i + 1
        elif i - start + 1 == n:
            return start
    return None


def shm_alloc(nbytes):
    n = -(-nbytes // PAGE)
    first = _find_run(n)
    if first is None:
        _stats["fail"] += 1
        raise ArenaFull(f"{n} pages")
    _bitmap[first:first + n] = [True] * n  # clean: returned to the caller
    _runs[first] = n
    _stats["alloc"] += 1
    _stats["bytes"] += nbytes
    return first


def shm_alloc_or_none(nbytes):
    try:
        return shm_alloc(nbytes)  # clean: returned to the caller
    except ArenaFull:
        return None


def shm_free(first):
    n = _runs.pop(first)
    _bitmap[first:first + n] = [False] * n


def shm_view(first):
    return _seg.buf[first * PAGE:(first + _runs[first]) * PAGE]


def put_array(arr, reward, version):
    first = shm_alloc(HEADER.size + arr.nbytes)  # clean: the page number is returned to the caller
    view = shm_view(first)
    HEADER.pack_into(view, 0, arr.shape[0], version, reward)
    view[HEADER.size:HEADER.size + arr.nbytes] = arr.tobytes()
    return first


def read_array(first, dtype=np.int32):
    view = shm_view(first)
    length, version, reward = HEADER.unpack_from(view, 0)
    nbytes = length * np.dtype(dtype).itemsize
    if HEADER.size + nbytes > len(view):
        raise Corrupt(f"page {first}: length {length}")
    data = np.frombuffer(view[HEADER.size:HEADER.size + nbytes], dtype=dtype).copy()
    return data, version, reward


def serve_request(conn, nbytes):
    """An actor asks for room; the answer is the number of the first page."""
    first = shm_alloc_or_none(nbytes)  # leak: the actor hung up, the error is logged and the run stays marked
    try:
        conn.send(first)
    except BrokenPipeError:
        log.warning("actor went away while it waited for %d bytes", nbytes)
        return
    log.debug("granted %s", first)


def serve_request_checked(conn, nbytes):
    first = shm_alloc_or_none(nbytes)  # clean: near miss, freed when the actor is gone, else the actor's message frees it
    try:
        conn.send(first)
    except BrokenPipeError:
        if first is not None:
            shm_free(first)


def on_message(msg):
    kind, first = msg
    try:
        data, version, reward = read_array(first)
    finally:
        shm_free(first)
    return kind, data, version, reward


def roundtrip(arr, reward):
    """Self test at start-up."""
    first = put_array(arr, reward, 0)  # leak: Corrupt is caught and returns before the free
    try:
        data, _, _ = read_array(first, arr.dtype)
    except Corrupt as e:
        log.error("self test: %s", e)
        return False
    shm_free(first)
    return bool((data == arr).all())


def park(uid, arr, reward, version):
    """Keeps an unfinished episode until the next policy version resumes it."""
    first = put_array(arr, reward, version)  # clean: near miss, the old run is freed and the new one is parked until unpark or teardown
    old = _parked.pop(uid, None)
    if old is not None:
        shm_free(old)
    _parked[uid] = first


def unpark(uid):
    first = _parked.pop(uid, None)
    if first is None:
        return None
    try:
        return read_array(first)
    finally:
        shm_free(first)


def put_episode(turns, version):
    pages = []
    for arr, reward in turns:
        pages.append(put_array(arr, reward, version))  # leak: ArenaFull in the middle loses the pages of the earlier turns
    return pages


def put_episode_atomic(turns, version):
    pages = []
    try:
        for arr, reward in turns:
            pages.append(put_array(arr, reward, version))  # clean: near miss, freed on ArenaFull, else returned
    except ArenaFull:
        for first in pages:
            shm_free(first)
        return None
    return pages


def collate(episodes, version, max_turns):
    out = []
    for turns in episodes:
        pages = put_episode_atomic(turns, version)  # leak: an episode with too many turns is skipped with its pages marked
        if pages is None:
            break
        if len(pages) > max_turns:
            log.info("episode with %d turns skipped", len(pages))
            continue
        out.append([read_array(p) for p in pages])
        for p in pages:
            shm_free(p)
    return out


def regrow(first, nbytes):
    """Moves a run to a larger one; returns the new first page."""
    bigger = shm_alloc(nbytes)  # clean: returned, the old run is freed
    old = shm_view(first)
    shm_view(bigger)[:len(old)] = old
    shm_free(first)
    return bigger


def append_turn(first, arr):
    data, version, reward = read_array(first)
    joined = np.concatenate([data, arr])
    if HEADER.size + joined.nbytes > _runs[first] * PAGE:
        first = regrow(first, HEADER.size + joined.nbytes)  # clean: near miss, the name is rebound but regrow freed the old run
    view = shm_view(first)
    HEADER.pack_into(view, 0, len(joined), version, reward)
    view[HEADER.size:HEADER.size + joined.nbytes] = joined.tobytes()
    return first


def broadcast(arr, queues, version):
    """One copy an actor, because each actor frees its own."""
    for q in queues:
        first = put_array(arr, 0.0, version)  # leak: a full queue is skipped and its copy forgotten
        if q.full():
            _stats["fail"] += 1
            continue
        q.put(("weights", first))


def actor_main(conn, name):
    seg = shared_memory.SharedMemory(name=name)  # clean: closed in the finally
    try:
        while True:
            job = conn.recv()
            if job is None:
                break
            conn.send(("need", job["nbytes"]))
            first = conn.recv()
            if first is None:
                continue
            seg.buf[first * PAGE:first * PAGE + len(job["blob"])] = job["blob"]
            conn.send(("done", first))
    finally:
        seg.close()
