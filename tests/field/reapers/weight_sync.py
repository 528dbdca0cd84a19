"""Push trainer weights to the inference engines. Module state, one process per rank, called from the train loop."""
import atexit
import collections
import functools
import os
import threading
import time
import zlib

import torch
import torch.distributed as dist

BUCKET_BYTES = int(os.environ.get("SYNC_BUCKET_BYTES", 256 << 20))
DEPTH = int(os.environ.get("SYNC_DEPTH", 3))
DEBUG = bool(os.environ.get("SYNC_DEBUG"))

_cv = threading.Condition()
_idle_buckets = []
_tokens = collections.deque(range(8))      # one per engine that may be attached
_engines = {}                              # name -> (endpoint, token)
_inflight = collections.deque()            # (work, bucket)
_deltas = {}                               # parameter name -> bucket with its last sent value
_version = 0


class SyncTimeout(Exception): pass
class VersionSkew(Exception): pass
class HandshakeError(Exception): pass


def setup(device, count=8):
    with _cv:
        for i in range(count):
            _idle_buckets.append({"id": i, "mem": torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=device), "used": 0, "names": []})


def take_bucket(timeout=30.0):
    with _cv:
        if not _cv.wait_for(lambda: _idle_buckets, timeout):
            raise SyncTimeout(f"no bucket in {timeout}s, {len(_inflight)} in flight")
        b = _idle_buckets.pop()  # clean: emptied and handed out
    b["used"] = 0
    b["names"] = []
    return b


def try_bucket():
    with _cv:
        return _idle_buckets.pop() if _idle_buckets else None  # clean: handed out


def return_bucket(b):
    with _cv:
        _idle_buckets.append(b)
        _cv.notify()


def with_bucket(fn):
    """Decorator: the function gets a bucket as its first argument for the time of the call."""
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        b = take_bucket()  # clean: returned in finally
        try:
            return fn(b, *args, **kwargs)
        finally:
            return_bucket(b)
    return wrapper


def put_tensor(b, name, t):
    raw = t.detach().contiguous().view(torch.uint8).flatten()
    b["mem"][b["used"]: b["used"] + raw.numel()].copy_(raw)
    b["names"].append((name, b["used"], raw.numel()))
    b["used"] += raw.numel()


def packed(named):
    """Yields filled buckets; whoever iterates owns what it gets."""
    b = take_bucket()  # clean: near miss, every bucket that is left is yielded or returned, the last one too
    for name, t in named:
        if b["used"] + t.nbytes > BUCKET_BYTES:
            yield b
            b = take_bucket()  # clean: near miss, rebinding after the old one was yielded
        put_tensor(b, name, t)
    if b["used"]:
        yield b
    else:
        return_bucket(b)


def packed_by_layer(layers):
    for layer in layers:
        b = take_bucket()  # leak: a layer without trainable parameters leaves its bucket neither yielded nor returned
        for name, t in layer.named_parameters():
            if t.requires_grad:
                put_tensor(b, name, t)
        if not b["used"]:
            continue
        yield b


def reap(limit=0):
    while len(_inflight) > limit:
        work, b = _inflight.popleft()
        work.wait()
        return_bucket(b)


def broadcast(named, group):
    for b in packed(named):  # clean: near miss, parked in _inflight, and reap() returns all of them before the end
        _inflight.append((dist.broadcast(b["mem"][: b["used"]], 0, group, async_op=True), b))
        reap(DEPTH)
    reap()


def broadcast_layers(layers, group, version):
    pending = []
    for b in packed_by_layer(layers):  # leak: the skew check raises, the caller handles it, and the pending list is gone
        pending.append((dist.broadcast(b["mem"][: b["used"]], 0, group, async_op=True), b))
        if _version != version:
            raise VersionSkew(f"{_version} != {version}")
    for work, b in pending:
        work.wait()
        return_bucket(b)


def attach(name, endpoint):
    """Connect an engine. False when no token is left or the engine does not answer properly."""
    if not _tokens or name in _engines:
        return False
    token = _tokens.popleft()  # leak: a failed handshake answers False with the token gone
    try:
        endpoint.hello(token)
    except HandshakeError as exc:
        print(f"[sync] {name}: {exc}")
        return False
    _engines[name] = (endpoint, token)
    return True


def attach_standby(name, endpoint):
    token = _tokens.popleft()  # clean: near miss, setdefault tells whose token is in the table, the other goes back
    kept = _engines.setdefault(name, (endpoint, token))
    if kept[1] != token:
        _tokens.append(token)
    return kept[0]


def detach(name):
    endpoint, token = _engines.pop(name)
    try:
        endpoint.bye()
    except ConnectionError:
        pass
    _tokens.append(token)


def send_delta(name, t, group):
    """Sparse update against the value that was sent last."""
    old = _deltas.get(name)
    if old is None:
        b = take_bucket()  # leak: forget_deltas() drops the entries without returning their buckets
        put_tensor(b, name, t)
        _deltas[name] = b
        dist.broadcast(b["mem"][: b["used"]], 0, group)
        return t.numel()
    prev = old["mem"][: old["used"]].view(t.dtype).view(t.shape)
    changed = (prev != t).nonzero()
    prev.copy_(t)
    dist.broadcast(changed.contiguous(), 0, group)
    return len(changed)


def forget_deltas(prefix):
    for name in [n for n in _deltas if n.startswith(prefix)]:
        del _deltas[name]


def verify_remote(name, verify):
    """Read weights back from an engine and compare checksums."""
    b = None
    if verify or DEBUG:
        b = take_bucket()  # leak: returned only under verify, not in debug mode
    endpoint, _ = _engines[name]
    crc = endpoint.crc(b["mem"] if b else None)
    if verify:
        ok = zlib.crc32(b["mem"].cpu().numpy().tobytes()) == crc
        return_bucket(b)
        return ok
    return crc != 0


@with_bucket
def measure(b, group, rounds):
    t0 = time.perf_counter()
    for _ in range(rounds):
        dist.broadcast(b["mem"], 0, group)
    return BUCKET_BYTES * rounds / (time.perf_counter() - t0)


def prefetch_hint(names, lookup):
    b = try_bucket()  # clean: near miss, None is not returned, a bucket is
    if b is not None:
        b["used"], b["names"] = 0, []
        for n in names:
            put_tensor(b, n, lookup(n))
    total = b["used"] if b is not None else 0
    if b is not None:
        return_bucket(b)
    return total


def sync_step(model, group, by_layer):
    global _version
    _version += 1
    try:
        if by_layer:
            broadcast_layers(model.layers, group, _version)
        else:
            broadcast(model.named_parameters(), group)
    except (VersionSkew, SyncTimeout) as exc:
        print(f"[sync] step {_version} is skipped: {exc}")
        reap()
        return False
    return True


@atexit.register
def _shutdown():
    reap()
    for name in list(_engines):
        detach(name)
