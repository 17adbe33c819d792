"""Pictures with questions and answers, drawn on the fly: the whole world the tiny Qwen3-VL knows.

A scene is a few coloured shapes, or one or two short texts in one of several fonts, or both. Every question is asked only
where the picture gives exactly one clear answer. Some combinations (see `HELDOUT_PAIRS`, `HELDOUT_WORDS`, `is_heldout_number`)
never occur in training; `heldout_questions` asks about nothing else.

Needs Pillow, NumPy, and the fonts that matplotlib brings along. No torch, no transformers.
"""
from __future__ import annotations

import functools
import importlib.util
import math
import random
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

COLOURS = {"red": (220, 30, 35), "green": (30, 155, 55), "blue": (35, 75, 220), "yellow": (242, 208, 20),
           "purple": (125, 45, 165), "orange": (245, 130, 15), "pink": (250, 130, 190), "black": (15, 15, 15)}
SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross")
MAX_SHAPES = 6
HELDOUT_PAIRS = frozenset({("red", "star"), ("green", "circle"), ("blue", "triangle"),
                           ("yellow", "square"), ("purple", "cross"), ("orange", "diamond")})
TRAIN_PAIRS = tuple((c, s) for c in COLOURS for s in SHAPES if (c, s) not in HELDOUT_PAIRS)

_WORDS = """
ACT ADD AGE AIR ALL AND ANT ANY APE ARC ARM ART ASH ASK BAD BAG BALL BAND BANK BAR BARN BAT BATH BEACH BEAN BEAR BED BEE BELL
BELT BENCH BEST BIG BIKE BIRD BLACK BLOCK BLUE BOAT BODY BONE BOOK BOOT BOW BOWL BOX BOY BRAIN BREAD BRICK BRUSH BUG BUS CAB
CAGE CAKE CALL CALM CAMP CANDY CAP CAR CARD CART CASE CAVE CHAIR CHALK CHEF CITY CLAY CLIP CLOCK CLOUD COAL COAT COIN COLD
COOK CORN COW CROW CROWN CUBE CUP DAD DAY DEEP DEER DESK DICE DIRT DISH DOCK DOLL DOOR DOT DOVE DRAW DRUM DRY DUCK DUST EAR
EARTH EAST EAT EDGE EGG END EXIT EYE FACE FAN FARM FAST FEET FIELD FIG FILM FIRE FISH FLAG FLAT FLOOR FLUTE FLY FOG FOOD FORK
FOX FROG FRUIT FUN GAME GATE GIFT GIRL GLASS GLUE GOAT GOLD GOOD GRAPE GRASS GREEN GRID GUM HAIR HALL HAND HAT HEART HEN HILL
HOME HOOK HOPE HORSE HOT HOUSE HUT ICE INK IRON JAM JAR JET JOB JOY JUICE JUMP KEY KING KITE KNEE KNOT LAKE LAMB LAMP LEAF LEG
LEMON LID LIGHT LINE LION LIP LOCK LOG LOOK LOVE LOW LUCK MAP MARK MASK MAT MEAL MELON MILK MINT MOON MOUSE MUD MUG MUSIC NAIL
NAME NECK NEST NET NEW NIGHT NO NOON NORTH NOSE NOTE NUT OAK OAR OCEAN OFF OIL OLD ON ONE OPEN OUT OVEN OWL OX PAGE PAINT PAN
PAPER PARK PATH PEA PEAR PEN PHONE PIANO PIE PIG PIN PINE PIZZA PLANE PLANT PLUM POND POT PUSH QUEEN QUILT RADIO RAIN RAT RED
RICE RING RIVER ROAD ROBOT ROCK ROOF ROOM ROPE ROSE RUG RUN SAD SAFE SAIL SALT SAND SAW SEA SEAL SEED SHARK SHEEP SHELL SHIP
SHIRT SHOE SHOP SIGN SINK SKY SLED SLOW SNAIL SNAKE SNOW SOAP SOCK SOFA SONG SOUP SOUTH SPOON STAMP STAR STEP STICK STONE STOP
SUGAR SUN SWAN TABLE TAIL TALL TEA TEAM TEN TENT TIE TIGER TIME TIN TIRE TOAST TOE TOP TOWN TOY TRAIN TREE TRUCK TUB TWO UP
VAN VASE VEST VINE WALL WARM WATCH WATER WAVE WAX WEB WELL WEST WET WHALE WHEEL WIG WIND WING WOLF WOOD WOOL WORLD YARD YARN
YES ZEBRA ZIP ZOO
""".split()


