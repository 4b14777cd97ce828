"""`penstock demo`: train on photos that are slow to read, then let autotune mend it.

story.py    what happens, in order; the loop that is measured; and what is printed
lesson.py   what is trained: the photos, the pipeline, the network
"""

from .story import tell

__all__ = ["tell"]
