"""CUDA streams of two priorities, taken in turn."""
import torch


class StreamDeck:
    HIGH, NORMAL = -1, 0

    def __init__(self, per_level=4):
        self.free = {
            level: [torch.cuda.Stream(priority=level) for _ in range(per_level)]
            for level in (self.HIGH, self.NORMAL)
        }
        self.level_of = {s.cuda_stream: lv for lv, ss in self.free.items() for s in ss}

    def deal(self, level=NORMAL):
        bucket = self.free[level] or self.free[self.NORMAL]
        if not bucket:
            return None
        return bucket.pop(0)

    def fold(self, stream):
        self.free[self.level_of[stream.cuda_stream]].append(stream)


class Prefetcher:
    def __init__(self, deck, loader):
        self.deck = deck
        self.loader = iter(loader)
        self.stream = deck.deal(StreamDeck.HIGH)  # clean: stored, folded by shutdown

    def next(self):
        batch = next(self.loader, None)
        if batch is None or self.stream is None:
            return batch
        with torch.cuda.stream(self.stream):
            return batch.cuda(non_blocking=True)

    def shutdown(self):
        if self.stream is not None:
            self.deck.fold(self.stream)


def copy_async(deck, src, dst):
    stream = deck.deal()  # clean: folded after the wait
    if stream is None:
        dst.copy_(src)
        return
    with torch.cuda.stream(stream):
        dst.copy_(src, non_blocking=True)
    stream.synchronize()
    deck.fold(stream)


def overlap(deck, a, b):
    left = deck.deal()  # leak: kept when there is no second stream
    if left is None:
        return False
    right = deck.deal()  # clean: folded below
    if right is None:
        return False
    for stream, work in ((left, a), (right, b)):
        with torch.cuda.stream(stream):
            work()
        stream.synchronize()
    deck.fold(left)
    deck.fold(right)
    return True
