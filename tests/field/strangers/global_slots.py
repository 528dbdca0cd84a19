"""Module-level state, as in scripts that grew into servers."""
import atexit


class SlotBank:
    def __init__(self, n):
        self.open = list(range(n))

    def get(self):
        return self.open.pop() if self.open else None

    def put(self, slot):
        self.open.append(slot)


_bank = SlotBank(16)
_by_user = {}
_last = None
_scratch = None
_settings = {"verbose": False}


def login(user):
    if user in _by_user:
        return True
    slot = _bank.get()  # clean: near miss, a module-level dict that logout and the exit hook empty
    if slot is None:
        return False
    _by_user[user] = slot
    return True


def logout(user):
    slot = _by_user.pop(user, None)
    if slot is not None:
        _bank.put(slot)


def _logout_all():
    global _last, _scratch
    for user in list(_by_user):
        logout(user)
    if _last is not None:
        _bank.put(_last)
        _last = None
    if _scratch is not None:
        _bank.put(_scratch)
        _scratch = None


atexit.register(_logout_all)


def touch(user):
    global _last
    if _settings.get("verbose"):
        print("touch", user)
    _last = _bank.get()  # leak: each touch overwrites the global slot of the one before
    return _last is not None


def scratch():
    global _scratch
    if _scratch is None:
        _scratch = _bank.get()  # clean: near miss, made once, put back by the exit hook
    return _scratch


def trade(user, other):
    if user not in _by_user:
        return
    mine = _by_user[user]
    theirs = _by_user.get(other)
    if theirs is None:
        theirs = _bank.get()  # clean: near miss, whoever had none gets one, both stay in the dict
        if theirs is None:
            return
    _by_user[user], _by_user[other] = theirs, mine


def rename(user, new):
    """The new name's slot is put back first."""
    if user == new or user not in _by_user:
        return
    logout(new)
    _by_user[new] = _by_user.pop(user)


def refresh(user):
    slot = _bank.get()  # leak: a user who is there already loses the old slot
    if slot is None:
        return False
    _by_user[user] = slot
    return True


def count_free():
    taken = []
    while (slot := _bank.get()) is not None:  # clean: near miss, counted, then all put back by a comprehension
        taken.append(slot)
    [_bank.put(s) for s in taken]
    return len(taken)


def count_even():
    taken = []
    while (slot := _bank.get()) is not None:  # leak: the odd ones are not in the list that is put back
        if slot % 2 == 0:
            taken.append(slot)
    for s in taken:
        _bank.put(s)
    return len(taken)
