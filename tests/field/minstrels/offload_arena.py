"""First-fit arena over one big host tensor; optimizer states live here between steps.

    off = grab(n)      # element offset, -1 if there is no hole
    drop(off)
"""
import bisect
import json
import sys
import threading
import time
import torch

_arena = None
_holes = []         # sorted [off, len]
_sizes = {}         # off -> len
_mu = threading.RLock()
_cv = threading.Condition(_mu)


class ArenaFull(MemoryError):
    pass


def setup(numel, pin=True):
    global _arena
    _arena = torch.empty(numel)
    _arena = _arena.pin_memory() if pin else _arena
    _holes[:] = [[0, numel]]
    _sizes.clear()


def grab(n):
    with _mu:
        for i, (off, ln) in enumerate(_holes):
            if ln >= n:
                if ln == n:
                    del _holes[i]
                else:
                    _holes[i] = [off + n, ln - n]
                _sizes[off] = n
                return off
        return -1


def drop(off):
    with _mu:
        n = _sizes.pop(off)
        i = bisect.bisect(_holes, [off, n])
        _holes.insert(i, [off, n])
        if i + 1 < len(_holes) and off + n == _holes[i + 1][0]:
            _holes[i][1] += _holes.pop(i + 1)[1]
        if i and sum(_holes[i - 1]) == off:
            _holes[i - 1][1] += _holes.pop(i)[1]
        _cv.notify_all()


def must_grab(n):
    off = grab(n)  # clean: handed to the caller, -1 holds nothing
    if off < 0:
        raise ArenaFull("%d elements, largest hole %d" % (n, max((h[1] for h in _holes), default=0)))
    return off


def wait_grab(n, secs):
    end = time.monotonic() + secs
    with _cv:
        while True:
            off = grab(n)  # clean: near miss, the loop only goes round with -1
            if off >= 0:
                return off
            if not _cv.wait(end - time.monotonic()):
                return None


def view(off):
    return _arena[off:off + _sizes[off]]


def stash(t):
    """Copies t into the arena; -1 means that it was not copied and stays where it is."""
    off = grab(t.numel())  # clean: returned, -1 holds nothing
    if off >= 0:
        view(off).copy_(t.reshape(-1), non_blocking=True)
    return off


_state = {}         # param name -> {"m": off, "v": off}


def add_param(name, p):
    """Makes room for both moments, all or nothing."""
    if name in _state:
        return True
    m = grab(p.numel())  # leak: with no room for v the function returns False and m is not dropped
    v = grab(p.numel())  # clean: near miss, v goes to _state, or is dropped when m failed
    if m < 0 and v >= 0:
        drop(v)
    if m < 0 or v < 0:
        return False
    view(m).zero_()
    view(v).zero_()
    _state[name] = {"m": m, "v": v}
    return True


def del_param(name):
    for off in _state.pop(name).values():
        drop(off)


def grow_param(name, p):
    """After a vocabulary extension the embedding has more rows: moments move to larger blocks."""
    old = _state[name]
    new = {}
    for k, off in old.items():
        new[k] = must_grab(p.numel())  # leak: ArenaFull for the second moment, load_all handles it and new is gone
        view(new[k]).zero_()
        view(new[k])[:_sizes[off]].copy_(view(off))
    _state[name] = new
    for off in old.values():
        drop(off)


def step(params, lr, betas=(0.9, 0.95), eps=1e-8):
    big = max(p.numel() for _, p in params)
    tmp = wait_grab(2 * big, 10.0)  # clean: near miss, None takes the slow path, the rest is in the finally
    try:
        for name, p in params:
            st = _state.get(name)
            if st is None or p.grad is None:
                continue
            g = p.grad.reshape(-1).cpu()
            m, v = view(st["m"]), view(st["v"])
            m.mul_(betas[0]).add_(g, alpha=1 - betas[0])
            v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
            d = view(tmp)[:g.numel()] if tmp is not None else torch.empty_like(g)
            torch.sqrt(v, out=d).add_(eps).reciprocal_().mul_(m)
            p.data.reshape(-1).add_(d.to(p.device), alpha=-lr)
    finally:
        if tmp is not None:
            drop(tmp)


def snapshot(path):
    f = open(path, "wb")  # clean: both branches close it
    if not _state:
        f.close()
        return 0
    torch.save({n: {k: view(o).clone() for k, o in s.items()} for n, s in _state.items()}, f)
    f.close()
    return len(_state)


def load_all(path, params):
    """Names that could not be restored come back in a list."""
    blob, lost = torch.load(path), []
    for name, p in params:
        if name not in blob:
            lost.append(name)
            continue
        try:
            if name not in _state:
                if not add_param(name, p):
                    raise ArenaFull(name)
            elif _sizes[_state[name]["m"]] < p.numel():
                grow_param(name, p)
        except ArenaFull as e:
            print("arena:", e, file=sys.stderr)
            lost.append(name)
            continue
        for k, t in blob[name].items():
            view(_state[name][k])[:t.numel()].copy_(t)
    return lost


_acc = {}


def accumulate(name, grad):
    off = _acc.get(name)
    if off is None:
        off = stash(grad)  # clean: near miss, entered in _acc, flush drops it
        if off < 0:
            return False
        _acc[name] = off
        return True
    view(off).add_(grad.reshape(-1))
    return True


def flush(params, scale):
    for name, p in params:
        off = _acc.pop(name, None)
        if off is None:
            continue
        p.grad = (view(off) * scale).view_as(p).to(p.device)
        drop(off)
    for off in _acc.values():
        drop(off)
    _acc.clear()


_paged = {}


def page_out(name, p):
    with _mu:
        _paged[name] = stash(p.data)  # leak: paging a layer out twice overwrites the first offset
    if _paged[name] >= 0:
        p.data = torch.empty(0)


def page_in(name, p, shape):
    off = _paged.pop(name, -1)
    if off >= 0:
        p.data = view(off).clone().view(shape)
        drop(off)


class Pager(threading.Thread):
    def __init__(self, layers, idle_s):
        super().__init__(daemon=True)
        self.layers, self.idle_s = layers, idle_s
        self.book = must_grab(4096)  # leak: run() returns on quit without dropping the book
        self.quit = threading.Event()

    def run(self):
        while not self.quit.wait(self.idle_s):
            now = time.time()
            for i, (name, layer) in enumerate(self.layers):
                view(self.book)[i] = now - layer.last_used
                if now - layer.last_used > self.idle_s:
                    page_out(name, layer.weight)


def self_check(rounds=64):
    """Random grabs and drops; the arena must be as it was. Returns False when it is not."""
    before, held = json.dumps(_holes), []
    for i in range(rounds):
        off = grab(1 + i * 37 % 1000)  # clean: kept in held, what is left is dropped after the loop
        if off < 0:
            continue
        held.append(off)
        if i % 3 == 0:
            drop(held.pop(len(held) // 2))
    for off in held:
        drop(off)
    return json.dumps(_holes) == before


def bench(n):
    off = grab(n)  # leak: without cuda the function returns None before the drop
    if off < 0 or not torch.cuda.is_available():
        return None
    t = torch.empty(n, device="cuda")
    t0 = time.time()
    view(off).copy_(t)
    torch.cuda.synchronize()
    drop(off)
    return 4 * n / (time.time() - t0) / (1 << 20)