def _hash(text: str) -> int:
    return zlib.crc32(("tiny-vl " + text).encode())


HELDOUT_WORDS = frozenset(w for w in _WORDS if len(w) > 2 and _hash(w) % 5 == 0)
TRAIN_WORDS = tuple(w for w in _WORDS if w not in HELDOUT_WORDS)


def is_heldout_number(text: str) -> bool:
    """One in five of the two-, three- and four-digit numbers is never drawn in training."""
    return len(text) >= 2 and _hash(text) % 5 == 0


# Picture sizes (width, height): the areas a user's picture ends up with, see `IMAGE_AREA`. The first is the usual one.
SIZES = ((96, 96), (144, 64), (64, 144), (96, 80), (80, 96), (128, 64), (64, 128))
IMAGE_AREA = (64 * 96, 96 * 96)          # least and greatest area of a picture after the processor's resize


@dataclass
class Item:
    """One thing in a picture: a shape (radius r around cx, cy) or a text (its box is `box`)."""
    colour: str
    cx: float
    cy: float
    r: float
    shape: str = ""
    text: str = ""
    font: int = 0
    points: int = 0
    angle: float = 0.0
    rgb: tuple = (0, 0, 0)

    @property
    def size(self) -> str:
        return "large" if self.r >= 9 else "small"

    @property
    def noun(self) -> str:
        return "number" if self.text.isdigit() else "word"

    @property
    def heldout(self) -> bool:
        return (self.colour, self.shape) in HELDOUT_PAIRS


@dataclass
class Scene:
    width: int
    height: int
    background: tuple
    shapes: list = field(default_factory=list)
    texts: list = field(default_factory=list)


@dataclass
class Question:
    kind: str                   # colour, count, relation, read, shape, size, where, describe
    question: str
    answer: str
    about: list = field(default_factory=list)       # the items that the answer depends on
    named: list = field(default_factory=list)       # (where a name ends in the question, the item it names)


# ------------------------------------------------------------------------------------------------- fonts

_FONT_FILES = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif",
               "DejaVuSerif-Bold", "STIXGeneral", "STIXGeneralBol", "cmr10", "cmss10")
NUM_FONTS = 1 + len(_FONT_FILES)         # number 0 is the one inside Pillow


@functools.lru_cache(maxsize=None)
def load_font(number: int, points: int) -> ImageFont.FreeTypeFont:
    if number == 0:
        return ImageFont.load_default(points)
    spec = importlib.util.find_spec("matplotlib")        # found, not imported: only its font files are wanted
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("the pictures need the fonts of matplotlib: pip install matplotlib")
    folder = Path(spec.submodule_search_locations[0]) / "mpl-data" / "fonts" / "ttf"
    return ImageFont.truetype(str(folder / f"{_FONT_FILES[number - 1]}.ttf"), points)


# ------------------------------------------------------------------------------------------------- making scenes

def _background(rng: random.Random) -> tuple:
    if rng.random() < 0.6:
        return tuple([rng.randint(235, 255)] * 3)
    return tuple(rng.randint(205, 255) for _ in range(3))


def _tint(rng: random.Random, colour: str) -> tuple:
    return tuple(max(0, min(255, v + rng.randint(-14, 14))) for v in COLOURS[colour])


def _pairs(rng: random.Random, n: int, heldout: bool) -> list:
    """n (colour, shape) pairs. A few colours and shapes when `n` should hold repeats, so that counting is worth asking."""
    if rng.random() < 0.5:
        colours = rng.sample(list(COLOURS), rng.randint(1, 3))
        shapes = rng.sample(SHAPES, rng.randint(1, 3))
    else:
        colours, shapes = list(COLOURS), list(SHAPES)
    pool = [(c, s) for c in colours for s in shapes if (c, s) not in HELDOUT_PAIRS] or list(TRAIN_PAIRS)
    pairs = [rng.choice(pool) for _ in range(n)]
    if heldout:
        pairs[0] = rng.choice(sorted(HELDOUT_PAIRS))
        for i in range(1, n):       # its colour and its shape occur elsewhere too, so that neither alone answers
            if rng.random() < 0.15:
                pairs[i] = pairs[0]
        rng.shuffle(pairs)
    return pairs


