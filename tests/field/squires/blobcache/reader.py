"""Readers keep their blob pinned until they are closed."""
import contextlib
import hashlib
import logging

from .cache import FetchError

logger = logging.getLogger("blobcache.reader")

MAGIC = b"BLB1"


class BadBlob(Exception):
    pass


class BlobReader:
    def __init__(self, cache, key):
        self._cache = cache
        self._entry = cache.pin(key)  # leak: BadBlob is raised out of the constructor, so nobody can close the reader
        self._offset = len(MAGIC)
        if self._read_at(0, len(MAGIC)) != MAGIC:
            raise BadBlob(key)

    def _read_at(self, offset, length):
        length = max(0, min(length, self._entry.size - offset))
        return self._cache.volume.read(self._entry.extents, offset, length)

    def read(self, length=1 << 20):
        data = self._read_at(self._offset, length)
        self._offset += len(data)
        return data

    def chunks(self):
        while data := self.read():
            yield data

    def close(self):
        entry, self._entry = self._entry, None
        if entry is not None:
            self._cache.unpin(entry)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def digest_of(cache, key):
    sha = hashlib.sha256()
    with BlobReader(cache, key) as reader:  # clean: closed by the with
        for data in reader.chunks():
            sha.update(data)
    return sha.hexdigest()


def lines(cache, key):
    reader = BlobReader(cache, key)  # clean: near miss, a generator that is left early passes through the finally
    rest = b""
    try:
        for data in reader.chunks():
            *whole, rest = (rest + data).split(b"\n")
            yield from whole
        if rest:
            yield rest
    finally:
        reader.close()


def concat(cache, keys, sink):
    """All of the blobs or none of them."""
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(BlobReader(cache, key)) for key in keys]  # clean: near miss, entered one by one, the stack closes those before a bad one
        for reader in readers:
            for data in reader.chunks():
                sink.write(data)
    return len(keys)


def copy_blob(cache, source, target, patch):
    """Rewrite a blob under a new key, patched with the bytes of another."""
    base = BlobReader(cache, source)  # leak: the handler for the missing patch gives False with the base still open
    try:
        overlay = BlobReader(cache, patch)  # clean: closed in the finally
    except (FetchError, BadBlob) as exc:
        logger.warning("no patch for %s: %s", source, exc)
        return False
    try:
        body = base.read(1 << 30)
        fix = overlay.read(1 << 30)
        cache.store(target, MAGIC + fix + body[len(fix):], hashlib.sha256(body).hexdigest())
    finally:
        overlay.close()
        base.close()
    return True


def head(cache, key, length):
    reader = None
    try:
        reader = BlobReader(cache, key)  # clean: near miss, None in the finally means that there is nothing to close
        return reader.read(length)
    except FetchError:
        return b""
    finally:
        if reader is not None:
            reader.close()
