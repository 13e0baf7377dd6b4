"""The specification as data: JSON schemas and documents generated from the code, one module a format version."""