def _place_shapes(rng: random.Random, scene: Scene, pairs: list, boxes: list) -> None:
    """Put each pair at a free place, away from `boxes` of texts; a shape that finds none is left out."""
    for colour, shape in pairs:
        for _ in range(40):
            r = rng.uniform(10, 14) if rng.random() < 0.5 else rng.uniform(5.5, 7.5)
            cx, cy = rng.uniform(r + 2, scene.width - r - 2), rng.uniform(r + 2, scene.height - r - 2)
            clear = all((cx - o.cx) ** 2 + (cy - o.cy) ** 2 > (r + o.r + 3) ** 2 for o in scene.shapes)
            clear = clear and all(cx + r + 2 < x0 or cx - r - 2 > x1 or cy + r + 2 < y0 or cy - r - 2 > y1
                                  for x0, y0, x1, y1 in boxes)
            if clear:
                scene.shapes.append(Item(colour, cx, cy, r, shape=shape, angle=rng.uniform(-10, 10), rgb=_tint(rng, colour)))
                break


def _random_text(rng: random.Random, heldout: bool) -> str:
    if rng.random() < 0.5:                                    # a number
        while True:
            digits = rng.choice((1, 2, 2, 3, 3, 3, 4, 4)) if not heldout else rng.choice((2, 3, 3, 4))
            text = str(rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10 ** digits))
            if is_heldout_number(text) == heldout:
                return text
    if heldout:
        return rng.choice(sorted(HELDOUT_WORDS))
    if rng.random() < 0.4:
        return rng.choice(TRAIN_WORDS)
    while True:                # letters in any order: reading must go letter by letter, a list cannot be learnt by heart
        text = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.choice((2, 3, 3, 4, 4, 5))))
        if text not in HELDOUT_WORDS:
            return text


def _place_texts(rng: random.Random, scene: Scene, texts: list, large: bool = False) -> list:
    """Put the texts one below the other, each in its own band. Returns their boxes (x0, y0, x1, y1)."""
    boxes, band = [], scene.height / len(texts)
    for i, text in enumerate(texts):
        font = rng.randrange(NUM_FONTS)
        points = rng.randint(28, 44) if large else rng.randint(17, 32)
        while True:
            x0, y0, x1, y1 = load_font(font, points).getbbox(text)
            if (x1 - x0 <= scene.width - 6 and y1 - y0 <= band - 5) or points <= 9:
                break
            points -= 1
        w, h = x1 - x0, y1 - y0
        left = rng.uniform(2, max(2.1, scene.width - w - 2))
        top = i * band + rng.uniform(2, max(2.1, band - h - 2))
        colour = rng.choice([c for c in COLOURS if c not in ("yellow",)])
        scene.texts.append(Item(colour, left + w / 2, top + h / 2, w / 2, text=text, font=font, points=points,
                                rgb=_tint(rng, colour)))
        boxes.append((left, top, left + w, top + h))
    return boxes


