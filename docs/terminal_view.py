"""What a terminal shows, as a page for a browser: text with the escape sequences that colour it."""

import html
import re
from collections import Counter

State = dict[str, str]
"""The colours, `front` and `back`, and the flags that hold."""

SEQUENCE = re.compile(r"\x1b\[([0-9;:]*)m")
NORMAL = ("#2b3038", "#ff8a80", "#5fc389", "#f2bd63", "#8ab4ff", "#d3a4ff", "#6fd3d3", "#d8dce3")
BRIGHT = ("#5c6675", "#ffa79f", "#8be0ad", "#ffd58a", "#adcbff", "#e2c2ff", "#9be6e6", "#ffffff")
PALETTE = NORMAL + BRIGHT
BACKGROUND, FOREGROUND = "#14171c", "#d8dce3"
FLAGS = {1: "bold", 2: "dim", 3: "italic", 4: "underline", 7: "reverse"}
OFF = {22: ("bold", "dim"), 23: ("italic",), 24: ("underline",), 27: ("reverse",)}
STYLES = {
    "bold": "font-weight:700",
    "dim": "color:#8d96a5",
    "italic": "font-style:italic",
    "underline": "text-decoration:underline",
}
PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; padding: 1.2rem 1.5rem; background: {background}; color: {foreground}; }}
pre {{ margin: 0; font: 14px/{leading} "DejaVu Sans Mono", ui-monospace, monospace; }}
</style><pre>{text}</pre>"""


def page(text: str, *, leading: float = 1.4) -> str:
    """The whole page, on the ground that most of the text has."""
    pieces, state, grounds = [], State(), Counter[str]()
    for number, piece in enumerate(SEQUENCE.split(text)):
        if number % 2:
            state = _after(state, piece)
        elif piece:
            pieces.append((piece, state))
            grounds[state.get("back", BACKGROUND)] += len(piece)
    ground = grounds.most_common(1)[0][0] if grounds else BACKGROUND
    shown = "".join(_span(piece, its, ground) for piece, its in pieces)
    return PAGE.format(text=shown, background=ground, foreground=FOREGROUND, leading=leading)


def _span(text: str, state: State, ground: str) -> str:
    styles = [STYLES[name] for name in state if name in STYLES]
    front, back = state.get("front", FOREGROUND), state.get("back", ground)
    if "reverse" in state:
        front, back = back, front
    if front != FOREGROUND:
        styles.append(f"color:{front}")
    if back != ground:  # a needless one would cover the descenders of the line above
        styles.append(f"background:{back}")
    plain = html.escape(text)
    return f'<span style="{";".join(styles)}">{plain}</span>' if styles else plain


def _after(state: State, sequence: str) -> State:
    """The colours and flags that hold behind a sequence."""
    state = State(state)
    codes = [int(code.partition(":")[0] or 0) for code in sequence.split(";")]
    while codes:
        code = codes.pop(0)
        if code == 0:
            state.clear()
        elif code in FLAGS:
            state[FLAGS[code]] = ""
        elif code in OFF:
            for name in OFF[code]:
                state.pop(name, None)
        elif code in (38, 48):
            state["front" if code == 38 else "back"] = _chosen(codes)
        elif code in (39, 49):
            state.pop("front" if code == 39 else "back", None)
        elif 30 <= code <= 47 or 90 <= code <= 107:
            place = "front" if code in range(30, 38) or code in range(90, 98) else "back"
            state[place] = PALETTE[code % 10 + (8 if code >= 90 else 0)]
    return state


def _chosen(codes: list[int]) -> str:
    """The colour that follows 38 or 48: of the palette of 256, or red, green and blue."""
    kind = codes.pop(0)
    if kind == 2:
        red, green, blue = (codes.pop(0) for _ in range(3))
        return f"#{red:02x}{green:02x}{blue:02x}"
    number = codes.pop(0)
    if number < 16:
        return PALETTE[number]
    if number >= 232:
        return "#" + f"{8 + 10 * (number - 232):02x}" * 3
    steps = (0, 95, 135, 175, 215, 255)
    number -= 16
    return "#" + "".join(f"{steps[number // 6**place % 6]:02x}" for place in (2, 1, 0))
