from collections import defaultdict, deque


class Plate:
    def __init__(self, serial):
        self.serial = serial
        self.image = None


class PlateRack:
    def __init__(self, n):
        self.clean = deque(Plate(i) for i in range(n))

    def pick(self):
        return self.clean.popleft()

    def wash(self, plate):
        plate.image = None
        self.clean.append(plate)


class Press:
    def __init__(self, rack, colors):
        self.rack = rack
        self.colors = colors
        self.waiting = defaultdict(deque)
        self.mounted = {}
        self.proof = None

    def burn(self, color, image):
        plate = self.rack.pick()  # leak: mount puts the plate over one still mounted
        plate.image = image
        self.waiting[color].append(plate)

    def mount(self):
        if not all(self.waiting[c] for c in self.colors):
            return False
        for color in self.colors:
            self.mounted[color] = self.waiting[color].popleft()
        return True

    def unmount(self):
        while self.mounted:
            _, plate = self.mounted.popitem()
            self.rack.wash(plate)

    def make_proof(self, image):
        if self.proof is None:
            self.proof = self.rack.pick()  # clean: close washes it
        self.proof.image = image

    def test_ink(self, image, look):
        plate = self.rack.pick()  # clean: washed below
        plate.image = image
        result = look(plate)
        self.rack.wash(plate)
        return result

    def close(self):
        self.unmount()
        for plates in self.waiting.values():
            while plates:
                self.rack.wash(plates.pop())
        if self.proof is not None:
            self.rack.wash(self.proof)
            self.proof = None


class Stitcher:
    def __init__(self, rack):
        self.rack = rack
        self.covers = deque()

    def prepare(self, images):
        for image in images:
            plate = self.rack.pick()  # leak: finish breaks off at the first plate without an image
            plate.image = image
            self.covers.append(plate)

    def finish(self):
        used = 0
        while self.covers:
            plate = self.covers.popleft()
            if not plate.image:
                break
            self.rack.wash(plate)
            used += 1
        self.covers = deque()
        return used
