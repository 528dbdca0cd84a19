"""Multimodal encoder cache: image and audio embeddings, by content hash, in a token budget."""
from __future__ import annotations

import hashlib
from contextlib import ExitStack


class EmbedLease:
    """A share of the encoder budget. release() may be called more than once."""

    def __init__(self, cache, key, cost):
        self.cache = cache
        self.key = key
        self.cost = cost
        self.live = True

    def release(self):
        if self.live:
            self.live = False
            self.cache._give(self.cost)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.release()


class EncoderCache:
    def __init__(self, budget):
        self.budget = budget
        self.embeds = {}

    def can_lease(self, cost):
        return cost <= self.budget

    def lease(self, key, cost):
        if cost > self.budget:
            return None
        self.budget -= cost  # clean: the lease carries the cost
        return EmbedLease(self, key, cost)

    def _give(self, cost):
        self.budget += cost


def mm_hash(item):
    return hashlib.sha1(repr(item).encode()).hexdigest()


class EncoderRunner:
    def __init__(self, cache):
        self.cache = cache

    def encode(self, item):
        key = mm_hash(item)
        lease = self.cache.lease(key, len(item))  # leak: a cached embedding is returned with the lease live
        if lease is None:
            return None
        if key in self.cache.embeds:
            return self.cache.embeds[key]
        emb = [float(x) for x in item]
        self.cache.embeds[key] = emb
        lease.release()
        return emb

    def encode_scoped(self, item):
        key = mm_hash(item)
        if not self.cache.can_lease(len(item)):
            return None
        with self.cache.lease(key, len(item)):  # clean: near miss, the with releases on the cached return too
            if key in self.cache.embeds:
                return self.cache.embeds[key]
            emb = [float(x) for x in item]
            self.cache.embeds[key] = emb
            return emb

    def encode_batch(self, items):
        with ExitStack() as stack:
            out = []
            for item in items:
                lease = self.cache.lease(mm_hash(item), len(item))  # clean: near miss, pushed on the exit stack at once
                if lease is None:
                    return out
                stack.callback(lease.release)
                if not item:
                    continue
                out.append(sum(item))
            return out

    def encode_video(self, frames):
        out = []
        for frame in frames:
            lease = self.cache.lease(mm_hash(frame), len(frame))  # leak: a black frame ends the loop before the release
            if lease is None:
                continue
            if not any(frame):
                break
            out.append(max(frame))
            lease.release()
        return out


class MMRequest:
    def __init__(self, rid, items):
        self.rid = rid
        self.items = items
        self.leases = []
        self.audio = None

    def free(self):
        for lease in self.leases:
            lease.release()
        self.leases = []


class MMScheduler:
    def __init__(self, cache, runner):
        self.cache = cache
        self.runner = runner
        self.active = {}

    def schedule(self, req):
        for item in req.items:
            lease = self.cache.lease(mm_hash(item), len(item))  # clean: near miss, req.free() on refusal and in finish()
            if lease is None:
                req.free()
                return False
            req.leases.append(lease)
        self.active[req.rid] = req
        return True

    def schedule_audio(self, req, audio):
        req.audio = self.cache.lease(mm_hash(audio), len(audio))  # leak: MMRequest.free() knows nothing of the audio lease
        return req.audio is not None

    def finish(self, rid):
        req = self.active.pop(rid, None)
        if req is not None:
            req.free()

    def retry(self, req):
        fresh = []
        for item in req.items:
            lease = self.cache.lease(mm_hash(item), len(item))  # leak: the leases of the first attempt are replaced unreleased
            if lease is not None:
                fresh.append(lease)
        req.leases = fresh
        return len(fresh)

    def rotate(self, req):
        req.free()
        for item in req.items:
            lease = self.cache.lease(mm_hash(item), len(item))  # clean: near miss, free() emptied the request just before
            if lease is not None:
                req.leases.append(lease)
        return len(req.leases)

    def try_fit(self, items):
        held = []
        ok = True
        for item in items:
            lease = self.cache.lease(mm_hash(item), len(item))  # clean: both outcomes reach the release loop
            if lease is None:
                ok = False
                break
            held.append(lease)
        for lease in held:
            lease.release()
        return ok

    def reserve_pair(self, image, audio):
        first = self.cache.lease(mm_hash(image), len(image))  # leak: not released when the audio does not fit
        second = self.cache.lease(mm_hash(audio), len(audio))  # clean: released with the first
        if first is None or second is None:
            if second is not None:
                second.release()
            return False
        second.release()
        first.release()
        return True


def budget_probe(cache, cost):
    lease = cache.lease("probe", cost)  # clean: released unless it was refused
    fits = lease is not None
    if fits:
        lease.release()
    return fits
