"""Multipart uploads of an object store: initiate, put parts, complete or abort."""
import hashlib
import secrets


class MultipartStore:
    def __init__(self, max_pending=50):
        self.objects = {}
        self.pending = {}
        self.max_pending = max_pending

    def initiate(self, key):
        if len(self.pending) >= self.max_pending:
            raise RuntimeError("too many uploads in progress")
        uid = secrets.token_urlsafe(6)
        self.pending[uid] = (key, {})
        return uid

    def put_part(self, uid, n, data):
        self.pending[uid][1][n] = data

    def complete(self, uid):
        key, parts = self.pending.pop(uid)
        self.objects[key] = b"".join(parts[n] for n in sorted(parts))
        return hashlib.md5(self.objects[key]).hexdigest()

    def abort(self, uid):
        del self.pending[uid]


def upload_file(store, key, f, part=1 << 20):
    uid = store.initiate(key)  # clean: completed, or aborted after a read error
    try:
        n = 0
        while data := f.read(part):
            store.put_part(uid, n, data)
            n += 1
    except OSError:
        store.abort(uid)
        return None
    return store.complete(uid)


def upload_stream(store, key, chunks):
    uid = store.initiate(key)  # leak: an empty stream returns with the upload pending
    count = 0
    for count, chunk in enumerate(chunks, 1):
        store.put_part(uid, count, chunk)
    if count == 0:
        return None
    return store.complete(uid)


def upload_small(store, key, data, limit):
    uid = store.initiate(key)  # clean: aborted or completed
    if len(data) > limit:
        store.abort(uid)
        return None
    store.put_part(uid, 0, data)
    return store.complete(uid)


def upload_dir(store, files):
    for key, f in files:
        uid = store.initiate(key)  # leak: no upload of the loop is completed
        store.put_part(uid, 0, f.read())
