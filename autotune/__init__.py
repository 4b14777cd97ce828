"""The autotuner: observe, decide, apply, verify.

It sees a pipeline only through observations, and changes it only through knobs;
README.md has an overview. Its modules are imported when they are used.
"""
