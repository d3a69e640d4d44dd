"""Topologies as pictures, as text and as tables for people.

What a topology answers to code is in `topology`; loaded when a picture is asked for.
"""

from dualmesh.pictures.picture import Picture, draw
from dualmesh.pictures.text import draw_text

__all__ = ["Picture", "draw", "draw_text"]
