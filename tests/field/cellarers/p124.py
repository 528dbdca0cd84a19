"""DMA channels of the board, kept in the state of this module."""
import threading

NUM_CHANNELS = 8
_lock = threading.Lock()
_owner = [None] * NUM_CHANNELS
_config = {}


def dma_request(name, priority=0):
    with _lock:
        for ch in range(NUM_CHANNELS):
            if _owner[ch] is None:
                _owner[ch] = name
                _config[ch] = {"priority": priority}
                return ch
    return None


def dma_configure(ch, **opts):
    _config[ch].update(opts)


def dma_release(ch):
    with _lock:
        _owner[ch] = None
        _config.pop(ch, None)


def copy_block(regs, src, dst, n):
    ch = dma_request("memcpy")  # clean: None falls back to the processor, otherwise finally
    if ch is None:
        dst[:n] = src[:n]
        return
    try:
        dma_configure(ch, width=4)
        regs.start(ch, src, dst, n)
        regs.wait(ch)
    finally:
        dma_release(ch)


class Uart:
    def __init__(self, regs):
        self.regs = regs
        self.rx = dma_request("uart-rx", 2)  # clean: released in shutdown()

    def shutdown(self):
        if self.rx is not None:
            dma_release(self.rx)
            self.rx = None

    def write(self, data):
        ch = dma_request("uart-tx")  # leak: a busy line returns 0 with the channel owned
        if ch is None:
            return 0
        if self.regs.busy():
            return 0
        self.regs.start(ch, data, None, len(data))
        self.regs.wait(ch)
        dma_release(ch)
        return len(data)

    def write_urgent(self, data):
        ch = dma_request("uart-urgent", 7)  # leak: started and never released
        if ch is not None:
            self.regs.start(ch, data, None, len(data))
