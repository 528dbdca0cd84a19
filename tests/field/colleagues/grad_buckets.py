"""Gradient buckets in one slab; a bitmap tensor marks granules taken."""
import torch

GRANULE = 1 << 12
N_GRAN = 8192

slab = None
bitmap = torch.zeros(N_GRAN, dtype=torch.bool)
run_len = torch.zeros(N_GRAN, dtype=torch.int32)
hint = 0

def init(device="cuda"):
    global slab
    slab = torch.zeros(N_GRAN * GRANULE, device=device)

def carve(n):
    """First granule of a run of n, or -1."""
    global hint
    run = 0
    for off in range(N_GRAN):
        i = (hint + off) % N_GRAN
        if i == 0:
            run = 0
        run = 0 if bitmap[i] else run + 1
        if run == n:
            start = i - n + 1
            bitmap[start: i + 1] = True
            run_len[start] = n
            hint = (i + 1) % N_GRAN
            return start
    return -1

def fill_in(start):
    n = int(run_len[start])
    bitmap[start: start + n] = False
    run_len[start] = 0

def span(start):
    return slab[start * GRANULE: (start + int(run_len[start])) * GRANULE]

def granules(numel):
    return (numel + GRANULE - 1) // GRANULE

def carve_or_die(n):
    s = carve(n)  # clean: handed to the caller, -1 only raises
    if s < 0:
        raise MemoryError(n)
    return s

def flatten(params):
    """Gradients of params flattened into a run; the caller fills it in."""
    total = sum(p.numel() for p in params)
    s = carve_or_die(granules(total))  # clean: start index handed to the caller
    at = 0
    view = span(s)
    for p in params:
        view[at: at + p.numel()].copy_(p.grad.flatten())
        at += p.numel()
    return s

def grad_norm(params):
    total = sum(p.numel() for p in params)
    return span(flatten(params))[:total].norm().item()  # leak: index of the run is lost in the expression

def allreduce(params, pg):
    s = flatten(params)  # clean: filled in after the copies back
    flat = span(s)
    torch.distributed.all_reduce(flat, group=pg)
    at = 0
    for p in params:
        p.grad.copy_(flat[at: at + p.numel()].view_as(p))
        at += p.numel()
    fill_in(s)

def reduce_buckets(buckets, pg):
    starts = [-1] * len(buckets)
    works = [None] * len(buckets)
    for i, params in enumerate(buckets):
        if not params:
            continue
        starts[i] = flatten(params)  # clean: near miss, second loop fills in each non-negative index
        works[i] = torch.distributed.all_reduce(span(starts[i]), group=pg, async_op=True)
    for i, params in enumerate(buckets):
        if starts[i] < 0:
            continue
        works[i].wait()
        at = 0
        for p in params:
            p.grad.copy_(span(starts[i])[at: at + p.numel()].view_as(p))
            at += p.numel()
        fill_in(starts[i])

def reduce_finite(buckets, pg):
    bad = 0
    for params in buckets:
        s = flatten(params)  # leak: non-finite bucket continues with its run marked
        flat = span(s)
        if not torch.isfinite(flat).all():
            bad += 1
            continue
        torch.distributed.all_reduce(flat, group=pg)
        fill_in(s)
    return bad

def carve_pair(n_grad, n_master):
    g = carve(n_grad)  # leak: stays marked when the master run does not fit
    if g < 0:
        return -1, -1
    m = carve(n_master)  # clean: returned with g, -1 means nothing was carved
    if m < 0:
        return -1, -1
    return g, m

def carve_pair_undo(n_grad, n_master):
    g = carve(n_grad)  # clean: filled in on the failure of the second
    m = carve(n_master)  # clean: near miss, either one alone is filled in
    if g >= 0 and m >= 0:
        return g, m
    if g >= 0:
        fill_in(g)
    if m >= 0:
        fill_in(m)
    return -1, -1

def fp32_step(p, lr):
    g, m = carve_pair_undo(granules(p.numel()), granules(p.numel()))  # clean: near miss, both or neither; both filled in
    if m < 0:
        p.data.add_(p.grad, alpha=-lr)
        return
    span(g)[: p.numel()].copy_(p.grad.flatten())
    span(m)[: p.numel()].copy_(p.data.flatten())
    span(m)[: p.numel()].add_(span(g)[: p.numel()], alpha=-lr)
    p.data.copy_(span(m)[: p.numel()].view_as(p))
    fill_in(g)
    fill_in(m)

def shrink_search(n):
    """Largest run of at most n granules."""
    while n > 0:
        s = carve(n)  # clean: near miss, only failed tries are overwritten
        if s >= 0:
            return s
        n //= 2
    return -1

def double_search(cap):
    best, n = -1, 1
    while n <= cap:
        s = carve(n)  # leak: each larger run overwrites best, which stays marked
        if s < 0:
            break
        best, n = s, n * 2
    return best
