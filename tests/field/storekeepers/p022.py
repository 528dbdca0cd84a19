import json


class Mailbox:
    def __init__(self, number):
        self.number = number
        self.filter_id = 0


class CanController:
    """Hardware with a fixed set of mailboxes."""

    def __init__(self, count=16):
        self._boxes = [Mailbox(i) for i in range(count)]
        self._mask = 0

    def open_mailbox(self, filter_id):
        box = self._boxes.pop()
        box.filter_id = filter_id
        self._mask |= 1 << box.number
        return box

    def shut_mailbox(self, box):
        self._mask &= ~(1 << box.number)
        self._boxes.append(box)


CONTROLLER = CanController()


class Node:
    heartbeat = None
    listeners = {}
    count = 0

    def __init__(self, name, node_id):
        self.name = name
        self.node_id = node_id
        self.sdo = CONTROLLER.open_mailbox(0x600 + node_id)  # clean: leave shuts it
        self.pdo = []
        Node.count += 1

    @classmethod
    def start_heartbeat(cls, period):
        if cls.heartbeat is None:
            cls.heartbeat = CONTROLLER.open_mailbox(0x700)  # clean: stop_heartbeat shuts it
        return period / max(1, cls.count)

    @classmethod
    def stop_heartbeat(cls):
        box, cls.heartbeat = cls.heartbeat, None
        if box is not None:
            CONTROLLER.shut_mailbox(box)

    @classmethod
    def listen(cls, filter_id, handler):
        if filter_id in cls.listeners:
            return False
        box = CONTROLLER.open_mailbox(filter_id)  # leak: reset rebinds the class table to an empty one
        cls.listeners[filter_id] = (box, handler)
        return True

    @classmethod
    def reset(cls):
        cls.stop_heartbeat()
        cls.listeners = {}
        cls.count = 0

    def map_pdo(self, index):
        box = CONTROLLER.open_mailbox(0x180 + index)  # leak: leave clears the list without shutting
        self.pdo.append(box)
        return box.number

    def describe(self):
        return json.dumps({"name": self.name, "pdo": [b.filter_id for b in self.pdo]})

    def leave(self):
        self.pdo.clear()
        CONTROLLER.shut_mailbox(self.sdo)
        Node.count -= 1
