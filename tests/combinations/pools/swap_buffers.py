# take: P.get_swap_buffer(n)
# give: P.free_swap_buffer(X.index)
# gets: optional
# type: SwapBufferManager
import threading


class SwapBuffer:
    def __init__(self, index, numel):
        self.index = index
        self.numel = numel
        self.used_numel = 0
        self.in_use = False


class SwapBufferManager:
    """Optimizer-state swapping (ZeRO-Infinity manner)."""

    def __init__(self, num_elems, count):
        self.num_elems = num_elems
        self.all_buffers = [SwapBuffer(i, num_elems) for i in range(count)]
        self.lock = threading.Lock()
        self.gauge_used = 0
        self.max_gauge_used = 0

    def get_swap_buffer(self, numel):
        assert numel <= self.num_elems, f"{numel} is larger than a swap buffer"
        with self.lock:
            for buf in self.all_buffers:
                if not buf.in_use:
                    buf.in_use = True
                    buf.used_numel = numel
                    self.gauge_used += 1
                    self.max_gauge_used = max(self.max_gauge_used, self.gauge_used)
                    return buf
        return None

    def free_swap_buffer(self, index):
        with self.lock:
            buf = self.all_buffers[index]
            assert buf.in_use, f"swap buffer {index} is free already"
            buf.in_use = False
            buf.used_numel = 0
            self.gauge_used -= 1
