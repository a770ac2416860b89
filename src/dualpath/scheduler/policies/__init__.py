"""Scheduling policies: one class per file, found by the file's name (see ``registry``)."""
