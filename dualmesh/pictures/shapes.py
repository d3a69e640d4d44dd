"""What a picture is made of: boxes and words in named colours, and what the names mean in light and dark.

Where they go is in `panels`, how they are written in `files`.
"""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Theme = Literal["auto", "light", "dark"]
THEMES: tuple[Theme, ...] = ("auto", "light", "dark")

GROUP_COLOURS = 12
"""Groups with colours of their own; after these the colours repeat."""

_LIGHT_GROUPS = (
    *("#a8cdf0", "#ffd08f", "#b5e0a5", "#f3b0b4", "#d3c0ee", "#9fdedb"),
    *("#f0e28a", "#f5bfe0", "#c8b39b", "#8fb8a8", "#9aa9e0", "#d5d9de"),
)
_DARK_GROUPS = (
    *("#1f5a91", "#96600f", "#356e24", "#96353c", "#624497", "#14716d"),
    *("#77690f", "#8f3f72", "#5f4a33", "#2c5f4c", "#3c4da0", "#4b535d"),
)
LIGHT: Mapping[str, str] = {
    "paper": "#ffffff",
    "panel": "#f6f7f9",
    "ink": "#16181d",
    "muted": "#5b6472",
    "node": "#9aa3b0",
    "rule": "#d7dce2",
    "empty": "#eceef1",
    "alarm": "#b3261e",
    **{f"group{number}": colour for number, colour in enumerate(_LIGHT_GROUPS)},
}
DARK: Mapping[str, str] = {
    "paper": "#14171c",
    "panel": "#1c2027",
    "ink": "#f1f3f6",
    "muted": "#a3adba",
    "node": "#707b8a",
    "rule": "#323944",
    "empty": "#262b33",
    "alarm": "#ff9d94",
    **{f"group{number}": colour for number, colour in enumerate(_DARK_GROUPS)},
}


class Box(NamedTuple):
    """A rectangle with rounded corners. Colours are names; lengths are in pixels."""

    x: float
    y: float
    width: float
    height: float
    fill: str | None = None
    stroke: str | None = None
    stroke_width: float = 1.0
    radius: float = 0.0


class Words(NamedTuple):
    """One line of text; `y` is its baseline."""

    x: float
    y: float
    text: str
    size: float = 12.0
    colour: str = "ink"
    is_bold: bool = False
    anchor: Literal["start", "middle", "end"] = "start"


@dataclass
class Canvas:
    """Shapes in drawing order, and how large the picture is."""

    title: str
    width: float = 0.0
    height: float = 0.0
    shapes: list[Box | Words] = field(default_factory=list)

    def draw(self, *shapes: Box | Words) -> None:
        """Add shapes on top. *Local.*"""
        self.shapes += shapes

    def place(self, other: "Canvas", x: float, y: float) -> None:
        """Add another picture's shapes, moved by (x, y). *Local.*"""
        self.shapes += [shape._replace(x=shape.x + x, y=shape.y + y) for shape in other.shapes]


def text_width(text: str, size: float) -> float:
    """Return about how wide a line is in a sans-serif face, in pixels. *Pure.*"""
    return len(text) * size * 0.58


def wrap_text(text: str, size: float, width: float) -> list[str]:
    """Return a text as lines that fit a width. *Pure.*"""
    return textwrap.wrap(text, max(int(width / text_width("x", size)), 20))
