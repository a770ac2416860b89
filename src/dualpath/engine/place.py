"""Which engine of which cluster this process is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dualpath.config import Role
from dualpath.engine.identity import UnsupportedEngine

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config``: which engine of which cluster this is."""

    config_file: str
    role: Role
    rank: int
    http_url: str
    control: str
    run_dir: str


def place_of(vllm_config: VllmConfig) -> Place:
    """This engine's place, from what vLLM was started with.

    Raises:
        UnsupportedEngine: it is not there, or not right.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        raise UnsupportedEngine("kv_transfer_config is missing")
    try:
        return msgspec.convert(transfer.kv_connector_extra_config, Place)
    except msgspec.ValidationError as error:
        raise UnsupportedEngine(f"kv_connector_extra_config: {error}") from None
