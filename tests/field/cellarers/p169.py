"""Intention locks: a table is locked in its database's tree, the parent counts its children."""


class TreeNode:
    def __init__(self, name, parent=None):
        self.name = name
        self.parent = parent
        self.intent = 0
        self.owner = None


def ancestors(node):
    while node.parent is not None:
        node = node.parent
        yield node


def lock_node(node, owner):
    if node.owner is not None or node.intent:
        return False
    if any(a.owner is not None for a in ancestors(node)):
        return False
    for a in ancestors(node):
        a.intent += 1
    node.owner = owner
    return True


def unlock_node(node):
    node.owner = None
    for a in ancestors(node):
        a.intent -= 1


class Ddl:
    def __init__(self, name, store):
        self.name = name
        self.store = store

    def add_column(self, table, column):
        if not lock_node(table, self.name):  # clean: not locked on False, otherwise finally
            return False
        try:
            self.store.alter(table.name, column)
            return True
        finally:
            unlock_node(table)

    def drop(self, table, cascade):
        if not lock_node(table, self.name):  # leak: a table with views returns with the node locked
            return False
        if self.store.views(table.name) and not cascade:
            return False
        self.store.drop(table.name)
        unlock_node(table)
        return True

    def reindex(self, tables):
        for table in tables:
            if lock_node(table, self.name):  # clean: unlocked in the branch
                self.store.reindex(table.name)
                unlock_node(table)

    def rewrite(self, tables):
        for table in tables:
            if not lock_node(table, self.name):  # leak: a full disk ends the loop with the table locked
                continue
            if not self.store.rewrite(table.name):
                break
            unlock_node(table)
