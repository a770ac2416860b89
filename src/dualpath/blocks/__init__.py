"""Block layout, keys and index. Pure."""

from dualpath.blocks.keys import KEY_BYTES, KeyRoot, chain_keys, extend_keys
from dualpath.blocks.layout import ALIGNMENT_BYTES, BlockLayout
from dualpath.blocks.trie import BlockTrie

__all__ = [
    "ALIGNMENT_BYTES",
    "KEY_BYTES",
    "BlockLayout",
    "BlockTrie",
    "KeyRoot",
    "chain_keys",
    "extend_keys",
]
