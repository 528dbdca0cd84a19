"""A simple fill-drain schedule over stages, with retries."""
import time


class FillDrain:
    def __init__(self, stages, tries=3):
        self.stages = stages
        self.tries = tries

    def run(self, batches):
        outs = []
        for mb, x in enumerate(batches):
            for st in self.stages:
                y = st.emit(mb, x)  # clean: near miss, the envelope is collected in the same turn, the last stage draws none
                x = st.collect(mb) if y is None else y
            outs.append(x)
        return outs

    def draw_retry(self, box):
        for n in range(self.tries):
            env = box.draw_now()  # clean: near miss, only a failed draw goes round again
            if env is not None:
                return env
            time.sleep(0.001 * (n + 1))
        return None

    def draw_clean(self, box):
        """An envelope whose data is finite."""
        for n in range(self.tries):
            env = box.draw_now()  # leak: an envelope with bad data is replaced by the next try without discard
            if env is not None and env.data.isfinite().all():
                return env
            time.sleep(0.001 * (n + 1))
        return None

    def draw_two(self, a, b):
        left = self.draw_retry(a)  # leak: not discarded when the right draw fails
        if left is None:
            return None
        right = self.draw_retry(b)  # clean: handed to the caller in the pair
        if right is None:
            return None
        return left, right

    def relay(self, a, b, fn):
        pair = self.draw_two(a, b)  # clean: near miss, unpacked and both discarded
        if pair is None:
            return None
        src, dst = pair
        dst.data.copy_(fn(src.data))
        out = dst.data.clone()
        for env in (src, dst):
            env.discard()
        return out

    def swap_first(self, st, values):
        env = self.draw_retry(st.box)  # leak: the empty value list returns before the discard
        if env is None or not len(values):
            return None
        env.data.copy_(values[0])
        top = float(env.data.max())
        env.discard()
        return top
