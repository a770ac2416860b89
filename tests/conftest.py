"""Markers that need something of the machine."""

from __future__ import annotations

import importlib.util
import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what cannot run here."""
    no_root = pytest.mark.skip(reason="needs root")
    no_vllm = pytest.mark.skip(reason="vLLM is not installed: make setup")
    has_vllm = importlib.util.find_spec("vllm") is not None
    for item in items:
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(no_root)
        if item.get_closest_marker("e2e") and not has_vllm:
            item.add_marker(no_vllm)
