"""Paged key-value memory of the backbone, and attention over it.

One pool of pages serves every row of every song. A song reserves what it can need at most and gives it back
whole, so a song that started can't run out. Page 0 is scratch: padding lanes write there, and so does a song
that is stepped past its end before the host has read its stop flag. Songs never share pages with each other,
except the unconditional rows' prompt prefix, which is the same token run for every song.
"""

import copy
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from python_backend_models.engine.staging import to_device

try:  # older torch has no such module
    from torch.nn.attention.varlen import varlen_attn as _varlen_attn
except ImportError:
    _varlen_attn = None

_LOG = logging.getLogger(__name__)
SCRATCH_PAGE = 0
# Attention of unit noise is at most a few units; two kernels round it to bfloat16 in different orders.
_PAGED_KERNEL_TOLERANCE = 5e-2


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold this many tokens."""
    return -(-tokens // page_tokens)


class KVPool:
    """Keys and values of all layers in pages, with a free list.

    Args:
        config: `language_model/config.json`, for the layer and head sizes.
        pages: pages that songs can use; one more is kept as scratch.
        page_tokens: tokens in a page. The CUDA kernel wants a multiple of 256.
    """

    def __init__(
        self,
        config: dict[str, Any],
        *,
        pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (
            config["num_hidden_layers"],
            pages + 1,
            page_tokens,
            config["num_key_value_heads"],
            config["head_dim"],
        )
        # Zeroed, not empty: masked-out positions are multiplied by zero, and zero times a stray NaN is NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.page_tokens = page_tokens
        self.pages = pages
        self._free = list(range(1, pages + 1))

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def reserve(self, count: int) -> list[int]:
        """Take pages out of the free list, adjacent ones where there are enough in a row.

        Raises:
            ValueError: fewer than `count` are free; the caller checks `free_pages` first.
        """
        if count > len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} free")
        start = next(
            (
                i
                for i in range(len(self._free) - count + 1)
                if count and self._free[i + count - 1] - self._free[i] == count - 1
            ),
            0,
        )
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back. Their content is left as it is: every position is written before it is read."""
        self._free = sorted([*self._free, *pages])

    def store(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write tokens `[tokens, kv_heads, head_dim]` at flat slots (page * page_tokens + offset)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def read(self, layer: int, pages: Sequence[int], tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[tokens, kv_heads, head_dim]` of a row; a view where its pages are adjacent."""
        first, last = pages[0], pages[-1]
        whole = slice(first, last + 1) if last - first == len(pages) - 1 else list(pages)
        return (
            self.keys[layer, whole].flatten(0, 1)[:tokens],
            self.values[layer, whole].flatten(0, 1)[:tokens],
        )


def paged_kernel_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch has the variable-length kernel with block tables, for this device and dtype."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and _varlen_attn is not None
        and "block_table" in inspect.signature(_varlen_attn).parameters
    )


def bytes_per_page(config: dict[str, Any], page_tokens: int, dtype: torch.dtype) -> int:
    """Memory that one page takes over all layers."""
    width = config["num_key_value_heads"] * config["head_dim"]
    return 2 * config["num_hidden_layers"] * page_tokens * width * dtype.itemsize


class PrefillAttention:
    """Attention of one row's prompt chunk over its earlier tokens and itself, causally.

    Args:
        pages: the row's pages in order.
        first_position: position of the chunk's first token.
        tokens: in the chunk.
        paged: use the paged kernel, see `paged_kernel_works`.
    """

    def __init__(
        self,
        pool: KVPool,
        pages: Sequence[int],
        *,
        first_position: int,
        tokens: int,
        paged: bool = False,
    ) -> None:
        self.pool = pool
        self.end = first_position + tokens
        self.pages = list(pages[: pages_for(self.end, pool.page_tokens)])
        device = pool.keys.device
        self.table = to_device(self.pages, device, dtype=torch.int32)
        positions = torch.arange(first_position, self.end, device=device)
        self.slots = decode_slots(pool, self.table.expand(tokens, -1), positions)
        self.paged = paged
        if self.paged:
            self.query_starts = to_device([0, tokens], device, dtype=torch.int32)
            self.length = to_device([self.end], device, dtype=torch.int32)
        else:
            self.visible = torch.arange(self.end, device=device) <= positions.unsqueeze(1)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.pool.store(layer, self.slots, keys[0], values[0])
        if self.paged:
            attended = _varlen_attn(
                queries[0],
                self.pool.keys[layer],
                self.pool.values[layer],
                self.query_starts,
                None,
                queries.shape[1],
                self.end,
                window_size=(-1, 0),  # causal, aligned to the last key
                enable_gqa=True,
                seqused_k=self.length,
                block_table=self.table.unsqueeze(0),
                num_splits=1,
            )
            return attended.unsqueeze(0)
        all_keys, all_values = self.pool.read(layer, self.pages, self.end)
        attended = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            all_keys.transpose(0, 1).unsqueeze(0),
            all_values.transpose(0, 1).unsqueeze(0),
            attn_mask=self.visible,
            enable_gqa=True,
        )
        return attended.transpose(1, 2)


def decode_slots(pool: KVPool, tables: Tensor, positions: Tensor) -> Tensor:
    """Flat slots of one new token per row: tables `[rows, pages]` int32, positions `[rows]`."""
    page = tables.gather(1, (positions // pool.page_tokens).unsqueeze(1)).squeeze(1)
    return page.to(torch.int64) * pool.page_tokens + positions % pool.page_tokens


def _grouped(queries: Tensor, kv_heads: int) -> Tensor:
    """`[rows, 1, heads, head_dim]` as `[rows, kv_heads, group, head_dim]`.

    The heads that share a key-value head become the query axis of one attention, so keys and values are
    never repeated.
    """
    return queries.squeeze(1).unflatten(1, (kv_heads, -1))


class HostDecodeAttention:
    """One token per row, with the lengths known on the host: each song reads only its own pages.

    The plain path of a CPU. A song's result can't depend on its batch-mates, since they are never together in
    one attention call.

    Args:
        pages: per song the page lists of its two rows.
        lengths: tokens per song, the new one included; both rows of a song are equally long.
    """

    def __init__(
        self,
        pool: KVPool,
        slots: Tensor,
        pages: Sequence[tuple[Sequence[int], Sequence[int]]],
        lengths: Sequence[int],
    ) -> None:
        self.pool = pool
        self.slots = slots
        self.songs = [
            (*(row[: pages_for(length, pool.page_tokens)] for row in rows), length)
            for rows, length in zip(pages, lengths, strict=True)
        ]

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.pool.store(layer, self.slots, keys.squeeze(1), values.squeeze(1))
        grouped = _grouped(queries, keys.shape[2])
        attended = torch.empty_like(grouped)
        for song, (conditional, unconditional, length) in enumerate(self.songs):
            for row, pages in ((2 * song, conditional), (2 * song + 1, unconditional)):
                row_keys, row_values = self.pool.read(layer, pages, length)
                attended[row] = F.scaled_dot_product_attention(
                    grouped[row : row + 1],
                    row_keys.transpose(0, 1).unsqueeze(0),
                    row_values.transpose(0, 1).unsqueeze(0),
                )
        return attended.flatten(1, 2).unsqueeze(1)


class MaskedDecodeAttention:
    """One token per row, lengths on the device: every page of the tables is read and masked.

    Free of host reads, so it can be captured anywhere, but a step costs as much as the longest possible song.
    For graphs on a CUDA device without the paged kernel, and for proving capture safety on a CPU.

    Args:
        tables: `[rows, pages]` int32.
        lengths: `[rows]` int64, the new token included.
    """

    def __init__(self, pool: KVPool, slots: Tensor, tables: Tensor, lengths: Tensor) -> None:
        self.pool, self.slots, self.tables = pool, slots, tables.to(torch.int64)
        span = torch.arange(tables.shape[1] * pool.page_tokens, device=tables.device)
        self.visible = (span < lengths.unsqueeze(1))[:, None, None, :]

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.pool.store(layer, self.slots, keys.squeeze(1), values.squeeze(1))
        gathered = (
            store[layer][self.tables].flatten(1, 2).transpose(1, 2)
            for store in (self.pool.keys, self.pool.values)
        )
        attended = F.scaled_dot_product_attention(
            _grouped(queries, keys.shape[2]), *gathered, attn_mask=self.visible
        )
        return attended.flatten(1, 2).unsqueeze(1)


class PagedDecodeAttention:
    """One token per row through torch's variable-length kernel, which reads pages in place.

    A row reads its own length only, and `num_splits=1` makes its result independent of its batch-mates. With
    `max_k` constant, one captured graph serves every length. Arguments as in `MaskedDecodeAttention`.
    """

    def __init__(self, pool: KVPool, slots: Tensor, tables: Tensor, lengths: Tensor) -> None:
        self.pool, self.slots, self.tables = pool, slots, tables
        self.lengths = lengths.to(torch.int32)
        self.query_starts = torch.arange(tables.shape[0] + 1, dtype=torch.int32, device=tables.device)
        self.max_tokens = tables.shape[1] * pool.page_tokens

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.pool.store(layer, self.slots, keys.squeeze(1), values.squeeze(1))
        attended = _varlen_attn(
            queries.squeeze(1),
            self.pool.keys[layer],
            self.pool.values[layer],
            self.query_starts,
            None,
            1,
            self.max_tokens,
            enable_gqa=True,
            seqused_k=self.lengths,
            block_table=self.tables,
            num_splits=1,
        )
        return attended.unsqueeze(1)


@torch.inference_mode()
def paged_kernel_works(pool: KVPool, heads: int) -> bool:
    """Try the paged kernel on this device against the masked path; log what is wrong if it doesn't agree.

    Kernels exist for some page sizes, head widths and devices only, and say so no sooner than when called.
    """
    if not paged_kernel_available(pool.keys.device, pool.keys.dtype):
        return False
    device, dtype = pool.keys.device, pool.keys.dtype
    rows, (kv_heads, head_dim) = 2, pool.keys.shape[-2:]
    generator = torch.Generator(device).manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    # A pool of its own with one layer: a short row, and one that ends within its second page.
    trial = copy.copy(pool)
    trial.keys, trial.values = (noise(1, 5, pool.page_tokens, kv_heads, head_dim) for _ in range(2))
    tables = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=device)
    lengths = torch.tensor([5, pool.page_tokens + 3], device=device)
    slots = decode_slots(trial, tables, lengths - 1)
    inputs = (
        noise(rows, 1, heads, head_dim),
        noise(rows, 1, kv_heads, head_dim),
        noise(rows, 1, kv_heads, head_dim),
    )
    expected = MaskedDecodeAttention(trial, slots, tables, lengths)(0, *inputs).float()
    try:
        found = PagedDecodeAttention(trial, slots, tables, lengths)(0, *inputs).float()
        difference = (found - expected).abs().max().item()
    except (RuntimeError, TypeError) as error:
        _LOG.warning("the paged attention kernel doesn't run here, reading whole tables instead: %s", error)
        return False
    if not difference <= _PAGED_KERNEL_TOLERANCE:
        _LOG.warning("the paged attention kernel is off by %.1e, reading whole tables instead", difference)
        return False
    return True


@dataclass
class SharedPrefix:
    """Pages of the unconditional rows' common prompt prefix, filled once and used by every song.

    Page j holds the same tokens at the same positions for every song whose prefix reaches past it, so it is
    computed by whoever needs it first, page by page, whatever the song: the bits don't depend on the order.
    """

    pool: KVPool
    pages: list[int] = field(default_factory=list)
    users: list[int] = field(default_factory=list)
    filled: int = 0

    def full_pages(self, prompt_tokens: int) -> int:
        """Pages of a prompt of this many tokens that can be shared: its last two tokens differ."""
        return (prompt_tokens - 2) // self.pool.page_tokens

    def acquire(self, count: int) -> list[int]:
        """Count the caller as a user of the first `count` pages, reserving those that are new."""
        missing = count - len(self.pages)
        if missing > 0:
            self.pages += self.pool.reserve(missing)
            self.users += [0] * missing
        for page in range(count):
            self.users[page] += 1
        return self.pages[:count]

    def release(self, count: int) -> None:
        """Undo one `acquire(count)`; pages stay filled for the next song."""
        for page in range(count):
            self.users[page] -= 1

    def evict(self) -> None:
        """Give the pages that no song uses back to the pool."""
        used = sum(1 for users in self.users if users)
        self.pool.release(self.pages[used:])
        del self.pages[used:], self.users[used:]
        self.filled = min(self.filled, used)

    @property
    def idle_pages(self) -> int:
        """Pages that no song uses, kept filled until somebody needs the room."""
        return self.users.count(0)

    @property
    def shared_now(self) -> int:
        """Pages that songs would hold in copies if they were not shared."""
        return sum(max(0, users - 1) for users in self.users)
