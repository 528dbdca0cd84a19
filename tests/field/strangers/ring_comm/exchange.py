import torch.distributed as dist

from .buffers import RingBuffers


class RingExchange:
    def __init__(self, shape, rank, world):
        self.buffers = RingBuffers(shape)
        self.rank = rank
        self.world = world
        self.recv = self.buffers.borrow()  # clean: near miss, swapped with send but both go back in shutdown
        self.send = self.buffers.borrow()  # clean: near miss, swapped with recv but both go back in shutdown

    def step(self, tensor):
        self.send.copy_(tensor)
        if self.world > 1:
            dist.send(self.send, (self.rank + 1) % self.world)
            dist.recv(self.recv, (self.rank - 1) % self.world)
        self.send, self.recv = self.recv, self.send
        return self.send

    def rotate(self, tensor, rounds):
        current = self.buffers.borrow()  # clean: near miss, each holder is given back before it is replaced
        current.copy_(tensor)
        for _ in range(rounds):
            incoming = self.buffers.borrow()  # clean: near miss, becomes current and is given back next round or after
            dist.recv(incoming, (self.rank - 1) % self.world)
            self.buffers.give_back(current)
            current = incoming
        total = float(current.sum())
        self.buffers.give_back(current)
        return total

    def gather_norms(self, tensor, peers):
        norms = []
        for peer in peers:
            if peer == self.rank:
                norms.append(float(tensor.norm()))
                continue
            buf = self.buffers.borrow()  # leak: a zero norm skips to the next peer while held
            dist.recv(buf, peer)
            norm = float(buf.norm())
            if norm == 0.0:
                continue
            norms.append(norm)
            self.buffers.give_back(buf)
        return norms

    def first_nonempty(self, peers):
        found = None
        for peer in peers:
            buf = self.buffers.borrow()  # leak: break leaves the loop with the buffer out
            dist.recv(buf, peer)
            if bool(buf.any()):
                found = peer
                break
            self.buffers.give_back(buf)
        return found

    def shutdown(self):
        self.buffers.give_back(self.send)
        self.buffers.give_back(self.recv)
