"""Extractors whose engine runs in a process of its own: vLLM, SGLang. Private to hsformat_extractors."""
