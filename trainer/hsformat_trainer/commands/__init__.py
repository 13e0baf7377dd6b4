"""The commands that this package adds to ``hsformat`` (entry points of group ``hsformat.commands``).

Importing them brings no torch, so that ``hsformat --help`` stays quick.
"""
