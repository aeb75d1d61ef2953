"""Draws what `Manager.snapshot()` saw over time: who held which frame of each tier at each step.

    samples = []
    while engine.busy:
        engine.step()
        samples.append(manager.snapshot())
    picture.write_png(samples, "out/blocks.png")      # needs matplotlib
    picture.write_html(samples, "out/blocks.html")    # one file, opens without a network

One column is one sample, one line is one frame. Nothing here touches a Manager.
"""

from kvmem.picture.html import write_html
from kvmem.picture.png import write_png
from kvmem.picture.timeline import Timeline

__all__ = ["Timeline", "write_html", "write_png"]
