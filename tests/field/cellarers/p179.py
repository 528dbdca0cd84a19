"""Request arenas of a web server: checkpoints on a stack of bytes, popped in order."""


class ArenaPool:
    CHUNK = 64 * 1024

    def __init__(self, count):
        self.arenas = [bytearray(self.CHUNK) for _ in range(count)]
        self.tops = [0] * count
        self.free_mask = (1 << count) - 1

    def fetch(self):
        if not self.free_mask:
            self.arenas.append(bytearray(self.CHUNK))
            self.tops.append(0)
            return len(self.arenas) - 1
        i = (self.free_mask & -self.free_mask).bit_length() - 1
        self.free_mask &= ~(1 << i)
        return i

    def push(self, i, data):
        at = self.tops[i]
        self.arenas[i][at:at + len(data)] = data
        self.tops[i] += len(data)
        return memoryview(self.arenas[i])[at:at + len(data)]

    def wipe(self, i):
        self.tops[i] = 0
        self.free_mask |= 1 << i


class Server:
    def __init__(self, arenas):
        self.arenas = arenas
        self.by_conn = {}

    def on_connect(self, conn):
        self.by_conn[conn] = self.arenas.fetch()  # clean: kept for the connection, wiped by on_close()

    def on_close(self, conn):
        self.arenas.wipe(self.by_conn.pop(conn))

    def serve(self, conn, parts):
        a = self.arenas.fetch()  # clean: wiped in finally
        try:
            for part in parts:
                conn.write(self.arenas.push(a, part))
        finally:
            self.arenas.wipe(a)

    def serve_limited(self, conn, parts, limit):
        a = self.arenas.fetch()  # leak: a response over the limit returns with the arena
        for part in parts:
            self.arenas.push(a, part)
            if self.arenas.tops[a] > limit:
                return False
        conn.write(bytes(self.arenas.arenas[a][:self.arenas.tops[a]]))
        self.arenas.wipe(a)
        return True

    def error_page(self, conn, code):
        a = self.arenas.fetch()  # leak: the arena is used for one line and not wiped
        conn.write(self.arenas.push(a, b"HTTP/1.1 %d\r\n\r\n" % code))
