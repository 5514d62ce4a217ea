"""One colour for each kind of stage, the same in every picture of a plan."""

from __future__ import annotations

from collections.abc import Iterable

# Okabe and Ito's palette, made to be told apart with any colour vision (https://jfly.uni-koeln.de/color/).
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#b59f00", "#7f7f7f")
MOVES = {"spill": "#8c6d5a", "fetch": "#b59a8b"}
OUTLINE = "#808080"


def colours_of(kinds: Iterable[str]) -> dict[str, str]:
    """Return a colour for each kind, in the order in which they come; moves have their own."""
    plain = [kind for kind in dict.fromkeys(kinds) if kind not in MOVES]
    return {**{kind: PALETTE[index % len(PALETTE)] for index, kind in enumerate(plain)}, **MOVES}
