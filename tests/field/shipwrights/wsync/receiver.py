import torch.distributed as dist


class WeightReceiver:
    def __init__(self, model, store, channels, src=0):
        self.model = model
        self.store = store
        self.channels = channels
        self.src = src
        self.current = None

    def pull(self):
        """Receives a version and makes it the current one."""
        with self.channels.on_air(timeout=5.0) as ch:  # clean: tuned out on leaving
            if ch is None:
                return False
            flat = self.store.compose()  # clean: published below
            if flat is None:
                return False
            dist.broadcast(flat, self.src, group=ch.group)
        no = self.store.publish(flat)
        self.switch(no)
        return True

    def switch(self, no):
        v = self.store.open(no)  # clean: near miss, the former current is shut
        former, self.current = self.current, v
        if former is not None:
            self.store.shut(former)
        at = 0
        for p in self.model.parameters():
            p.data.view(-1).copy_(v.flat[at : at + p.numel()])
            at += p.numel()

    def differs(self, no):
        other = self.store.open(no)  # leak: the reference stays when there is no current version
        if self.current is None:
            return True
        same = bool((other.flat == self.current.flat).all())
        self.store.shut(other)
        return not same

    def close(self):
        if self.current is not None:
            self.store.shut(self.current)
            self.current = None
