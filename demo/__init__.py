"""`penstock demo`: train on photos that are slow to read, then let autotune mend it.

story.py    what happens, in order, and the figures it ends with
lesson.py   what is trained: the photos, the pipeline, the network
window.py   the loop: a second or so of training, and how it went
screen.py   where it is told: progress on a terminal, plain lines elsewhere
"""

from .story import tell

__all__ = ["tell"]
