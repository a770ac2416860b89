"""What the front tells both engines about a try: its blocks' names and how many are stored."""

from __future__ import annotations

from functools import lru_cache

from dualpath.blocks import BlockLayout, KeyRoot, chain_keys
from dualpath.control.messages import Fingerprint, SessionSpec
from dualpath.serve.turn import Services, Turn


def session_spec(
    services: Services, turn: Turn, number: int, fingerprint: Fingerprint
) -> SessionSpec:
    """The spec of try ``number``, with the hit as the index sees it now.

    While a weight epoch is wanted but not durable, nothing is hit and nothing is written.
    """
    tenant = turn.tenant
    salt = turn.call.body.get("cache_salt")
    if salt is not None:
        tenant = f"{len(tenant)}:{tenant}:{salt}"  # no other pair gives the same text
    root = KeyRoot(
        model=fingerprint.model,
        revision=fingerprint.revision,
        weight_epoch=services.epoch.number,
        dtype=fingerprint.dtype,
        num_layers=fingerprint.num_layers,
        block_tokens=fingerprint.block_tokens,
        token_layer_bytes=fingerprint.token_layer_bytes,
        layout_id=fingerprint.layout_id,
        tp_size=fingerprint.tp_size,
        tenant=tenant,
    )
    digest = _digest(root)
    keys = chain_keys(digest, turn.prompt_ids, fingerprint.block_tokens)
    most = layout_of(fingerprint).max_hit_blocks(len(turn.prompt_ids))
    settled = services.epoch.settled
    return SessionSpec(
        rid=turn.rid,
        attempt=number,
        root=digest,
        keys=keys,
        prompt_tokens=len(turn.prompt_ids),
        hit_blocks=services.index.hit_blocks(digest, keys, most) if settled else 0,
        persist=turn.plan.persist and settled,
        layerwise=turn.plan.layerwise,
        bypass=turn.plan.bypass,
        deadline_s=turn.left_s + services.config.timeouts.durable,
    )


@lru_cache(maxsize=1024)
def _digest(root: KeyRoot) -> bytes:
    return root.digest()


@lru_cache(maxsize=8)
def layout_of(fingerprint: Fingerprint) -> BlockLayout:
    """Geometry of the stored blocks."""
    return BlockLayout(
        num_layers=fingerprint.num_layers,
        block_tokens=fingerprint.block_tokens,
        engine_block_tokens=fingerprint.block_tokens,
        token_layer_bytes=fingerprint.token_layer_bytes,
    )
