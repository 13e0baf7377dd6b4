"""Evaluation: acceptance by position, and by walking a record as an engine does."""
