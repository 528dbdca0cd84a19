class Inode:
    def __init__(self, number):
        self.number = number
        self.refs = 0


class InodeTable:
    def __init__(self):
        self.nodes = {}

    def iget(self, number):
        node = self.nodes.setdefault(number, Inode(number))
        node.refs += 1
        return node

    def iput(self, node):
        node.refs -= 1
        if node.refs == 0:
            self.nodes.pop(node.number, None)


class Dentry:
    def __init__(self, name, inode):
        self.name = name
        self.inode = inode
        self.older = None
        self.newer = None


class DentryCache:
    """Hash by name plus a linked list from oldest to newest."""

    def __init__(self, table, limit):
        self.table = table
        self.limit = limit
        self.by_name = {}
        self.oldest = None
        self.newest = None
        self.cwd = None

    def lookup(self, name, number):
        entry = self.by_name.get(name)
        if entry is None:
            entry = Dentry(name, self.table.iget(number))  # clean: _unhook callers put it
            self.by_name[name] = entry
        else:
            self._unhook(entry)
        entry.older = self.newest
        if self.newest is not None:
            self.newest.newer = entry
        else:
            self.oldest = entry
        self.newest = entry
        while len(self.by_name) > self.limit:
            self.invalidate(self.oldest.name)
        return entry.inode.number

    def _unhook(self, entry):
        if entry.older is not None:
            entry.older.newer = entry.newer
        else:
            self.oldest = entry.newer
        if entry.newer is not None:
            entry.newer.older = entry.older
        else:
            self.newest = entry.older
        entry.older = entry.newer = None

    def invalidate(self, name):
        entry = self.by_name.pop(name, None)
        if entry is not None:
            self._unhook(entry)
            self.table.iput(entry.inode)

    def chdir(self, number):
        self.cwd = self.table.iget(number)  # leak: the next chdir overwrites it

    def stat(self, number):
        inode = self.table.iget(number)  # clean: put below
        refs = inode.refs
        self.table.iput(inode)
        return refs

    def unmount(self):
        for name in list(self.by_name):
            self.invalidate(name)
        if self.cwd is not None:
            self.table.iput(self.cwd)
            self.cwd = None
