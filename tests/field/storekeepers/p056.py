import itertools

_mailboxes = []
_dead = []
_ids = itertools.count(1)


class Mailbox:
    def __init__(self, size):
        self.items = []
        self.size = size
        self.owner = None


class MailboxStore:
    def __init__(self, count, size):
        self.store = [Mailbox(size) for _ in range(count)]

    def give_out(self):
        return self.store.pop()

    def get_back(self, box):
        box.items.clear()
        box.owner = None
        self.store.append(box)


store = MailboxStore(64, 16)


def spawn(behaviour):
    box = store.give_out()  # leak: reap empties the list of dead ones without get_back
    box.owner = next(_ids)
    _mailboxes.append((box, behaviour))
    return box.owner


def send(owner, message):
    for box, _ in _mailboxes:
        if box.owner == owner and len(box.items) < box.size:
            box.items.append(message)
            return True
    return False


def run_once():
    for entry in list(_mailboxes):
        box, behaviour = entry
        while box.items:
            if behaviour(box.items.pop(0)) == "stop":
                _mailboxes.remove(entry)
                _dead.append(box)
                break


def reap():
    unread = sum(len(box.items) for box in _dead)
    del _dead[:]
    return unread


def ask(owner, question, answer_of):
    box = store.give_out()  # clean: given back before return
    send(owner, (question, box))
    answer = answer_of(box.items)
    store.get_back(box)
    return answer


class Supervisor:
    def __init__(self):
        self.inbox = store.give_out()  # clean: stop gives it back
        self.children = []

    def supervise(self, behaviour):
        self.children.append((store.give_out(), behaviour))  # clean: stop gives every child's back

    def deliver(self, message):
        for box, behaviour in self.children:
            if behaviour(message):
                box.items.append(message)

    def stop(self):
        for box, _ in self.children:
            store.get_back(box)
        self.children = []
        store.get_back(self.inbox)
