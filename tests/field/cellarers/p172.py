class CanController:
    MAILBOXES = 3
    FILTERS = 14

    def __init__(self, regs):
        self.regs = regs
        self.tx_busy = 0b000
        self.filter_on = 0

    def take_mailbox(self):
        for box in range(self.MAILBOXES):
            if not self.tx_busy >> box & 1:
                self.tx_busy |= 1 << box
                return box
        return None

    def free_mailbox(self, box):
        self.tx_busy &= ~(1 << box)

    def add_filter(self, can_id, mask):
        for bank in range(self.FILTERS):
            if not self.filter_on >> bank & 1:
                self.filter_on |= 1 << bank
                self.regs.filter(bank, can_id, mask)
                return bank
        return None

    def remove_filter(self, bank):
        self.filter_on &= ~(1 << bank)


def send(can, frame):
    box = can.take_mailbox()  # clean: freed in finally
    if box is None:
        return False
    try:
        can.regs.transmit(box, frame)
        return can.regs.wait_sent(box)
    finally:
        can.free_mailbox(box)


def send_if_bus_on(can, frame):
    box = can.take_mailbox()  # leak: on a bus that is off the mailbox stays busy
    if box is None or can.regs.bus_off():
        return False
    can.regs.transmit(box, frame)
    can.free_mailbox(box)
    return True


def request(can, frame, answer_id):
    bank = can.add_filter(answer_id, 0x7FF)  # leak: the answer is returned with the filter on
    if bank is None:
        return None
    if send(can, frame):
        return can.regs.receive(bank)
    can.remove_filter(bank)
    return None


def listen(can, can_id, seconds):
    bank = can.add_filter(can_id, 0x7FF)  # clean: removed where one was free
    frames = []
    if bank is not None:
        frames = can.regs.collect(bank, seconds)
        can.remove_filter(bank)
    return frames
