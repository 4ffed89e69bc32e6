"""`make gpu-check`: what a real card does, measured step by step, beside what Festina takes it to do.

One file per step, each a plain function of a `Lab` that returns a struct. `run.py` runs them and keeps the
results; a step that cannot run says why, and the others go on.
"""
