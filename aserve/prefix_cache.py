"""Which device blocks hold the KV of which token prefix.

A block's name is a 128-bit hash chained over everything before it, so equal names mean equal KV. block_manager.py alone
holds a PrefixCache; residency.py builds the HashChains. Nothing here counts references or moves data.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct

DIGEST_BYTES = 16
_EMPTY = blake2b(digest_size=DIGEST_BYTES)  # copying it is quicker than making one


def root_hash(**keys: str | None) -> bytes:
    """The parent of a first block. Each extra key is tagged by its kind: an adapter X never meets a salt X."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for kind in sorted(keys):
        value = keys[kind]
        if value is not None:
            text = value.encode("utf-8", "surrogatepass")
            digest.update(f"{kind}:{len(text)}:".encode() + text)
    return digest.digest()


class HashChain:
    """The block names of one sequence, computed as far as someone asked: hashing a long prompt is spread over steps."""

    __slots__ = ("_block_size", "_pack", "_root", "hashes")

    def __init__(self, root: bytes, block_size: int) -> None:
        self._root = root
        self._block_size = block_size
        self._pack = Struct(f"{block_size}q").pack
        self.hashes: list[bytes] = []

    def extend(self, prompt: Sequence[int], output: Sequence[int], num_blocks: int) -> list[bytes]:
        """Names the first `num_blocks` blocks of prompt + output (all full). Returns `hashes`, maybe longer."""
        hashes = self.hashes
        size = self._block_size
        for index in range(len(hashes), num_blocks):
            parent = hashes[-1] if index else self._root
            tokens = slice_tokens(prompt, output, index * size, (index + 1) * size)
            digest = _EMPTY.copy()
            digest.update(parent + self._pack(*tokens))
            hashes.append(digest.digest())
        return hashes

    def adopt(self, other: HashChain, num_blocks: int) -> None:
        """Takes over the names of `num_blocks` blocks that both sequences begin with, as far as `other` knows them."""
        if len(self.hashes) < num_blocks:
            self.hashes = other.hashes[:num_blocks]


def slice_tokens(prompt: Sequence[int], output: Sequence[int], start: int, end: int) -> tuple[int, ...]:
    """(prompt + output)[start:end] without joining them."""
    length = len(prompt)
    if end <= length:
        return tuple(prompt[start:end])
    if start >= length:
        return tuple(output[start - length : end - length])
    return (*prompt[start:], *output[: end - length])


class PrefixCache:
    """Names of blocks, and the blocks that nobody references but whose KV may be used again, oldest first.

    Invariant: names and blocks are one to one; an idle block has a name.
    """

    __slots__ = ("_block_of", "_idle", "_name_of")

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._block_of)

    @property
    def num_idle(self) -> int:
        """Cached blocks that may be evicted."""
        return len(self._idle)

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached beginning of `names`."""
        blocks = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def has_block(self, block: int) -> bool:
        """True where the block has a name: its content must not change."""
        return block in self._name_of

    def is_idle(self, block: int) -> bool:
        """True where the block is cached and nobody references it."""
        return block in self._idle

    def publish(self, block: int, name: bytes) -> None:
        """Names a referenced block. The first block of a name keeps it."""
        if name not in self._block_of and block not in self._name_of:
            self._block_of[name] = block
            self._name_of[block] = name

    def withdraw(self, block: int) -> None:
        """A referenced block loses its name, if it has one."""
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._block_of[name]

    def rest(self, block: int) -> bool:
        """The last reference is gone. Returns False where the block has no name and so is plainly free."""
        if block not in self._name_of:
            return False
        self._idle[block] = None
        return True

    def revive(self, block: int) -> None:
        """An idle block gets a reference again."""
        del self._idle[block]

    def evict(self) -> int:
        """Takes the block idle longest, and its name with it."""
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._name_of.pop(block)]
        return block

    def clear(self) -> list[int]:
        """Forgets every name. Returns the blocks that were idle: they are plainly free now."""
        idle = list(self._idle)
        self._block_of.clear()
        self._name_of.clear()
        self._idle.clear()
        return idle

    def check_invariants(self) -> None:
        """Raises AssertionError where names, blocks and the idle list disagree."""
        assert len(self._block_of) == len(self._name_of), "a name without a block, or two blocks of one name"
        for name, block in self._block_of.items():
            assert self._name_of.get(block) == name, f"block {block} is cached under a name it does not have"
        for block in self._idle:
            assert block in self._name_of, f"block {block} is idle but has no name"
