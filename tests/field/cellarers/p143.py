import numpy as np


class HugePages:
    def __init__(self, per_node):
        self.free = np.array(per_node, dtype=np.int64)
        self.reserved = np.zeros_like(self.free)

    def set_aside(self, node, pages):
        if self.free[node] < pages:
            return False
        self.free[node] -= pages
        self.reserved[node] += pages
        return True

    def give_up(self, node, pages):
        self.reserved[node] -= pages
        self.free[node] += pages


class Guest:
    def __init__(self, hp, node, pages):
        self.hp = hp
        self.node = node
        self.pages = pages
        self.backed = False

    def boot(self):
        self.backed = self.hp.set_aside(self.node, self.pages)  # clean: given up by poweroff()
        return self.backed

    def poweroff(self):
        if self.backed:
            self.hp.give_up(self.node, self.pages)
            self.backed = False


def migrate(hp, src, dst, pages, copy):
    if not hp.set_aside(dst, pages):  # leak: a failed copy returns with the target's pages set aside
        return False
    if not copy(src, dst, pages):
        return False
    hp.give_up(src, pages)
    return True


def scrub(hp, node, pages, zero):
    if hp.set_aside(node, pages):  # clean: given up in the same branch
        zero(node, pages)
        hp.give_up(node, pages)


def spread(hp, pages, fn):
    done = 0
    for node in range(len(hp.free)):
        if not hp.set_aside(node, pages):  # clean: not given on continue, otherwise given up in finally
            continue
        try:
            fn(node)
            done += 1
        finally:
            hp.give_up(node, pages)
    return done


def stress(hp, node, pages, fn):
    if hp.set_aside(node, pages):  # leak: given up only after a run without errors
        errors = fn(node)
        if not errors:
            hp.give_up(node, pages)
