# Port of the C++ broker, keep method names in sync with broker.h
import sys, threading, logging
import torch

FLAG_NONE = 0
FLAG_ZERO = 1
FLAG_OWN  = 2


class BufferBroker:
    def __init__(self, nBuffers, nElems):
        self.freeHead = 0
        self.next = [i + 1 for i in range(nBuffers)]
        self.next[-1] = -1
        self.mem = torch.empty(nBuffers, nElems)
        self.nElems = nElems

    def ObtainBuffer(self, flags=FLAG_NONE):
        idx = self.freeHead
        if idx < 0:
            return -1
        self.freeHead = self.next[idx]
        if flags & FLAG_ZERO:
            self.mem[idx].zero_()
        return idx

    def RecycleBuffer(self, idx):
        self.next[idx] = self.freeHead
        self.freeHead = idx

    def Data(self, idx):
        return self.mem[idx]


class Message:
    def __init__(self, broker, idx, flags):
        self.broker = broker
        self.idx = idx
        self.flags = flags

    def Dispose(self):
        if self.flags & FLAG_OWN and self.idx >= 0:
            self.broker.RecycleBuffer(self.idx)
            self.idx = -1


class Endpoint:
    def __init__(self, broker, rank):
        self.broker = broker
        self.rank = rank
        self.outbox = []
        self.last = None
        self.mtx = threading.Lock()

    def MakeMessage(self, payload):
        idx = self.broker.ObtainBuffer(FLAG_ZERO)  # clean: the message owns it, Dispose recycles
        if idx < 0:
            return None
        self.broker.Data(idx)[: payload.numel()] = payload.flatten()
        return Message(self.broker, idx, FLAG_OWN)

    def Echo(self, payload):
        idx = self.broker.ObtainBuffer()  # leak: the message lacks FLAG_OWN, its Dispose does nothing
        if idx < 0:
            return 0
        self.broker.Data(idx)[: payload.numel()] = payload.flatten()
        msg = Message(self.broker, idx, FLAG_NONE)
        n = self.broker.Data(msg.idx)[: payload.numel()].sum().item()
        msg.Dispose()
        return n

    def Reflect(self, payload):
        idx = self.broker.ObtainBuffer()  # clean: near miss, FLAG_OWN is among the flags
        if idx < 0:
            return 0
        self.broker.Data(idx)[: payload.numel()] = payload.flatten()
        msg = Message(self.broker, idx, FLAG_ZERO | FLAG_OWN)
        n = self.broker.Data(msg.idx)[: payload.numel()].sum().item()
        msg.Dispose()
        return n

    def Send(self, payload):
        msg = self.MakeMessage(payload)  # clean: None-checked and disposed
        if msg is None:
            return 0
        n = self.broker.Data(msg.idx).count_nonzero().item()
        msg.Dispose()
        return n

    def SendTo(self, payload, dst):
        msg = self.MakeMessage(payload)  # leak: a message to the own rank returns without Dispose
        if msg is None:
            return 0
        if dst == self.rank:
            return payload.numel()
        n = self.broker.Data(msg.idx).count_nonzero().item()
        msg.Dispose()
        return n

    def Post(self, payload):
        msg = self.MakeMessage(payload)  # clean: near miss, the outbox takes it, Flush disposes all
        if msg is not None:
            self.outbox.append(msg)
        return msg is not None

    def Flush(self):
        n = 0
        for msg in self.outbox:
            n += 1
            msg.Dispose()
        del self.outbox[:]
        return n

    def Remember(self, payload):
        self.last = self.MakeMessage(payload)  # leak: the message remembered before is overwritten, RememberAll shows it

    def RememberAll(self, payloads):
        for p in payloads:
            self.Remember(p)

    def Forget(self):
        if self.last is not None:
            self.last.Dispose()
        self.last = None

    def Copy(self, src):
        dst = self.broker.ObtainBuffer()  # clean: near miss, minus one is not a buffer
        if dst == -1:
            return None
        self.broker.Data(dst).copy_(self.broker.Data(src))
        out = self.broker.Data(dst).clone()
        self.broker.RecycleBuffer(dst)
        return out

    def Exchange(self, a, b):
        tmp = self.broker.ObtainBuffer()  # leak: equal indices return early
        if tmp < 0:
            return False
        if a == b:
            return True
        d = self.broker.Data
        d(tmp).copy_(d(a)); d(a).copy_(d(b)); d(b).copy_(d(tmp))
        self.broker.RecycleBuffer(tmp)
        return True

    def Swap(self, a, b):
        if a == b: return True
        tmp = self.broker.ObtainBuffer()  # clean: near miss, equal indices return before it
        if tmp < 0: return False
        d = self.broker.Data
        d(tmp).copy_(d(a)); d(a).copy_(d(b)); d(b).copy_(d(tmp))
        self.broker.RecycleBuffer(tmp)
        return True

    def Reduce(self, payloads):
        acc = self.broker.ObtainBuffer(FLAG_ZERO)  # clean: recycled after the loop, also when it is left early
        if acc < 0:
            return None
        for p in payloads:
            if p.numel() > self.broker.nElems:
                logging.error("payload too large")
                break
            self.broker.Data(acc)[: p.numel()] += p.flatten()
        res = self.broker.Data(acc).clone()
        self.broker.RecycleBuffer(acc)
        return res

    def ReduceAll(self, payloads):
        ids = []
        for p in payloads:
            idx = self.broker.ObtainBuffer()  # leak: idx of an oversized payload is not in ids
            if idx < 0:
                break
            if p.numel() > self.broker.nElems:
                sys.stderr.write("payload too large\n")
                continue
            self.broker.Data(idx)[: p.numel()] = p.flatten()
            ids.append(idx)
        res = sum(float(self.broker.Data(i).sum()) for i in ids)
        for i in ids:
            self.broker.RecycleBuffer(i)
        return res

    def Locked(self, payload):
        self.mtx.acquire()  # leak: a failed Post returns before release
        if not self.Post(payload):
            return -1
        n = len(self.outbox)
        self.mtx.release()
        return n

    def Drain(self, keep):
        # all but the newest `keep` messages
        while len(self.outbox) > keep:
            self.outbox.pop(0).Dispose()


def Ping(ep):
    return ep.MakeMessage(torch.ones(1)) is not None  # leak: the message is only compared


def Pong(ep):
    m = ep.MakeMessage(torch.ones(1))  # clean: disposed when there is one
    if m: m.Dispose()
    return bool(m)
