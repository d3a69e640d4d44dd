"""Writing a picture: SVG by hand, PNG through matplotlib where that is installed.

What the pictures show is in `panels`.
"""

import io
from collections.abc import Mapping
from html import escape

from dualmesh._support.optional_imports import import_optional
from dualmesh.pictures.shapes import DARK, LIGHT, Box, Canvas, Theme, Words

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_PNG_DPI = 144
_PIXELS_PER_INCH = 96


def svg(canvas: Canvas, theme: Theme = "auto") -> str:
    """Return a picture as SVG; "auto" follows the reader's light or dark preference. *Pure.*"""
    colours = DARK if theme == "dark" else LIGHT
    width, height = _number(canvas.width), _number(canvas.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="{_FONT}">',
        f"<title>{escape(canvas.title)}</title>",
        *([_dark_style()] if theme == "auto" else []),
        *(_box(shape, colours) if isinstance(shape, Box) else _words(shape, colours) for shape in canvas.shapes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _dark_style() -> str:
    rules = [f".dmf-{name}{{fill:{colour}}}.dms-{name}{{stroke:{colour}}}" for name, colour in DARK.items()]
    return f"<style>@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"


def _box(box: Box, colours: Mapping[str, str]) -> str:
    names = [f"dmf-{box.fill}"] if box.fill else []
    names += [f"dms-{box.stroke}"] if box.stroke else []
    stroke = f' stroke="{colours[box.stroke]}" stroke-width="{_number(box.stroke_width)}"' if box.stroke else ""
    radius = f' rx="{_number(box.radius)}"' if box.radius else ""
    place = f'x="{_number(box.x)}" y="{_number(box.y)}" width="{_number(box.width)}" height="{_number(box.height)}"'
    fill = colours[box.fill] if box.fill else "none"
    return f'<rect class="{" ".join(names)}" {place}{radius} fill="{fill}"{stroke}/>'


def _words(words: Words, colours: Mapping[str, str]) -> str:
    bold = ' font-weight="600"' if words.is_bold else ""
    anchor = f' text-anchor="{words.anchor}"' if words.anchor != "start" else ""
    place = f'x="{_number(words.x)}" y="{_number(words.y)}" font-size="{_number(words.size)}"'
    colour = f'class="dmf-{words.colour}" fill="{colours[words.colour]}"'
    return f"<text {colour} {place}{anchor}{bold}>{escape(words.text)}</text>"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def png(canvas: Canvas, theme: Theme = "light") -> bytes:
    """Return a picture as PNG; "auto" is light, for a PNG cannot choose. *Local.*

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    figures = import_optional("matplotlib.figure", "matplotlib", "Picture.png")
    patches = import_optional("matplotlib.patches", "matplotlib", "Picture.png")
    colours = DARK if theme == "dark" else LIGHT
    size = (canvas.width / _PIXELS_PER_INCH, canvas.height / _PIXELS_PER_INCH)
    figure = figures.Figure(figsize=size, dpi=_PNG_DPI, facecolor=colours["paper"])
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, canvas.width)
    axes.set_ylim(canvas.height, 0)
    points = 72 / _PIXELS_PER_INCH
    for order, shape in enumerate(canvas.shapes):
        if isinstance(shape, Words):
            axes.text(
                shape.x,
                shape.y,
                shape.text.replace("$", r"\$"),
                fontsize=shape.size * points * 0.93,
                color=colours[shape.colour],
                fontweight="bold" if shape.is_bold else "normal",
                ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
                va="baseline",
                zorder=order,
            )
            continue
        style = {
            "facecolor": colours[shape.fill] if shape.fill else "none",
            "edgecolor": colours[shape.stroke] if shape.stroke else "none",
            "linewidth": shape.stroke_width * points,
            "zorder": order,
        }
        corner = (shape.x, shape.y)
        if shape.radius:
            rounding = f"round,pad=0,rounding_size={shape.radius}"
            axes.add_patch(patches.FancyBboxPatch(corner, shape.width, shape.height, boxstyle=rounding, **style))
        else:
            axes.add_patch(patches.Rectangle(corner, shape.width, shape.height, **style))
    file = io.BytesIO()
    figure.savefig(file, format="png", facecolor=colours["paper"])
    return file.getvalue()
