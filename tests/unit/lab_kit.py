"""What a lab's runs leave behind, made by hand."""

from __future__ import annotations

import json
from pathlib import Path

from dualpath.config import Mode
from dualpath.report.lab.bounds import Busy
from dualpath.report.lab.results import NodeBytes, RunResult


def model_folder(folder: Path) -> str:
    """A model's description; 4096 bytes of KV a token."""
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
                "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 64, "intermediate_size": 512, "vocab_size": 49152,
                "tie_word_embeddings": True, "dtype": "float32", "hidden_act": "silu",
            }
        )
    )  # fmt: skip
    return str(folder)


def ran(mode: Mode, nodes: dict[str, int], repeat: int = 0, jct_s: float = 10.0) -> RunResult:
    """A run that was busy for ten seconds; bytes received by node, of which 4 % were headers."""
    return RunResult(
        case="1p1d", variant=mode.value, repeat=repeat, mode=mode.value, policy="",
        figures={"jct_s": jct_s, "failed": 0, "first_error": None, "tpot_s": 0.01},
        nics={name: NodeBytes(snic_rx_bytes=count, snic_tx_bytes=0, cnic_rx_bytes=0,
                              cnic_tx_bytes=0) for name, count in nodes.items()},
        snic_metric_bytes={name: count * 96 // 100 for name, count in nodes.items()},
        busy=Busy(seconds=10.0, share=0.9, read_bytes=nodes),
        snic_max_over_mean=None, bytes_error=None, ttft_split_s={}, cpu_s={},
    )  # fmt: skip
