"""Descriptor table of a small kernel: open, dup and close by number."""


class Vnode:
    def __init__(self, path):
        self.path = path
        self.refs = 0
        self.content = b""


class FdTable:
    def __init__(self, fs, cap=64):
        self.fs = fs
        self.table = [None] * cap

    def _install(self, vnode):
        for fd, entry in enumerate(self.table):
            if entry is None:
                self.table[fd] = vnode
                vnode.refs += 1
                return fd
        return -1

    def sys_open(self, path):
        vnode = self.fs.setdefault(path, Vnode(path))
        return self._install(vnode)

    def sys_dup(self, fd):
        return self._install(self.table[fd])

    def sys_close(self, fd):
        vnode, self.table[fd] = self.table[fd], None
        vnode.refs -= 1
        if vnode.refs == 0 and not vnode.content:
            self.fs.pop(vnode.path, None)


def cat(files, path):
    fd = files.sys_open(path)  # clean: closed after the read
    if fd < 0:
        return None
    data = files.table[fd].content
    files.sys_close(fd)
    return data


def append(files, path, blob, quota):
    fd = files.sys_open(path)  # leak: over quota returns with the descriptor
    if fd < 0:
        return False
    vnode = files.table[fd]
    if len(vnode.content) + len(blob) > quota:
        return False
    vnode.content += blob
    files.sys_close(fd)
    return True


def redirect(files, fd, run):
    saved = files.sys_dup(fd)  # leak: the copy is closed only after a good run
    if run() == 0:
        files.sys_close(saved)
        return True
    return False


def open_log(files):
    return files.sys_open("/var/log")  # clean: handed to the caller
