"""Objects that give back in __del__, and tables of weak references to them."""
import weakref


class TextureIds:
    def __init__(self):
        self.top = 0
        self.gone = []

    def gen(self):
        if self.gone:
            return self.gone.pop()
        self.top += 1
        return self.top

    def delete(self, ident):
        self.gone.append(ident)


class Texture:
    def __init__(self, ids, size):
        self.ids = ids
        self.size = size
        self.ident = ids.gen()  # clean: near miss, close deletes it, __del__ calls close

    def close(self):
        ident, self.ident = self.ident, None
        if ident is not None:
            self.ids.delete(ident)

    def __del__(self):
        self.close()


class Atlas:
    def __init__(self, ids):
        self.ids = ids
        self.known = weakref.WeakValueDictionary()
        self.raw = {}
        self.raw_sizes = {}

    def texture(self, size):
        tex = self.known.get(size)
        if tex is None:
            tex = self.known[size] = Texture(self.ids, size)
        return tex

    def raw_texture(self, name, size):
        if self.raw_sizes.get(name) == size:
            return self.raw[name]
        ident = self.ids.gen()  # leak: a new size under a known name overwrites the plain id
        self.raw[name] = ident
        self.raw_sizes[name] = size
        return ident

    def close(self):
        for ident in self.raw.values():
            self.ids.delete(ident)
        self.raw.clear()
        self.raw_sizes.clear()


def upload(ids, rows):
    tex = Texture(ids, len(rows))
    if not rows:
        return 0
    size = tex.size
    tex.close()
    return size


def upload_raw(ids, rows):
    ident = ids.gen()  # leak: no rows, no delete
    if not rows:
        return 0
    value = ident + len(rows)
    ids.delete(ident)
    return value


def blit(ids, rows):
    src, dst = ids.gen(), None  # clean: near miss, deleted in finally with what else there is
    try:
        if rows:
            dst = ids.gen()  # clean: near miss, deleted in finally when it was made
        return src if dst is None else src + dst
    finally:
        for ident in (src, dst):
            if ident is not None:
                ids.delete(ident)


def blit_many(ids, groups):
    done = 0
    for rows in groups:
        src = ids.gen()  # clean: near miss, deleted before the test
        dst = ids.gen()  # leak: an empty group continues after deleting the source only
        ids.delete(src)
        if not rows:
            continue
        done += len(rows)
        ids.delete(dst)
    return done
