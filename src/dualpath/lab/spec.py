"""What a lab is asked for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dualpath.config import ConfigError, Mode, Role, engine_name

MAX_MBIT: Final = 400.0
"""NIXL over TCP is CPU-bound at 2.4-2.9 Gbit/s on two cores, all nodes together; above this a NIC
of the lab would not be what limits."""
MAX_NODES: Final = 64
_BYTES_PER_MBIT: Final = 1e6 / 8


@dataclass(frozen=True, slots=True)
class LabSpec:
    """A lab: nodes of one engine each.

    Attributes:
        model: folder of the model.
        prefill, decode: nodes of each role.
        snic_mbit, cnic_mbit: rates of every node's storage and compute NIC in each direction, in
            Mbit/s. 50 to 400 is one to eight, as a node of eight GPUs with a NIC each has it.
        mode: how KV is loaded at first.
        isolation: whether KV and model traffic are classes of their own on the compute network.
        layer_aliasing: whether a PE keeps only some layers' KV at a time. Without, every mode can
            be switched to while the engines run.
        tables: further tables of the cluster file, over the lab's own, field by field.

    Raises:
        ConfigError: a value makes no sense.
    """

    model: str
    prefill: int = 1
    decode: int = 1
    snic_mbit: float = 50.0
    cnic_mbit: float = 400.0
    mode: Mode = Mode.DUALPATH
    isolation: bool = True
    layer_aliasing: bool = False
    tables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            count = getattr(self, name)
            if not 1 <= count <= MAX_NODES:
                raise ConfigError(f"--{name}: {count} nodes; choose 1 to {MAX_NODES}")
        for name in ("snic_mbit", "cnic_mbit"):
            rate = getattr(self, name)
            if not 1 <= rate <= MAX_MBIT:
                raise ConfigError(
                    f"--{name.replace('_', '-')}: {rate:g} Mbit/s; choose 1 to {MAX_MBIT:g}: "
                    "above, the machine's cores would be the limit and not the NIC"
                )

    def nodes(self, role: Role) -> tuple[str, ...]:
        """Names of the nodes of a role, which are those of their engines."""
        count = self.prefill if role is Role.PREFILL else self.decode
        return tuple(engine_name(role, rank) for rank in range(count))

    @property
    def snic_bytes_per_s(self) -> float:
        """Rate of a storage NIC."""
        return self.snic_mbit * _BYTES_PER_MBIT

    @property
    def cnic_bytes_per_s(self) -> float:
        """Rate of a compute NIC."""
        return self.cnic_mbit * _BYTES_PER_MBIT

    @property
    def engines(self) -> tuple[str, ...]:
        """All nodes with an engine, prefill first."""
        return tuple(name for role in Role for name in self.nodes(role))
