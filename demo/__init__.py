"""`penstock demo`: train on photos that are slow to read, then let autotune fix that.

story.py    the course of the demo, its training loop, and its output
lesson.py   the photos, the pipeline and the network
"""

from .story import tell

__all__ = ["tell"]
