"""`draw`: topologies and states as a picture for documents, notebooks and pages.

The text form that `print(topology)` shows is in `text`; what a picture shows is arranged in `panels`.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dualmesh._support.checks import is_one_of
from dualmesh.errors import ArgumentError, RankError, did_you_mean, listed
from dualmesh.pictures.axis_facts import GPUS_PER_NODE, facts
from dualmesh.pictures.files import png, svg
from dualmesh.pictures.panels import picture
from dualmesh.pictures.shapes import THEMES, Theme
from dualmesh.topology.resolve import positive
from dualmesh.topology.topology import Topology

SUFFIXES = (".svg", ".png", ".html")

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: {scheme}; }}
body {{ font-family: system-ui, sans-serif; margin: 24px; background: Canvas; color: CanvasText; }}
table {{ border-collapse: collapse; margin: 8px 0 24px; }}
th, td {{ text-align: left; padding: 2px 14px 2px 0; font-size: 14px; }}
svg {{ max-width: 100%; height: auto; }}
</style>
{body}
</html>
"""


class Picture:
    """Topologies as a picture; shows itself in notebooks.

    Attributes:
        topologies: What it shows, by name.
        theme: "auto" (follows the reader's preference), "light" or "dark".
    """

    def __init__(
        self,
        topologies: Mapping[str, Topology],
        gpus_per_node: int = GPUS_PER_NODE,
        rank: int | None = None,
        theme: Theme = "auto",
    ) -> None:
        if not is_one_of(theme, THEMES):
            raise ArgumentError(
                f"draw: theme={theme!r}. Allowed: {listed(THEMES)}.{did_you_mean(theme, THEMES)}", theme=theme
            )
        self.topologies = dict(topologies)
        self.theme: Theme = theme
        self._gpus_per_node = positive("draw", "gpus_per_node", gpus_per_node)
        if not self.topologies:
            raise ArgumentError("draw: there is nothing to draw. Give at least one topology.")
        if rank is not None and not any(topology.has_rank(rank) for topology in self.topologies.values()):
            names = listed(self.topologies)
            raise RankError(f"draw: rank {rank!r} is in none of {names}. Name one of their ranks.", rank=rank)
        self._canvas = picture(self.topologies, self._gpus_per_node, rank)

    @property
    def svg(self) -> str:
        """The picture as SVG text."""
        return svg(self._canvas, self.theme)

    @property
    def html(self) -> str:
        """A page with the picture and a table of every topology's axes."""
        tables = [f"<h2>{escape(name)}</h2>\n{axes_table(topo, self._gpus_per_node)}" for name, topo in self._items()]
        scheme = "light dark" if self.theme == "auto" else self.theme
        body = "\n".join([self.svg, *tables])
        return _PAGE.format(title=escape(self._canvas.title), scheme=scheme, body=body)

    @property
    def png(self) -> bytes:
        """The picture as PNG; needs matplotlib."""
        return png(self._canvas, self.theme)

    def save(self, path: str | Path) -> Path:
        """Write the picture; the ending of the name says what it becomes: .svg, .png or .html. *Local.*

        Raises:
            ArgumentError: Another ending.
            MissingPackageError: A .png without matplotlib.
        """
        target = Path(path)
        suffix = target.suffix.lower()
        if suffix not in SUFFIXES:
            raise ArgumentError(
                f"draw: {target.name!r} ends in {suffix or 'nothing'!r}. Endings: {listed(SUFFIXES)}.", path=path
            )
        if suffix == ".png":
            target.write_bytes(self.png)
        else:
            target.write_text(self.svg if suffix == ".svg" else self.html, encoding="utf-8")
        return target

    def _items(self) -> list[tuple[str, Topology]]:
        return list(self.topologies.items())

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<Picture of {listed(self.topologies)}>"


def draw(
    topologies: Any,
    path: str | Path | None = None,
    *,
    gpus_per_node: int = GPUS_PER_NODE,
    rank: int | None = None,
    theme: Theme = "auto",
) -> Picture:
    """Draw topologies or states, by name or one alone: every rank and node, a panel per axis. *Local.*

    Up to 512 ranks each has a cell; of a larger world a cell is a block of ranks.

    Args:
        topologies: `{name: topology or state}`, or one of them.
        path: Where to save it, too (.svg, .png, .html).
        gpus_per_node: Consecutive ranks on each node.
        rank: Whose groups get a ring; None: the first rank's.
        theme: "auto" follows the reader's preference, "light", "dark".

    >>> import dualmesh as dm
    >>> dm.draw({"thinker": dm.parallel_spec(dp_shard_size=4, ulysses_size=2).resolve(8)})
    <Picture of thinker>
    """
    named = topologies if isinstance(topologies, Mapping) else {"topology": topologies}
    found = {str(name): _topology(name, value) for name, value in named.items()}
    drawn = Picture(found, gpus_per_node, rank, theme)
    if path is not None:
        drawn.save(path)
    return drawn


def _topology(name: object, value: Any) -> Topology:
    topology = value if isinstance(value, Topology) else getattr(value, "topology", None)
    if not isinstance(topology, Topology):
        raise ArgumentError(
            f"draw: {name!r} is {value!r}. Give a topology (spec.resolve(world_size)) or a state.", found=value
        )
    return topology


def axes_table(topology: Topology, gpus_per_node: int = GPUS_PER_NODE) -> str:
    """Return the axes of a topology as an HTML table. *Pure.*"""
    rows = [
        (
            fact.name,
            fact.kind,
            fact.size_text,
            fact.stride_text,
            f"{fact.group_count}",
            fact.first_text,
            "crosses" if fact.crosses_nodes else "inside",
        )
        for fact in facts(topology, gpus_per_node)
    ]
    heads = ("axis", "kind", "size", "stride", "groups", "first group", f"nodes of {gpus_per_node}")
    return html_table(heads, rows)


def html_table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows of text as an HTML table. *Pure.*"""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"
