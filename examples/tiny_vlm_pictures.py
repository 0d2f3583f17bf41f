"""Pictures of a few coloured shapes and digits, and questions about them with their answers; see tiny_vlm.py."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw, ImageFont

SIZE = 64  # pixels along a side
COLOURS = {
    "red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (235, 215, 50),
    "white": (245, 245, 245), "pink": (245, 130, 200),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COUNTS = ("one", "two", "three", "four")
PLACES = ("top left", "top right", "bottom left", "bottom right")
KINDS = ("colour", "kind", "place", "count", "digit")


@dataclass(frozen=True)
class Thing:
    """A shape or a digit.

    Attributes:
        colour: name of its colour.
        kind: name of the shape, or of the digit.
        place: index into `PLACES`.
    """

    colour: str
    kind: str
    place: int

    @property
    def name(self) -> str:
        return f"digit {self.kind}" if self.kind in DIGITS else self.kind


def scene(rng: random.Random) -> list[Thing]:
    """Returns one to four things of different kinds at different places."""
    count = rng.randint(1, 4)
    kinds = rng.sample(SHAPES, min(count, rng.randint(1, 3)))
    kinds += rng.sample(DIGITS, count - len(kinds))
    places = rng.sample(range(4), count)
    return [Thing(rng.choice(list(COLOURS)), kind, place) for kind, place in zip(kinds, places, strict=True)]


def draw(things: list[Thing], rng: random.Random) -> torch.Tensor:
    """Returns a picture as pixel values, `[3, 64, 64]`, float32, from -1 to 1.

    Sizes, places and the dark background vary a little.

    Args:
        things: what it shows, at most one at each place.
        rng: decides the variations.
    """
    background = tuple(rng.randint(0, 40) for _ in range(3))
    image = Image.new("RGB", (SIZE, SIZE), background)
    pen = ImageDraw.Draw(image)
    for thing in things:
        x, y = (16 + 32 * axis + rng.randint(-3, 3) for axis in (thing.place % 2, thing.place // 2))
        r, fill = rng.randint(9, 12), COLOURS[thing.colour]
        if thing.kind == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)
        elif thing.kind == "square":
            pen.rectangle((x - r + 1, y - r + 1, x + r - 1, y + r - 1), fill=fill)
        elif thing.kind == "triangle":
            pen.polygon(((x, y - r), (x - r, y + r), (x + r, y + r)), fill=fill)
        elif thing.kind == "cross":
            pen.rectangle((x - r, y - 3, x + r, y + 3), fill=fill)
            pen.rectangle((x - 3, y - r, x + 3, y + r), fill=fill)
        else:
            font = ImageFont.load_default(size=2 * r + 5)
            pen.text((x, y), str(DIGITS.index(thing.kind)), fill=fill, font=font, anchor="mm")
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(SIZE, SIZE, 3)
    return pixels.permute(2, 0, 1).float() / 127.5 - 1.0


def question(things: list[Thing], kind: str, rng: random.Random) -> tuple[str, str, str]:
    """Returns a question, its answer as a sentence, and the words that a right answer holds.

    Args:
        things: what the picture shows.
        kind: one of `KINDS`; "digit" needs a picture with a digit, all others one with a shape.
        rng: decides which thing is asked about.
    """
    thing = rng.choice([each for each in things if each.kind in (DIGITS if kind == "digit" else SHAPES)])
    place = PLACES[thing.place]
    if kind == "colour":
        asked = f"What colour is the {thing.name}?"
        return asked, f"The {thing.name} at the {place} is {thing.colour}.", f"is {thing.colour}."
    if kind == "place":
        asked = f"Where is the {thing.name}?"
        return asked, f"The {thing.colour} {thing.name} is at the {place} of the picture.", f"the {place} of"
    if kind == "count":
        count = COUNTS[len(things) - 1]
        noun = "thing" if count == "one" else "things"
        return "How many things are there?", f"There are {count} {noun} in the picture.", f" {count} thing"
    asked = f"What is at the {place}?"
    return asked, f"At the {place} there is a {thing.colour} {thing.name}.", f"{thing.name}."


def questions(things: list[Thing], rng: random.Random, count: int) -> list[tuple[str, str, str]]:
    """Returns different questions about one picture, as `question` does.

    Args:
        things: what the picture shows.
        rng: decides what is asked.
        count: greatest number of questions. There are fewer where little can be asked.
    """
    has_digit = any(each.kind in DIGITS for each in things)
    kinds = [kind for kind in KINDS if kind != "digit" or has_digit]
    asked = {found[0]: found for _ in range(3 * count) for found in [question(things, rng.choice(kinds), rng)]}
    return list(asked.values())[:count]
