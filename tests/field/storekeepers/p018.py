class Address:
    def __init__(self, text):
        self.text = text
        self.owner = None


class AddressBook:
    def __init__(self, prefix, size):
        self.prefix = prefix
        self.available = [Address("%s.%d" % (prefix, i)) for i in range(2, size)]

    def lease(self, owner):
        address = self.available.pop(0)
        address.owner = owner
        return address

    def unlease(self, address):
        address.owner = None
        self.available.append(address)


class Gateway:
    def __init__(self, book):
        self.book = book
        self.groups = {}
        self.static = {}
        self.routes = 0

    def join(self, group, device):
        members = self.groups.setdefault(group, {})
        if device in members:
            return members[device].text
        address = self.book.lease(device)  # leak: disband deletes a whole group without unlease
        members[device] = address
        self.routes += 1
        return address.text

    def quit(self, group, device):
        members = self.groups.get(group, {})
        address = members.pop(device, None)
        if address is None:
            return False
        self.book.unlease(address)
        self.routes -= 1
        return True

    def disband(self, group):
        members = self.groups.pop(group, {})
        self.routes -= len(members)
        return sorted(members)

    def fix(self, site, device):
        per_site = self.static.setdefault(site, {})
        previous = per_site.pop(device, None)
        if previous is not None:
            self.book.unlease(previous)
        per_site[device] = self.book.lease(device)  # clean: previous one returned, retire returns all

    def retire(self, site):
        per_site = self.static.pop(site, {})
        for address in per_site.values():
            self.book.unlease(address)
        return len(per_site)

    def move(self, device, source, target):
        members = self.groups.get(source, {})
        if device in members and device not in self.groups.get(target, {}):
            self.groups.setdefault(target, {})[device] = members.pop(device)

    def ping(self, send):
        address = self.book.lease("gateway")  # clean: unleased below
        ok = send(address.text)
        self.book.unlease(address)
        return ok