def make_scene(rng: random.Random, *, text: bool, heldout: bool = False, easy: bool = False, few: bool = False,
               size: tuple = SIZES[0]) -> Scene:
    """A random scene. `text`: with something to read. `heldout`: with a combination that training never shows, else with none.
    `easy`: one or two shapes, or one or two large characters, for the beginning of training. `few`: two or three shapes."""
    scene = Scene(*size, _background(rng))
    if easy and text:
        letters = rng.choice(("0123456789", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
        characters = [rng.choice(letters) for _ in range(rng.choice((1, 1, 2)))]
        if len(characters) == 2 and (characters[0] == "0" or is_heldout_number("".join(characters))):
            characters.pop()
        _place_texts(rng, scene, ["".join(characters)], large=True)
        return scene
    if easy:
        while not scene.shapes:
            _place_shapes(rng, scene, _pairs(rng, rng.choice((1, 1, 2)), False), [])
        return scene
    if not text:
        n = rng.choice((2, 2, 3) if few else (1, 2, 2, 3, 3, 3, 4, 4, 5, 6))
        if heldout:
            n = max(n, 2)
        while not scene.shapes:
            _place_shapes(rng, scene, _pairs(rng, n, heldout), [])
        return scene
    style = rng.random()
    texts = [_random_text(rng, heldout)]
    if style < 0.35 and size[1] >= 80:
        while True:
            other = _random_text(rng, heldout)
            if other != texts[0]:
                texts.append(other)
                break
    boxes = _place_texts(rng, scene, texts)
    if style > 0.75:
        _place_shapes(rng, scene, _pairs(rng, rng.randint(1, 2), heldout=False), boxes)
    return scene


# ------------------------------------------------------------------------------------------------- drawing

def _outline(item: Item) -> list:
    """The corners of a shape as (x, y) with unit radius around the origin, y downwards."""
    def ring(n, start, radius):
        angles = [start + 2 * math.pi * k / n for k in range(n)]
        return [(radius * math.cos(a), radius * math.sin(a)) for a in angles]

    if item.shape == "square":
        return ring(4, math.pi / 4, 1.12)
    if item.shape == "triangle":
        return [(x, y + 0.15) for x, y in ring(3, -math.pi / 2, 1.15)]
    if item.shape == "diamond":
        return [(0, -1.15), (0.72, 0), (0, 1.15), (-0.72, 0)]
    if item.shape == "star":
        outer, inner = ring(5, -math.pi / 2, 1.18), ring(5, -math.pi / 2 + math.pi / 5, 0.48)
        return [p for pair in zip(outer, inner) for p in pair]
    a = 0.36                                                    # cross: a plus sign
    return [(-a, -1), (a, -1), (a, -a), (1, -a), (1, a), (a, a), (a, 1), (-a, 1), (-a, a), (-1, a), (-1, -a), (-a, -a)]


def render(scene: Scene, scale: int = 1) -> Image.Image:
    """The scene as an RGB picture of (width * scale, height * scale) pixels; drawn three times larger, then averaged down."""
    s = 3 * scale
    image = Image.new("RGB", (scene.width * s, scene.height * s), scene.background)
    draw = ImageDraw.Draw(image)
    for item in scene.shapes:
        if item.shape == "circle":
            box = item.cx - item.r, item.cy - item.r, item.cx + item.r, item.cy + item.r
            draw.ellipse([v * s for v in box], fill=item.rgb)
            continue
        c, d = math.cos(math.radians(item.angle)), math.sin(math.radians(item.angle))
        draw.polygon([((item.cx + item.r * (x * c - y * d)) * s, (item.cy + item.r * (x * d + y * c)) * s)
                      for x, y in _outline(item)], fill=item.rgb)
    for item in scene.texts:
        font = load_font(item.font, item.points * s)
        x0, y0, x1, y1 = font.getbbox(item.text)
        draw.text((item.cx * s - (x0 + x1) / 2, item.cy * s - (y0 + y1) / 2), item.text, font=font, fill=item.rgb)
    return image.reduce(3)


THINGS = ("",) + SHAPES + tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ")
PATCH_COLOURS = ("",) + tuple(COLOURS)


def patch_labels(scene: Scene, patch: int):
    """What lies in the middle of each patch: indices into THINGS and into PATCH_COLOURS (0: background), each [rows, columns]."""
    y, x = np.mgrid[0:scene.height // patch, 0:scene.width // patch] * patch + patch / 2
    thing, colour = np.zeros(x.shape, dtype=np.int64), np.zeros(x.shape, dtype=np.int64)
    for item in scene.shapes:
        inside = (x - item.cx) ** 2 + (y - item.cy) ** 2 <= (item.r + 1) ** 2
        thing[inside], colour[inside] = THINGS.index(item.shape), PATCH_COLOURS.index(item.colour)
    for item in scene.texts:
        font = load_font(item.font, item.points * 3)
        x0, y0, x1, y1 = font.getbbox(item.text)
        left = item.cx - (x0 + x1) / 6
        for i, character in enumerate(item.text):
            start, end = left + font.getlength(item.text[:i]) / 3, left + font.getlength(item.text[:i + 1]) / 3
            inside = (x >= start) & (x < end) & (abs(y - item.cy) <= (y1 - y0) / 6 + 1)
            thing[inside], colour[inside] = THINGS.index(character), PATCH_COLOURS.index(item.colour)
    return thing, colour


# ------------------------------------------------------------------------------------------------- asking

MARGIN = 12              # pixels that two centres must be apart along an axis before "left of" or "above" is asked
_DIRECTIONS = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}
_CHOICES = (("left of", "right of", "left", "right"), ("above", "below", "above", "below"))

TEMPLATES = {
    "colour": ("What colour is the {x}?", "What color is the {x}?", "Which colour does the {x} have?",
               "What is the colour of the {x}?", "Tell me the colour of the {x}.", "The {x} is what color?"),
    "count": ("How many {xs} are there?", "How many {xs} do you see?", "Count the {xs}.", "How many {xs} are in the picture?",
              "What is the number of {xs}?", "How many {xs} can you see in the image?"),
    "shape": ("What shape is the {c} thing?", "What is the {c} shape?", "Which shape is {c}?", "What kind of shape is {c}?"),
    "size": ("What size is the {x}?", "Is the {x} large or small?", "How big is the {x}?", "Is the {x} small or large?"),
    "where": ("Where is the {x}?", "In which part of the picture is the {x}?", "Where do you see the {x}?"),
    "yesno": ("Is the {x} {rel} the {y}?", "Is the {x} to be found {rel} the {y}?", "Can you see the {x} {rel} the {y}?"),
    "choice": ("Is the {x} {a} or {b} the {y}?", "Tell me: is the {x} {a} or {b} the {y}?"),
    "which": ("What is {rel} the {y}?", "Which shape is {rel} the {y}?", "What do you see {rel} the {y}?"),
    "read": ("What does it say?", "Read the text.", "What is written here?", "What does the text say?", "What is the text?"),
    "read_word": ("What word is this?", "Which word is written here?", "What is the word?", "Read the word.",
                  "What does the word say?"),
    "read_number": ("What number is this?", "Which number is written here?", "What is the number?", "Read the number.",
                    "What number do you see?"),
    "read_line": ("What does the {p} line say?", "What is written at the {p}?", "Read the {p} line."),
    "describe": ("Describe the picture.", "What do you see?", "What is in the image?", "Describe this image from left to right."),
}
_PLACES = (("top left", "top", "top right"), ("left", "center", "right"), ("bottom left", "bottom", "bottom right"))


def _name(rng: random.Random, scene: Scene, item: Item, without: str = "") -> str | None:
    """A phrase that names `item` and nothing else in the scene ("red circle", "circle", "red shape"); None if there is none."""
    names = []
    for words in ((item.colour, item.shape), (item.shape,), (item.colour, "shape"), (item.size, item.shape)):
        if without == "colour" and item.colour in words or without == "size" and item.size in words:
            continue
        fits = [o for o in scene.shapes if all(w in (o.colour, o.shape, o.size, "shape") for w in words)]
        if len(fits) == 1:
            names.append(" ".join(words))
    if not names:
        return None
    return names[0] if rng.random() < 0.6 else rng.choice(names)


def _ask(rng: random.Random, template: str, kind: str, answer: str, about: list, **words) -> Question:
    question = rng.choice(TEMPLATES[template]).format(**words)
    casual = rng.random()
    if casual < 0.08:
        question = question[0].lower() + question[1:]
    if casual < 0.04 or casual > 0.96:
        question = question.rstrip("?.")
    asked = Question(kind, question, answer, about)
    if "x" in words and about[0].shape:
        asked.named.append((question.lower().find("the " + words["x"]) + len("the " + words["x"]), about[0]))
    if "y" in words:
        asked.named.append((question.rfind("the " + words["y"]) + len("the " + words["y"]), about[-1]))
    return asked


def ask_colour(rng, scene):
    if scene.texts and rng.random() < 0.6:
        if len(scene.texts) == 1:
            item = scene.texts[0]
            return _ask(rng, "colour", "colour", item.colour, [item], x=rng.choice(("text", item.noun)))
        if scene.texts[0].noun != scene.texts[1].noun:
            item = rng.choice(scene.texts)
            return _ask(rng, "colour", "colour", item.colour, [item], x=item.noun)
    if not scene.shapes:
        return None
    item = rng.choice(scene.shapes)
    name = _name(rng, scene, item, without="colour")
    return name and _ask(rng, "colour", "colour", item.colour, [item], x=name)


def ask_count(rng, scene):
    style = rng.random()
    if scene.shapes and rng.random() < 0.8:
        item = rng.choice(scene.shapes)
        colour, shape = item.colour, item.shape
    else:
        colour, shape = rng.choice(TRAIN_PAIRS)
    if style < 0.25:
        things, phrase = list(scene.shapes), rng.choice(("shapes", "shapes", "things"))
    elif style < 0.55:
        things, phrase = [o for o in scene.shapes if o.colour == colour], f"{colour} {rng.choice(('shapes', 'things'))}"
    elif style < 0.85:
        things, phrase = [o for o in scene.shapes if o.shape == shape], _plural(shape)
    else:
        things = [o for o in scene.shapes if (o.colour, o.shape) == (colour, shape)]
        phrase = f"{colour} {_plural(shape)}"
    if not things and rng.random() < 0.5:
        return None
    return _ask(rng, "count", "count", str(len(things)), things, xs=phrase)


def _plural(shape: str) -> str:
    return "crosses" if shape == "cross" else shape + "s"


def ask_shape(rng, scene):
    if not scene.shapes:
        return None
    item = rng.choice(scene.shapes)
    if sum(o.colour == item.colour for o in scene.shapes) > 1:
        return None
    return _ask(rng, "shape", "shape", item.shape, [item], c=item.colour)


def ask_size(rng, scene):
    if not scene.shapes:
        return None
    item = rng.choice(scene.shapes)
    name = _name(rng, scene, item, without="size")
    return name and _ask(rng, "size", "size", item.size, [item], x=name)


def ask_where(rng, scene):
    if not scene.shapes:
        return None
    item = rng.choice(scene.shapes)
    name, x, y = _name(rng, scene, item), item.cx / scene.width * 3, item.cy / scene.height * 3
    if name is None or min(abs(x - 1), abs(x - 2), abs(y - 1), abs(y - 2)) < 0.12:
        return None                                             # too near the line between two places
    return _ask(rng, "where", "where", _PLACES[int(y)][int(x)], [item], x=name)


def ask_relation(rng, scene):
    if len(scene.shapes) < 2:
        return None
    x, y = rng.sample(scene.shapes, 2)
    delta = (x.cx - y.cx, x.cy - y.cy)
    style = rng.random()
    name_y = _name(rng, scene, y)
    if style > 0.7:
        axis, sign = _DIRECTIONS[rel := rng.choice(list(_DIRECTIONS))]
        others = [o for o in scene.shapes if o is not y]
        gaps = [sign * ((o.cx, o.cy)[axis] - (y.cx, y.cy)[axis]) for o in others]
        there = [o for o, gap in zip(others, gaps) if gap >= MARGIN]
        if name_y is None or len(there) != 1 or any(0 < gap < MARGIN for gap in gaps):
            return None
        return _ask(rng, "which", "relation", f"{there[0].colour} {there[0].shape}", [there[0], y], rel=rel, y=name_y)
    axis = rng.randrange(2)
    name_x = _name(rng, scene, x)
    if name_x is None or name_y is None or abs(delta[axis]) < MARGIN:
        return None
    first, second, short_first, short_second = _CHOICES[axis]
    true = 0 if delta[axis] < 0 else 1
    if style > 0.4:
        a, b = (first, second) if rng.random() < 0.5 else (second, first)
        a = a.replace(" of", "") if axis == 0 else a
        return _ask(rng, "choice", "relation", (short_first, short_second)[true], [x, y], x=name_x, y=name_y, a=a, b=b)
    asked = rng.randrange(2)
    rel = (first, second)[asked]
    if axis == 0 and rng.random() < 0.4:
        rel = "to the " + rel
    return _ask(rng, "yesno", "relation", "yes" if asked == true else "no", [x, y], x=name_x, y=name_y, rel=rel)


def ask_read(rng, scene):
    if not scene.texts:
        return None
    if len(scene.texts) == 1:
        item = scene.texts[0]
        return _ask(rng, rng.choice(("read", f"read_{item.noun}")), "read", item.text, [item])
    row = rng.randrange(2)
    item = scene.texts[row]
    if scene.texts[0].noun != scene.texts[1].noun and rng.random() < 0.4:
        return _ask(rng, f"read_{item.noun}", "read", item.text, [item])
    return _ask(rng, "read_line", "read", item.text, [item], p=("top", "bottom")[row])


def ask_describe(rng, scene):
    if len(scene.shapes) > 4:
        return None
    things = sorted(scene.shapes, key=lambda o: o.cx)
    if any(b.cx - a.cx < 4 for a, b in zip(things, things[1:])):
        return None                                             # no clear order from left to right
    parts = [f"the {o.noun} {o.text} in {o.colour}" for o in scene.texts] + [f"a {o.size} {o.colour} {o.shape}" for o in things]
    return _ask(rng, "describe", "describe", ", ".join(parts), scene.texts + things)


ASK = {"colour": ask_colour, "count": ask_count, "relation": ask_relation, "read": ask_read, "shape": ask_shape,
       "size": ask_size, "where": ask_where, "describe": ask_describe}
SHAPE_MIX = {"colour": 2, "count": 3, "relation": 5, "shape": 1, "size": 1, "where": 2, "describe": 1.5}
PLACE_MIX = SHAPE_MIX | {"count": 4, "relation": 12, "where": 6}
FINAL_MIX = SHAPE_MIX | {"count": 6, "relation": 6}
TEXT_MIX = {"colour": 1, "count": 0.3, "read": 5, "shape": 0.3, "where": 0.2, "describe": 0.7}


def ask(rng: random.Random, scene: Scene, mix: dict | None = None) -> Question | None:
    """One random question that this scene answers, its kind drawn by the weights `mix`; None if the draw does not fit it."""
    mix = mix or (TEXT_MIX if scene.texts else SHAPE_MIX)
    return ASK[rng.choices(list(mix), list(mix.values()))[0]](rng, scene)


# ------------------------------------------------------------------------------------------------- the held-out questions

HELDOUT_KINDS = ("colour", "count", "relation", "read")


def _heldout(rng: random.Random, kind: str) -> tuple[Scene, Question]:
    """A scene with a combination never trained on, and a question of this kind that depends on it."""
    while True:
        size = SIZES[0] if rng.random() < 0.6 else rng.choice(SIZES)
        scene = make_scene(rng, text=kind == "read", heldout=True, size=size)
        for _ in range(6):
            asked = ASK[kind](rng, scene)
            if asked and (kind == "read" or any(item.heldout for item in asked.about)):
                return scene, asked


def heldout_scenes(n: int, seed: int = 0, kinds=HELDOUT_KINDS) -> list:
    """n pairs (Scene, Question), the kinds in turn; the same for the same seed."""
    rng = random.Random(f"held-out {seed}")
    return [_heldout(rng, kinds[i % len(kinds)]) for i in range(n)]


def heldout_questions(n: int, seed: int = 0, kinds=HELDOUT_KINDS) -> list:
    """n tuples (kind, RGB picture, question, answer) about combinations that training never shows; the same for the same seed."""
    return [(q.kind, render(scene), q.question, q.answer) for scene, q in heldout_scenes(n, seed, kinds)]


def example_scene() -> Scene:
    """A picture to ask about. Its red star is of the combinations that training never shows."""
    scene = Scene(96, 96, (250, 250, 250))
    for colour, shape, cx, cy, r in (("red", "star", 23, 30, 13.5), ("blue", "circle", 72, 22, 7),
                                     ("yellow", "diamond", 66, 68, 13), ("green", "cross", 26, 76, 7)):
        scene.shapes.append(Item(colour, cx, cy, r, shape=shape, rgb=COLOURS[colour]))
    return scene
