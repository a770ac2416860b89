"""Why storage bandwidth runs short: compute grew faster than the network of a machine.

Peaks are NVIDIA's data-sheet figures of dense matrix arithmetic in the lowest precision that the
generation's tensor cores have for it (A100: BF16, as its INT8/INT4 are no floating point; H100:
FP8; B200: FP4), networks those of NVIDIA's own eight-GPU machine of the generation, one NIC a GPU.
arXiv 2602.21548 quotes a fall of I/O per computation by 14.4 from Ampere to Blackwell; with these
figures it comes out so (with B200's FP8 peak it would be 7.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of accelerators.

    Attributes:
        name, gpu: the architecture and its data-centre part.
        precision: of ``pflops``.
        pflops: dense peak of a GPU, 1e15 FLOP/s.
        nic_gbps: network of a GPU, Gbit/s.
        hbm_gb: GPU memory, 1e9 bytes.
        source: documents the figures are from.
    """

    name: str
    gpu: str
    precision: str
    pflops: float
    nic_gbps: float
    hbm_gb: float
    source: str

    @property
    def gb_per_pflop(self) -> float:
        """GB (1e9 bytes) the network brings while the GPU computes a PFLOP at its peak."""
        return self.nic_gbps / 8 / self.pflops


GENERATIONS: Final[tuple[Generation, ...]] = (
    Generation(
        "Ampere", "A100 SXM", "BF16", 0.312, 200, 80,
        "NVIDIA A100 80GB data sheet (2021); NVIDIA DGX A100 data sheet (HDR InfiniBand)",
    ),
    Generation(
        "Hopper", "H100 SXM", "FP8", 1.979, 400, 80,
        "NVIDIA H100 data sheet (2023; 3,958 TFLOPS with sparsity, halved); NVIDIA DGX H100 data "
        "sheet (ConnectX-7)",
    ),
    Generation(
        "Blackwell", "B200 SXM", "FP4", 9.0, 400, 180,
        "NVIDIA DGX B200 data sheet (2024; 144 PFLOPS FP4 of eight GPUs with sparsity, halved; "
        "ConnectX-7)",
    ),
)  # fmt: skip


def decline(first: str = "Ampere", last: str = "Blackwell") -> float:
    """How many times less I/O a computation finds in ``last`` than in ``first``.

    Raises:
        KeyError: no such generation.
    """
    by_name = {generation.name: generation for generation in GENERATIONS}
    return by_name[first].gb_per_pflop / by_name[last].gb_per_pflop
