"""A multipart upload: begun at the store, and then either completed or aborted there."""
import hashlib
import logging

log = logging.getLogger("ckptmover.upload")


class Throttled(Exception):
    pass


class PartCorrupt(Exception):
    pass


class Upload:
    def __init__(self, store, key):
        self.store = store
        self.key = key
        self.upload_id = store.begin_multipart(key)  # leak: close() of an upload without parts neither completes nor aborts it
        self.etags = {}
        self.failed = False

    def done(self, number, etag):
        self.etags[number] = etag

    def close(self):
        if not self.etags:
            log.info("%s: nothing was sent", self.key)
            return None
        if self.failed:
            self.store.abort_multipart(self.upload_id)
            return None
        return self.store.complete_multipart(self.upload_id, sorted(self.etags.items()))


def send_part(conns, upload, number, data, tries=4):
    conn = conns.borrow()  # leak: when throttled another is bound over it
    for _ in range(tries):
        try:
            etag = conn.put_part(upload.upload_id, number, data)
        except Throttled:
            conn = conns.borrow()  # leak: the same, when throttled again
            continue
        if etag != hashlib.md5(data).hexdigest():
            conns.repay(conn, broken=True)
            raise PartCorrupt(f"{upload.key} part {number}")
        conns.repay(conn)
        upload.done(number, etag)
        return True
    conns.repay(conn)
    return False


def send_small(conns, key, data):
    with conns.one() as conn:  # clean: repaid by the context manager
        return conn.put(key, data)


def copy_pair(store, key, other, each):
    """Both copies of a file or neither."""
    first = store.begin_multipart(key)  # clean: near miss, completed, or aborted by the handler
    try:
        second = store.begin_multipart(other)  # clean: completed, or aborted by the inner handler
        try:
            tags = [each(n, first, second) for n in range(store.parts(key))]
            store.complete_multipart(second, tags)
        except (Throttled, PartCorrupt):
            store.abort_multipart(second)
            raise
    except (Throttled, PartCorrupt):
        store.abort_multipart(first)
        return False
    store.complete_multipart(first, tags)
    return True
