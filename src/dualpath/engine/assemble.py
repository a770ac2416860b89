"""Puts an engine's parts together: buffers sized from the cluster file, store, peer agent,
traffic manager. No policy, no vLLM objects: only what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dualpath.blocks import BlockLayout
from dualpath.config import ClusterConfig, FrontConfig, NodeConfig, Role, engine_name
from dualpath.control.messages import (
    BufferInfo,
    EngineStats,
    Fingerprint,
    Hello,
    Message,
    PeerInfo,
)
from dualpath.storage import BlockStore, Limiter
from dualpath.transfer.agent import PeerAgent
from dualpath.transfer.hbm import DeviceCache, HostCopyEngine
from dualpath.transfer.manager import AttentionSource, TrafficManager
from dualpath.transfer.memory import Region
from dualpath.transfer.services import Arena, Services
from dualpath.transfer.slots import SlotPool


class BufferTooSmall(RuntimeError):
    """A configured buffer does not hold a single block."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What only the running engine knows about itself; see ``Hello`` and ``Fingerprint``."""

    role: Role
    rank: int
    incarnation: str
    pid: int
    host_id: str
    http_url: str
    model: str
    layout_id: str
    dtype: str
    max_batched_tokens: int


def layer_numbers(names: Iterable[str]) -> dict[str, int]:
    """Position of each layer by vLLM's name for it, in model order."""

    def order(name: str) -> tuple[int, str]:
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        return (numbers[0] if numbers else -1, name)

    return {name: position for position, name in enumerate(sorted(names, key=order))}


def traffic_manager(
    cluster: ClusterConfig,
    identity: EngineIdentity,
    cache: DeviceCache,
    *,
    keepalive: object,
    control: str,
    run_dir: Path,
    live_stats: Callable[[], dict[str, int]],
    attention: AttentionSource | None = None,
) -> TrafficManager:
    """The traffic manager of one engine, not started yet.

    Args:
        keepalive: owner of the cache's memory.
        control: ``host:port`` of the front's control server.
        run_dir: folder on this machine shared by the node's engines (NIC limit state).
        attention: what the engine's attention costs, for its reports; only PEs measure it.

    Raises:
        BufferTooSmall: a buffer holds no block.
    """
    node, _ = cluster.engines(identity.role)[identity.rank]
    layout = cache.layout
    buffer, staging = _arenas(cluster, identity.role, layout)
    name = engine_name(identity.role, identity.rank)
    hello = _hello(cluster, identity, node, name, layout, buffer)
    host, _, port = control.rpartition(":")

    def build(
        send: Callable[[Message], None], on_crash: Callable[[str], None]
    ) -> tuple[Services, bytes]:
        agent = PeerAgent(
            f"{name}/{identity.incarnation}",
            device=node.cnic.device,
            ports=node.cnic.ports,
            rate_bytes_s=node.cnic.rate,
        )
        agent.register(buffer.region)
        agent.register(staging.region)
        for address in cache.layer_addresses:
            nbytes = cache.num_blocks * cache.block_stride_bytes
            agent.register(Region.borrowed(address, nbytes, keepalive))
        store = BlockStore.open(
            cluster.storage.path,
            layout,
            io=cluster.storage.io,
            direct=cluster.storage.direct,
            fsync=cluster.storage.fsync,
            batch_blocks=cluster.storage.batch_blocks,
            read_limiter=Limiter.shared(run_dir, f"{node.name}-read", node.snic.read),
            write_limiter=Limiter.shared(run_dir, f"{node.name}-write", node.snic.write),
            capacity_bytes=cluster.storage.capacity,
        )
        services = Services(
            layout=layout,
            cache=cache,
            copy_engine=HostCopyEngine(),
            buffer=buffer,
            staging=staging,
            agent=agent,
            store=store,
            timeouts=cluster.timeouts,
            engine=cluster.engine,
            batch_blocks=cluster.storage.batch_blocks,
            send=send,
            on_crash=on_crash,
        )
        return services, agent.metadata()

    return TrafficManager(
        hello,
        build,
        FrontConfig(control_host=host, control_port=int(port)),
        live_stats,
        cluster.timeouts.connect,
        attention,
    )


def _hello(
    cluster: ClusterConfig,
    identity: EngineIdentity,
    node: NodeConfig,
    name: str,
    layout: BlockLayout,
    buffer: Arena,
) -> Hello:
    secret_file = cluster.security.control_secret_file
    return Hello(
        peer=PeerInfo(
            engine=name,
            incarnation=identity.incarnation,
            agent_metadata=b"",
            buffer=BufferInfo(
                base_address=buffer.region.address,
                slot_bytes=buffer.pool.slot_bytes,
                slots=buffer.pool.slots,
            ),
        ),
        role=identity.role.value,
        rank=identity.rank,
        node=node.name,
        pid=identity.pid,
        host_id=identity.host_id,
        http_url=identity.http_url,
        fingerprint=Fingerprint(
            model=identity.model,
            revision=cluster.model.revision,
            dtype=identity.dtype,
            num_layers=layout.num_layers,
            token_layer_bytes=layout.token_layer_bytes,
            block_tokens=layout.block_tokens,
            layout_id=identity.layout_id,
        ),
        max_batched_tokens=identity.max_batched_tokens,
        stats=EngineStats(),
        secret=Path(secret_file).read_text().strip() if secret_file else "",
    )


def _arenas(cluster: ClusterConfig, role: Role, layout: BlockLayout) -> tuple[Arena, Arena]:
    """The engine's buffer and its staging memory."""
    sizes = cluster.buffers
    if role is Role.PREFILL:
        landing_slot = layout.layer_block_bytes
        return (
            _arena(sizes.prefill, layout.slot_bytes, "buffers.prefill"),
            _arena(sizes.landing, landing_slot, "buffers.landing"),
        )
    return (
        _arena(sizes.decode, layout.slot_bytes, "buffers.decode"),
        _arena(sizes.persist, layout.slot_bytes, "buffers.persist"),
    )


def _arena(nbytes: int, slot_bytes: int, field: str) -> Arena:
    slots = nbytes // slot_bytes
    if not slots:
        raise BufferTooSmall(f"{field}: {nbytes} bytes hold no block of {slot_bytes} bytes")
    return Arena(Region(slots * slot_bytes), SlotPool(slots, slot_bytes, field))
