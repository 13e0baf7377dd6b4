from __future__ import annotations
class Evaluator:
    def __init__(self, *a): pass
    def __call__(self, parts, *, most): return None
