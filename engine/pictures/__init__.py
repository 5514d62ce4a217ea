"""What a plan and a run look like: the graph in a terminal, as an image, and in a report of one HTML file.

`collapse` makes a graph that a person can read of a plan of any size; `layout` gives it places; `terminal`, `image`
and `page` draw it. `series` makes curves and bars of a recording small enough to draw, `figures` draws them.

Imports engine only. plotly and matplotlib (the ``report`` extra) are imported inside the functions that draw with
them; nothing here imports torch.
"""
