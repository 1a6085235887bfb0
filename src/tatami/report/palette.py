"""The colours of all pictures and of the report page. One colour means one thing: no phase has the colour of a rank."""

from __future__ import annotations

MOSS = "#3f7256"
"""What is computed, and what a picture is about."""
OCHRE = "#d98b1f"
RUST = "#b5392f"
GREY = "#8a8a80"
"""What the others are compared with."""
EDGE = "#2b2a24"
STRAW_TO_MOSS = ("#f4ecd0", "#c3c98c", "#7f9f62", "#3f7256", "#1e4a45")
"""From slow to fast, or from little to much."""
LINES = (MOSS, "#2f6ca3", "#7b61a8", GREY)
"""Curves of one picture, in turn."""
RANKS = ("#2f6ca3", "#c8506b", "#7b61a8", "#3aa0b5", "#e28fb8", "#4a5f9e", "#8f949c", "#f0a690", "#b8a4d6", "#8fc1e8")
PHASES = {
    "forward": ("forward", "#a3c88f"),
    "tensor_parallel": ("tensor-parallel sums", "#ecc35c"),
    "backward": ("backward", "#5d9a68"),
    "gradients": ("gradient sums", "#c07a2c"),
    "update": ("update", "#2f6b4c"),
    "handover": ("hand-over", "#7a4a21"),
    "bubble": ("bubble", "#cbc6b4"),
}
"""By the name that records have: the standard word, and its colour (green: computing; yellow and brown: communication;
straw: a wait for other stages). The last two are of pipeline stages only."""


def ink_on(colour: str) -> str:
    """The colour of text on "#rrggbb": dark on light, light on dark, by the luminance of ITU-R BT.709."""
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return EDGE if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5 else "#ffffff"
