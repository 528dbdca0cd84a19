"""Budgets in a tree: a claim is charged in the node and in all its parents."""


class BudgetNode:
    def __init__(self, name, limit, parent=None):
        self.name = name
        self.limit = limit
        self.parent = parent
        self.used = 0

    def _chain(self):
        node = self
        while node is not None:
            yield node
            node = node.parent

    def try_consume(self, amount):
        if any(n.used + amount > n.limit for n in self._chain()):
            return False
        for n in self._chain():
            n.used += amount
        return True

    def release_consumed(self, amount):
        for n in self._chain():
            n.used -= amount


root = BudgetNode("gpu", 80 << 30)
kv = BudgetNode("kv", 60 << 30, root)
act = BudgetNode("activations", 20 << 30, root)


def run_layer(layer, x):
    if not act.try_consume(layer.act_bytes):  # clean: finally
        return layer.checkpointed(x)
    try:
        return layer(x)
    finally:
        act.release_consumed(layer.act_bytes)


def run_layers(layers, x):
    for layer in layers:
        if not act.try_consume(layer.act_bytes):  # leak: an identity layer continues with its bytes consumed
            return None
        if layer.identity:
            continue
        x = layer(x)
        act.release_consumed(layer.act_bytes)
    return x


class KvOwner:
    def __init__(self, node: BudgetNode):
        self.node = node
        self.bytes = 0

    def extend(self, n):
        if self.node.try_consume(n):  # clean: added to bytes, close() releases all
            self.bytes += n
            return True
        return False

    def close(self):
        self.node.release_consumed(self.bytes)
        self.bytes = 0

    def would_fit(self, n):
        return self.node.try_consume(n)  # leak: a mere question, the bytes stay consumed
