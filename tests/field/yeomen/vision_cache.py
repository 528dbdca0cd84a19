"""Cache of image embeddings for multimodal requests.

Encoding an image takes longer than prefill of the text around it, so rows of a
big embedding matrix are kept between requests.  An entry that is in use by a
request is held; entries that nobody holds can be evicted.
"""
import contextlib
import hashlib
import logging
from collections import OrderedDict

import numpy as np
import torch

log = logging.getLogger("vision")


class CacheFull(Exception): ...
class ImageRejected(ValueError): ...


class RowSpace:
    def __init__(self, rows, width, device="cuda"):
        self.matrix = torch.zeros(rows, width, dtype=torch.float16, device=device)
        self._rows = list(range(rows))

    def __len__(self):
        return len(self._rows)

    def draw(self, n):
        if n > len(self._rows):
            raise CacheFull("%d rows wanted, %d left" % (n, len(self._rows)))
        return [self._rows.pop() for _ in range(n)]  # clean: goes to the caller

    def draw_even(self, n):
        out, odd = [], []
        while self._rows and len(out) < n:
            row = self._rows.pop()  # leak: odd rows go back only when enough even ones turned up
            (odd if row % 2 else out).append(row)
        if len(out) < n:
            self._rows.extend(out)
            return None
        self._rows.extend(odd)
        return out

    def back(self, rows):
        self._rows.extend(rows)


class Entry:
    __slots__ = ("digest", "rows", "holds", "doomed", "grid")

    def __init__(self, digest, rows, grid):
        self.digest = digest
        self.rows = rows
        self.grid = grid
        self.holds = 0
        self.doomed = False


class EmbeddingCache:
    def __init__(self, space):
        self.space = space
        self.entries = OrderedDict()

    def _make_room(self, n):
        for digest in list(self.entries):
            if len(self.space) >= n:
                return
            entry = self.entries[digest]
            if not entry.holds:
                self.space.back(self.entries.pop(digest).rows)
        if len(self.space) < n:
            raise CacheFull("all entries are held")

    def insert(self, digest, n, grid):
        if digest in self.entries:
            return self.entries[digest]
        self._make_room(n)
        rows = self.space.draw(n)  # clean: near miss, _make_room has seen to the room, and the entry gives them back when evicted or dropped
        entry = self.entries[digest] = Entry(digest, rows, grid)
        return entry

    def hold(self, digest):
        entry = self.entries.get(digest)
        if entry is None:
            return None
        self.entries.move_to_end(digest)
        entry.holds += 1
        return entry

    def unhold(self, entry):
        entry.holds -= 1
        if entry.doomed and not entry.holds:
            self.space.back(entry.rows)

    def drop(self, digest):
        entry = self.entries.pop(digest, None)
        if entry is not None and entry.holds:
            entry.doomed = True
        elif entry is not None:
            self.space.back(entry.rows)

    @contextlib.contextmanager
    def held(self, digest):
        entry = self.hold(digest)  # clean: None has no hold, anything else is let go in the finally
        try:
            yield entry
        finally:
            if entry is not None:
                self.unhold(entry)

    @contextlib.contextmanager
    def scratch(self, n):
        self._make_room(n)
        rows = self.space.draw(n)  # leak: no finally around the yield, and an ImageRejected of the body comes through it
        yield rows
        self.space.back(rows)


def digest_of(image):
    return hashlib.sha1(np.ascontiguousarray(image).tobytes()).hexdigest()


def grid_of(image, patch=14):
    h, w = image.shape[:2]
    if h < patch or w < patch:
        raise ImageRejected("image of %d x %d" % (w, h))
    return h // patch, w // patch


class MultimodalInput:
    def __init__(self, cache, ids):
        self.cache = cache
        self.ids = ids
        self.images = []
        self.thumbnail = None

    def rows(self):
        return [r for e in self.images for r in e.rows]

    def close(self):
        while self.images:
            self.cache.unhold(self.images.pop())


