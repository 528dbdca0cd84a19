import os
import zlib

import torch

from .pack import as_bytes, pack_group, pack_header, quantized


class ShardWriter:
    def __init__(self, arena, root, rank):
        self.arena = arena
        self.root = root
        self.rank = rank
        self.sums = {}

    def write_large(self, sink, name, tensor):
        """Stream one tensor in blocks; the last, shorter block goes after the loop."""
        raw = as_bytes(tensor)
        size = self.arena.block_bytes
        full, rest = divmod(raw.numel(), size)
        crc = 0
        stage = None
        for i in range(full):
            stage = self.arena.checkout()  # clean: checked in before the next turn
            stage.copy_(raw[i * size:(i + 1) * size])
            data = stage.numpy()
            crc = zlib.crc32(data, crc)
            sink.write(data)
            self.arena.checkin(stage)
        if rest:
            stage = self.arena.checkout()  # leak: the remainder's block is never checked in
            stage[:rest].copy_(raw[full * size:])
            data = stage[:rest].numpy()
            crc = zlib.crc32(data, crc)
            sink.write(data)
        self.sums[name] = crc
        return full + bool(rest)

    def write_small(self, sink, groups):
        """Groups of small tensors, a block for each; the next group is packed while one is written."""
        groups = iter(groups)
        first = next(groups, None)
        if first is None:
            return 0
        written = 0
        block, used = pack_group(self.arena, first)  # clean: near miss, checked in by the loop or after it
        for group in groups:
            ahead, ahead_used = pack_group(self.arena, group)  # clean: near miss, moves into block
            sink.write(block[:used].numpy())
            written += used
            self.arena.checkin(block)
            block, used = ahead, ahead_used
        sink.write(block[:used].numpy())
        written += used
        self.arena.checkin(block)
        return written

    def write_shard(self, step, model_state, optim_state, compress=()):
        target = os.path.join(self.root, f"step{step:08d}", f"rank{self.rank:04d}.shard")
        os.makedirs(os.path.dirname(target), exist_ok=True)
        names = list(model_state)
        sizes = [t.numel() * t.element_size() for t in model_state.values()]
        widest = max(sizes, default=0)
        if widest > 64 * self.arena.block_bytes:
            names.sort(key=lambda n: model_state[n].numel())
            sizes = [model_state[n].numel() * model_state[n].element_size() for n in names]
        header = pack_header(self.arena, names, sizes)
        if header is None:
            raise ValueError(f"{len(names)} names do not fit one header block")
        small = [n for n, s in zip(names, sizes) if s <= self.arena.block_bytes // 8 and n not in compress]
        with open(target + ".tmp", "wb") as sink:  # clean: context manager
            sink.write(header)
            for name in names:
                if name in compress:
                    view, scale = quantized(self.arena, model_state[name])  # clean: near miss, base checked in
                    if view is None:
                        continue
                    sink.write(view.numpy())
                    self.sums[name] = scale
                    self.arena.checkin(view._base)
                elif name not in small:
                    self.write_large(sink, name, model_state[name])
            per = 8
            batches = [small[i:i + per] for i in range(0, len(small), per)]
            self.write_small(sink, ([model_state[n] for n in batch] for batch in batches))
            sink.flush()
            os.fsync(sink.fileno())
        moments = {}
        for key, entry in optim_state.items():
            exp_avg, exp_sq = entry["exp_avg"], entry["exp_avg_sq"]
            packed, used = pack_group(self.arena, (exp_avg, exp_sq))  # leak: cloned into the table and dropped
            half = used // 2
            moments[key] = (packed[:half].clone(), packed[half:used].clone())
            if key in compress:
                coded, scale = quantized(self.arena, exp_sq)  # leak: only the copy of the view is kept
                if coded is not None:
                    moments[key] = (moments[key][0], coded.to(torch.int16).mul_(2), scale)
        index = self.arena.checkout()  # clean: near miss, checked in before the sums are compared
        lines = "\n".join(f"{n} {self.sums.get(n, 0)}" for n in names).encode()
        used = min(len(lines), self.arena.block_bytes)
        index[:used] = torch.frombuffer(bytearray(lines[:used]), dtype=torch.uint8)
        with open(target + ".sums", "wb") as sums:  # clean: context manager
            sums.write(index[:used].numpy())
        self.arena.checkin(index)
        if used < len(lines):
            self.sums["__cut__"] = len(lines) - used
        torch.save(moments, target + ".opt")
        os.replace(target + ".tmp", target)
        return target

    def digest(self, state):
        """Checksum of a state in block-sized pieces, without waiting for the writer's blocks."""
        block = self.arena.try_checkout()  # clean: near miss, None needs no checkin
        crc = 0
        for name in sorted(state):
            raw = as_bytes(state[name])
            if block is None:
                crc = zlib.crc32(raw.cpu().numpy(), crc)
                continue
            for piece in raw.split(self.arena.block_bytes):
                block[:piece.numel()].copy_(piece)
                crc = zlib.crc32(block[:piece.numel()].numpy(), crc)
        if block is not None:
            self.arena.checkin(block)
        return crc
