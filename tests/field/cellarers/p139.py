from dataclasses import dataclass


@dataclass
class Voice:
    number: int
    playing: bool = False
    gain: float = 0.0
    reserved: bool = False


class Mixer:
    def __init__(self, n=32):
        self.voices = [Voice(i) for i in range(n)]

    def get_voice(self, gain=1.0):
        idle = next((v for v in self.voices if not v.reserved), None)
        if idle is None:
            return None
        idle.reserved = True
        idle.gain = gain
        return idle

    def free_voice(self, voice):
        voice.playing = False
        voice.gain = 0.0
        voice.reserved = False


class SoundSystem:
    def __init__(self, mixer, bank):
        self.mixer = mixer
        self.bank = bank
        self.music = None

    def start_music(self, track):
        if self.music is None:
            self.music = self.mixer.get_voice(0.6)  # clean: kept, freed by stop_music()
            self.bank.play(self.music, track)

    def stop_music(self):
        if self.music is not None:
            self.mixer.free_voice(self.music)
            self.music = None

    def blip(self, name):
        voice = self.mixer.get_voice()  # clean: freed once the sample has been mixed
        if voice is not None:
            self.bank.mix_now(voice, name)
            self.mixer.free_voice(voice)

    def say(self, line):
        voice = self.mixer.get_voice(0.9)  # leak: a line without a recording returns with the voice reserved
        if voice is None:
            return 0.0
        clip = self.bank.find(line)
        if clip is None:
            return 0.0
        seconds = self.bank.mix_now(voice, clip)
        self.mixer.free_voice(voice)
        return seconds

    def loudest(self, names):
        best = None
        for name in names:
            voice = self.mixer.get_voice()  # leak: the loop never frees the voices it measures with
            level = self.bank.measure(voice, name)
            if best is None or level > best[0]:
                best = (level, name)
        return best
