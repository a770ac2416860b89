"""From a policy's name to the policy.

A policy is the class ``Policy`` in ``policies/<kind>_<name>.py``; kinds are ``prefill``, ``decode``
and ``path``. Its module is imported when a scheduler that uses it is built. A new policy is
therefore one new file, and nothing else has to know of it.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from dualpath.scheduler import policies
from dualpath.scheduler.policies.protocols import DecodePolicy, PrefillPolicy, ReadPathPolicy
from dualpath.scheduler.settings import SchedulerSettings


def policy_names(kind: str) -> list[str]:
    """Names of the policies of a kind (``prefill``, ``decode``, ``path``), sorted."""
    prefix = f"{kind}_"
    return sorted(
        module.name.removeprefix(prefix)
        for module in pkgutil.iter_modules(policies.__path__)
        if module.name.startswith(prefix)
    )


def build(settings: SchedulerSettings) -> tuple[PrefillPolicy, DecodePolicy, ReadPathPolicy]:
    """Fresh policies for one scheduler.

    Raises:
        ValueError: a name is unknown; the message lists the known ones.
    """
    chosen = settings.policies
    prefill: type[PrefillPolicy] = _load("prefill", chosen.prefill)
    decode: type[DecodePolicy] = _load("decode", chosen.decode)
    read_path: type[ReadPathPolicy] = _load("path", chosen.read_path)
    return prefill(settings), decode(settings), read_path(settings)


def _load(kind: str, name: str) -> Any:
    known = policy_names(kind)
    if name not in known:
        raise ValueError(f"no {kind} policy is called {name!r}; there are: {', '.join(known)}")
    return importlib.import_module(f"{policies.__name__}.{kind}_{name}").Policy
