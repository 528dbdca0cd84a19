"""Dispatch lanes for expert parallelism: a lease is a mask of several bits."""


class LaneField:
    def __init__(self, width=64):
        self.width = width
        self.idle = (1 << width) - 1

    def take_lanes(self, n):
        if self.idle.bit_count() < n:
            return 0
        mask = 0
        for _ in range(n):
            bit = self.idle & -self.idle
            mask |= bit
            self.idle &= ~bit
        return mask

    def untake(self, mask):
        self.idle |= mask


class A2aDispatcher:
    def __init__(self, field: LaneField, nic):
        self.field = field
        self.nic = nic

    def dispatch(self, tokens, fanout):
        mask = self.field.take_lanes(fanout)  # clean: untaken in finally
        if not mask:
            return False
        try:
            self.nic.post_mask(mask, tokens)
            self.nic.wait(mask)
            return True
        finally:
            self.field.untake(mask)

    def dispatch_sparse(self, tokens, fanout):
        mask = self.field.take_lanes(fanout)  # leak: no routed tokens, returns with the lanes
        if mask == 0:
            return 0
        if not tokens.routed:
            return 0
        self.nic.post_mask(mask, tokens)
        self.nic.wait(mask)
        self.field.untake(mask)
        return fanout

    def begin(self, tokens):
        self.mask = self.field.take_lanes(4)  # clean: end() gives them back
        self.nic.post_mask(self.mask, tokens)

    def end(self):
        self.nic.wait(self.mask)
        self.field.untake(self.mask)
        self.mask = 0

    def widen(self, tokens):
        mask = self.field.take_lanes(2)  # leak: overwritten when the tokens are many
        if len(tokens) > 4096:
            mask = self.field.take_lanes(8)  # clean: untaken below
        self.nic.post_mask(mask, tokens)
        self.field.untake(mask)
