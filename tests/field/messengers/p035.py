"""Laser sources of an optics bench, with closures that switch them off."""
import functools


class LaserRack:
    def __init__(self, sources):
        self._dark = list(sources)
        self.shots = 0

    def ignite(self):
        return self._dark.pop()

    def extinguish(self, source):
        source.power = 0
        self._dark.append(source)


def lit(rack, power):
    source = rack.ignite()  # clean: handed on with the closure that ends it
    source.power = power

    def off():
        rack.extinguish(source)

    return source, off


def lit_for(rack, power):
    source = rack.ignite()  # clean: handed on inside the partial
    source.power = power
    return functools.partial(rack.extinguish, source)


def expose(rack, camera, power, seconds):
    source, off = lit(rack, power)  # clean: off is called
    image = camera.expose(source.wavelength, seconds)
    off()
    rack.shots += 1
    return image


def expose_series(rack, camera, powers):
    images = []
    for power in powers:
        source, off = lit(rack, power)  # leak: a saturated image breaks before off
        image = camera.expose(source.wavelength, 0.1)
        if camera.saturated(image):
            break
        images.append(image)
        off()
    return images


def dark_frame(rack, camera):
    off = lit_for(rack, 0)  # clean: called after the shot
    image = camera.expose(0, 1.0)
    off()
    return image


def wavelength(rack):
    source, _ = lit(rack, 1)  # leak: the closure is thrown away
    return source.wavelength


def align(rack, camera, limit):
    off = lit_for(rack, 2)  # clean: called on both ways
    drift = camera.drift()
    if drift > limit:
        off()
        return None
    camera.shift(-drift)
    off()
    return drift
