"""Activation offload on a side stream, with pinned blocks and a pool of CUDA events."""
from collections import deque

import torch


class EventPool:
    def __init__(self):
        self._spare = []

    def borrow(self):
        return self._spare.pop() if self._spare else torch.cuda.Event()

    def hand_in(self, event):
        self._spare.append(event)


class HostBlocks:
    """A fixed number of pinned blocks; reserve() says None when all are out."""

    def __init__(self, count, numel, dtype):
        self._free = deque(torch.empty(numel, dtype=dtype, pin_memory=True) for _ in range(count))
        self.numel = numel

    def reserve(self):
        return self._free.popleft() if self._free else None

    def release(self, block):
        self._free.append(block)


class Offloader:
    def __init__(self, blocks, events, min_numel=1 << 16):
        self.blocks = blocks
        self.events = events
        self.min_numel = min_numel
        self.stream = torch.cuda.Stream()
        self.inflight = deque()
        self.parked = {}
        self.mean_stall = 0.0
        self._next = 0

    def pack(self, tensor):
        """Saved-tensor hook: move a large activation to the host, keep the rest as it is."""
        if tensor.numel() < self.min_numel or tensor.numel() > self.blocks.numel or not tensor.is_cuda:
            return tensor
        done = self.events.borrow()  # leak: no block free, the tensor stays and the event is lost
        block = self.blocks.reserve()  # clean: near miss, parked with its record and released by unpack
        if block is None:
            return tensor
        view = block[:tensor.numel()].view(tensor.shape)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            view.copy_(tensor, non_blocking=True)
            tensor.record_stream(self.stream)
            done.record(self.stream)
        key, self._next = self._next, self._next + 1
        self.parked[key] = (block, done, tensor.shape, tensor.device)
        return key

    def unpack(self, saved):
        """Saved-tensor hook: bring an activation back; block and event of the record end here."""
        if not isinstance(saved, int):
            return saved
        block, done, shape, device = self.parked.pop(saved)
        torch.cuda.current_stream().wait_event(done)
        tensor = torch.empty(shape, dtype=block.dtype, device=device)
        tensor.copy_(block[:tensor.numel()].view(shape), non_blocking=True)
        torch.cuda.current_stream().synchronize()
        self.blocks.release(block)
        self.events.hand_in(done)
        return tensor

    def push_layers(self, layers, depth=2):
        """Copy the flat weights of each layer out, at most `depth` copies in flight."""
        written = []
        for index, flat in enumerate(layers):
            while len(self.inflight) >= depth:
                written.append(self._retire())
            block = self.blocks.reserve()  # clean: near miss, retired by the loop, by the last loop or waited for
            if block is None and self.inflight:
                written.append(self._retire())
                block = self.blocks.reserve()  # clean: near miss, as above, after one has retired
            if block is None:
                written.append((index, flat.cpu()))
                continue
            event = self.events.borrow()  # clean: near miss, goes with the block into the queue
            with torch.cuda.stream(self.stream):
                block[:flat.numel()].copy_(flat, non_blocking=True)
                event.record(self.stream)
            self.inflight.append((index, flat.numel(), block, event))
        while self.inflight:
            written.append(self._retire())
        written.sort(key=lambda pair: pair[0])
        return [data for _, data in written]

    def _retire(self):
        index, numel, block, event = self.inflight.popleft()
        event.synchronize()
        data = block[:numel].clone()
        self.blocks.release(block)
        self.events.hand_in(event)
        return index, data

    def pull_layers(self, sources, device, use):
        """Double-buffered upload: the copy of layer i+1 runs while `use` works on layer i."""
        if not sources:
            return 0
        largest = max(source.numel() for source in sources)
        if largest > self.blocks.numel:
            raise ValueError(f"a layer of {largest} elements does not fit a block of {self.blocks.numel}")
        front = self.blocks.reserve()  # leak: after an odd number of swaps only the other one is released
        back = self.blocks.reserve()  # leak: released only where the swaps ended on it
        if front is None or back is None:
            for block in (front, back):
                if block is not None:
                    self.blocks.release(block)
            for source in sources:
                use(source.to(device))
            return len(sources)
        front[:sources[0].numel()].copy_(sources[0])
        count = 0
        stalls = []
        for i, source in enumerate(sources):
            ready = self.events.borrow()  # clean: handed in at the end of the turn
            with torch.cuda.stream(self.stream):
                weights = front[:source.numel()].to(device, non_blocking=True)
                ready.record(self.stream)
            if i + 1 < len(sources):
                following = sources[i + 1]
                back[:following.numel()].copy_(following)
            torch.cuda.current_stream().wait_event(ready)
            if i % 16 == 0:
                mark = self.events.borrow()  # clean: handed in inside the branch
                mark.record()
                mark.synchronize()
                ready.synchronize()
                stalls.append(max(0.0, mark.elapsed_time(ready)))
                self.events.hand_in(mark)
            use(weights.view(source.shape))
            ready.synchronize()
            self.events.hand_in(ready)
            front, back = back, front
            count += 1
        self.blocks.release(front)
        self.mean_stall = sum(stalls) / len(stalls) if stalls else 0.0
        return count

    def snapshot(self, tensors, into):
        """Copy small tensors through one block each; those that do not fit are left out."""
        begun, finished = self.events.borrow(), None  # clean: handed in after the timing
        begun.record()
        missing = []
        for name, tensor in tensors.items():
            if (block := self.blocks.reserve()) is None:  # leak: an oversized tensor is skipped with the block held
                missing.append(name)
                break
            flat = tensor.detach().reshape(-1)
            if flat.numel() > block.numel():
                missing.append(name)
                continue
            block[:flat.numel()].copy_(flat)
            into[name] = block[:flat.numel()].clone().view(tensor.shape)
            self.blocks.release(block)
        finished = self.events.borrow()  # leak: only the first of the two events is handed in
        finished.record()
        finished.synchronize()
        into["__ms__"] = begun.elapsed_time(finished)
        self.events.hand_in(begun)
        return missing
