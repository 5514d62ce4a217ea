"""How the documentation becomes a site: `make docs` builds it into docs/_build/html, without a network.

Pages are MyST Markdown that reads as well on GitHub; the reference of the Python names is taken from their docstrings.
Warnings are errors and every reference has to resolve, except for names of other packages, whose documentation a
build without a network can't see.
"""

from __future__ import annotations

from typing import Any

from pygments.lexers.data import JsonLexer

from engine import __version__

project = "LongStraw"
copyright = "the LongStraw contributors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"LongStraw {release}"
html_show_sourcelink = False

myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
nitpick_ignore_regex = [("py:.*", r"(torch|transformers|networkx|nx|pathlib|collections|typing)\..*")]
nitpick_ignore = [
    ("py:class", "engine.device.Device"),  # engine.device.open_device makes one
    ("py:class", "TorchMachine"),  # only the runtime makes a StageContext
    ("py:class", "engine.authoring.Result"),  # a type variable
    ("py:class", "engine.hardware.Amount"),  # another
    ("py:class", "engine.journal.StageCommit"),  # a record of the journal, which has a page of its own
]


def setup(app: Any) -> None:
    """Colour JSON Lines as JSON."""
    app.add_lexer("jsonl", JsonLexer)