class Encoder:
    def __init__(self, tower, cache, max_batch=8):
        self.tower = tower
        self.cache = cache
        self.max_batch = max_batch

    def _encode(self, image, entry):
        self.cache.space.matrix[entry.rows] = self.tower(image).half()

    def embed(self, image):
        digest = digest_of(image)
        entry = self.cache.hold(digest)  # clean: goes to the caller
        if entry is not None:
            return entry
        gh, gw = grid_of(image)
        self._encode(image, self.cache.insert(digest, gh * gw, (gh, gw)))
        return self.cache.hold(digest)  # clean: goes to the caller

    def prepare(self, ids, images):
        request = MultimodalInput(self.cache, ids)
        try:
            for image in images:
                request.images.append(self.embed(image))  # clean: near miss, close() lets go of what was attached before the one that failed
        except (ImageRejected, CacheFull):
            request.close()
            raise
        return request

    def prepare_video(self, ids, frames, stride):
        """Like prepare, for every stride-th frame; equal neighbours are merged."""
        request = MultimodalInput(self.cache, ids)
        previous = None
        for frame in frames[::stride]:
            entry = self.embed(frame)  # leak: a frame equal to its neighbour takes the continue with a second hold on the entry
            if entry is previous:
                continue
            request.images.append(entry)
            previous = entry
        if frames:
            request.thumbnail = self.embed(frames[0][::4, ::4])  # leak: close() of the request knows its images and not the thumbnail
        return request

    def prefetch(self, images):
        with contextlib.ExitStack() as stack:
            for image in images:
                entry = self.embed(image)  # clean: near miss, the stack lets go, or the one it is moved to
                stack.callback(self.cache.unhold, entry)
            return stack.pop_all()

    def describe(self, image):
        with self.cache.scratch(4) as rows:  # clean: entered and left as a context
            self.cache.space.matrix[rows] = self.tower(image[:28, :28]).half()
            if float(self.cache.space.matrix[rows].abs().max()) == 0.0:
                raise ImageRejected("blank")
        return grid_of(image)

    def batches(self, images):
        """Yields lists of held entries, at most max_batch at a time."""
        group = []
        try:
            for image in images:
                group.append(self.embed(image))  # clean: near miss, the finally also runs when the consumer stops early
                if len(group) == self.max_batch:
                    yield list(group)
                    while group:
                        self.cache.unhold(group.pop())
            if group:
                yield list(group)
        finally:
            for entry in group:
                self.cache.unhold(entry)

    def refresh(self, image):
        digest = digest_of(image)
        with self.cache.held(digest) as entry:  # clean: with
            if entry is None:
                return False
            self._encode(image, entry)
        return True

    def compare(self, left, right):
        """Cosine of the mean embeddings of two images, None for different grids."""
        a = self.embed(left)  # leak: a second image that is rejected, or grids that differ, return past the unhold
        try:
            b = self.embed(right)  # clean: let go in the finally
        except ImageRejected:
            return None
        try:
            if a.grid != b.grid:
                return None
            m = self.cache.space.matrix
            cos = torch.cosine_similarity(m[a.rows].mean(0), m[b.rows].mean(0), dim=0)
        finally:
            self.cache.unhold(b)
        self.cache.unhold(a)
        return float(cos)


def serve_one(encoder, engine, ids, images):
    try:
        request = encoder.prepare(ids, images)  # clean: closed in the finally
    except (ImageRejected, CacheFull) as exc:
        log.info("refused: %s", exc)
        return None
    try:
        return engine.generate(request.ids, request.rows())
    finally:
        request.close()


def serve_many(encoder, engine, prompts):
    done = encoder.prefetch([im for _, ims in prompts for im in ims])  # clean: with the stack as a context
    with done:
        return [serve_one(encoder, engine, ids, ims) for ids, ims in prompts]
