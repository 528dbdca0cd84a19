# all-to-all for expert parallelism, token buffers with credits
import logging
import threading

import torch
import torch.distributed as dist

log = logging.getLogger('a2a')


class CreditGate:
    """Flow control: a sender needs a credit for each peer."""

    def __init__(self, peers, credits):
        self._c = [credits] * peers
        self._mx = threading.Lock()

    def get_credit(self, peer):
        with self._mx:
            if self._c[peer] == 0:
                return False
            self._c[peer] -= 1
            return True

    def put_credit(self, peer):
        with self._mx:
            self._c[peer] += 1


class TokenBuffers:
    def __init__(self, n, tokens, dim):
        self.mem = torch.empty(n, tokens, dim)
        self.ids = set(range(n))

    def borrow_buf(self):
        if self.ids:
            return self.ids.pop()
        return None

    def give_back_buf(self, i):
        self.ids.add(i)


class AllToAll:
    def __init__(self, gate, bufs, group=None):
        self.gate = gate
        self.bufs = bufs
        self.group = group

    def send(self, peer, tokens):
        if not self.gate.get_credit(peer):  # clean: near miss, put back whether or not a buffer was found
            return False
        buf = self.bufs.borrow_buf()  # clean: given back after the send
        if buf is None:
            self.gate.put_credit(peer)
            return False
        self.bufs.mem[buf, :tokens.shape[0]].copy_(tokens)
        dist.send(self.bufs.mem[buf], dst=peer)
        self.bufs.give_back_buf(buf)
        self.gate.put_credit(peer)
        return True

    def send_fast(self, peer, tokens):
        if not self.gate.get_credit(peer):  # leak: no buffer means a return with the credit spent
            return False
        buf = self.bufs.borrow_buf()  # clean: given back after the send
        if buf is None:
            return False
        self.bufs.mem[buf, :tokens.shape[0]].copy_(tokens)
        dist.send(self.bufs.mem[buf], dst=peer)
        self.bufs.give_back_buf(buf)
        self.gate.put_credit(peer)
        return True

    def send_reversed(self, peer, tokens):
        buf = self.bufs.borrow_buf()  # leak: without a credit the buffer is not given back
        if buf is None:
            return False
        if self.gate.get_credit(peer):  # clean: put back inside the branch
            self.bufs.mem[buf, :tokens.shape[0]].copy_(tokens)
            dist.send(self.bufs.mem[buf], dst=peer)
            self.gate.put_credit(peer)
            self.bufs.give_back_buf(buf)
            return True
        return False

    def scatter(self, chunks):
        taken = {}
        for peer, c in chunks.items():
            buf = self.bufs.borrow_buf()  # clean: near miss, the shortage gives all taken ones back before the raise
            if buf is None:
                for b in taken.values():
                    self.bufs.give_back_buf(b)
                raise RuntimeError('token buffers exhausted')
            self.bufs.mem[buf, :c.shape[0]].copy_(c)
            taken[peer] = buf
        works = [dist.isend(self.bufs.mem[b], dst=p) for p, b in taken.items()]
        for w in works:
            w.wait()
        for b in taken.values():
            self.bufs.give_back_buf(b)

    def scatter_unchecked(self, chunks):
        taken = {}
        for peer, c in chunks.items():
            buf = self.bufs.borrow_buf()  # leak: the raise on a shortage abandons those in the mapping
            if buf is None:
                raise RuntimeError('token buffers exhausted')
            self.bufs.mem[buf, :c.shape[0]].copy_(c)
            taken[peer] = buf
        for p, b in taken.items():
            dist.send(self.bufs.mem[b], dst=p)
            self.bufs.give_back_buf(b)

    def gather(self, peers):
        recv = {p: self.bufs.borrow_buf() for p in peers}  # leak: the local rank's buffer is popped out and not given back
        recv.pop(dist.get_rank(self.group), None)
        out = []
        for p, b in recv.items():
            dist.recv(self.bufs.mem[b], src=p)
            out.append(self.bufs.mem[b].clone())
        for b in recv.values():
            self.bufs.give_back_buf(b)
        return out

    def gather_remote(self, peers):
        me = dist.get_rank(self.group)
        recv = {p: self.bufs.borrow_buf() for p in peers if p != me}  # clean: near miss, the local rank never borrows
        out = []
        while recv:
            p, b = recv.popitem()
            dist.recv(self.bufs.mem[b], src=p)
            out.append(self.bufs.mem[b].clone())
            self.bufs.give_back_buf(b)
        return out

    def ping(self, peers):
        alive = 0
        for p in peers:
            if self.gate.get_credit(p):  # leak: the credit is taken as a probe and kept
                alive += 1
        return alive

    def ping_back(self, peers):
        alive = 0
        for p in peers:
            if self.gate.get_credit(p):  # clean: near miss, the probe puts its credit back
                alive += 1
                self.gate.put_credit(p)
        return alive
