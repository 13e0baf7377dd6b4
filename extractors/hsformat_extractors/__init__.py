"""Extractors: one module an engine, each a class of :class:`hsformat.extraction.protocol.Extractor`.

They are found by entry point (group ``hsformat.extractors``) and loaded when asked for. Importing this package, or any
of its public modules, imports no engine and no torch.
"""
