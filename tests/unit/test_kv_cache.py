"""Paged keys and values: bookkeeping against a model, attention against softmax over plain tensors."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from python_backend_models.engine.kv_cache import (
    SCRATCH_PAGE,
    HostDecodeAttention,
    KVPool,
    MaskedDecodeAttention,
    PrefillAttention,
    SharedPrefix,
    bytes_per_page,
    decode_slots,
    paged_kernel_available,
    pages_for,
)

LAYERS, KV_HEADS, HEADS, HEAD_DIM, PAGE = 2, 2, 6, 8, 4
CONFIG = {"num_hidden_layers": LAYERS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}


def make_pool(pages: int = 40, dtype: torch.dtype = torch.float32) -> KVPool:
    return KVPool(CONFIG, pages=pages, page_tokens=PAGE, dtype=dtype, device="cpu")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shuffled(pool: KVPool, count: int, *, seed: int) -> list[int]:
    """Pages in no order, as a pool hands them out after many songs."""
    pages = pool.reserve(count)
    return [pages[i] for i in torch.randperm(count, generator=torch.Generator().manual_seed(seed))]


def plain_attention(queries: Tensor, keys: Tensor, values: Tensor, *, first_position: int) -> Tensor:
    """Causal softmax attention in float64: queries `[tokens, heads, dim]` at `first_position` and on."""
    group = queries.shape[1] // keys.shape[1]
    wide_keys, wide_values = (part.double().repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), wide_keys) / math.sqrt(queries.shape[-1])
    at = torch.arange(first_position, first_position + len(queries)).unsqueeze(1)
    weights = scores.masked_fill(torch.arange(len(keys)) > at, -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, wide_values)


# --------------------------------------------------------------------- pool


@given(tokens=st.integers(0, 500), page_tokens=st.integers(1, 64))
def test_pages_for(tokens: int, page_tokens: int) -> None:
    pages = pages_for(tokens, page_tokens)
    assert pages * page_tokens >= tokens > (pages - 1) * page_tokens


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_no_page_has_two_owners_and_none_is_lost(steps: list[tuple[bool, int]]) -> None:
    pool = make_pool(20)
    owned: list[list[int]] = []
    for take, number in steps:
        if take and number <= pool.free_pages:
            owned.append(pool.reserve(number))
            assert len(owned[-1]) == number
        elif not take and owned:
            pool.release(owned.pop(number % len(owned)))
        held = [page for pages in owned for page in pages]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(1, 21))
        assert SCRATCH_PAGE not in held
        assert pool.free_pages == 20 - len(held)


def test_adjacent_pages_are_preferred() -> None:
    """They are read as a view instead of gathered."""
    pool = make_pool(12)
    first, second, third = (pool.reserve(3) for _ in range(3))
    pool.release(first)
    pool.release(third)
    assert pool.reserve(4) == [7, 8, 9, 10]
    assert pool.reserve(3) == [1, 2, 3]
    assert second == [4, 5, 6]


def test_more_than_is_free_is_refused_and_nothing_is_taken() -> None:
    pool = make_pool(4)
    pool.reserve(2)
    with pytest.raises(ValueError, match="3 pages asked for, 2 free"):
        pool.reserve(3)
    assert pool.free_pages == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_a_page(dtype: torch.dtype) -> None:
    pool = make_pool(9, dtype)
    memory = sum(part.numel() * part.element_size() for part in (pool.keys, pool.values))
    assert memory == 10 * bytes_per_page(CONFIG, PAGE, dtype)
    official = {"num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128}
    assert bytes_per_page(official, 256, torch.bfloat16) == 256 * 144 * 1024


@pytest.mark.parametrize("scattered", [True, False])
def test_what_is_stored_is_read(scattered: bool) -> None:
    pool = make_pool()
    pages = shuffled(pool, 5, seed=1) if scattered else pool.reserve(5)
    keys, values = normal(2, LAYERS, 18, KV_HEADS, HEAD_DIM, seed=2)
    slots = torch.tensor([pages[p // PAGE] * PAGE + p % PAGE for p in range(18)])
    for layer in range(LAYERS):
        pool.store(layer, slots, keys[layer], values[layer])
    for layer in range(LAYERS):
        for tokens in (1, 4, 17, 18):
            covered = pages[: pages_for(tokens, PAGE)]
            got_keys, got_values = pool.read(layer, covered, tokens)
            assert torch.equal(got_keys, keys[layer, :tokens])
            assert torch.equal(got_values, values[layer, :tokens])
    untouched = [page for page in range(41) if page not in pages]
    assert not pool.keys[:, untouched].any()


def test_slots_of_new_tokens() -> None:
    pool = make_pool()
    tables = torch.tensor([[3, 9, 1], [7, 2, 5], [4, 4, 8]], dtype=torch.int32)
    positions = torch.tensor([0, 6, 11])
    assert decode_slots(pool, tables, positions).tolist() == [3 * PAGE, 2 * PAGE + 2, 8 * PAGE + 3]


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("chunks", [(19,), (1, 18), (4, 4, 4, 7), (3, 1, 9, 6)])
def test_prompt_chunks_attend_like_the_whole_prompt(chunks: Sequence[int]) -> None:
    pool = make_pool()
    pool.keys.fill_(7.0)  # of a song before
    pool.values.fill_(-9.0)
    pages = shuffled(pool, 6, seed=3)
    queries = normal(LAYERS, 1, 19, HEADS, HEAD_DIM, seed=4)
    keys, values = normal(2, LAYERS, 1, 19, KV_HEADS, HEAD_DIM, seed=5)
    start = 0
    for tokens in chunks:
        attend, end = PrefillAttention(pool, pages, first_position=start, tokens=tokens), start + tokens
        for layer in range(LAYERS):
            part = (layer, slice(None), slice(start, end))
            got = attend(layer, queries[part], keys[part], values[part])
            expected = plain_attention(
                queries[layer, 0, start:end],
                keys[layer, 0, :end],
                values[layer, 0, :end],
                first_position=start,
            )
            torch.testing.assert_close(got[0].double(), expected, rtol=0, atol=1e-5)
        start = end


class Songs:
    """Two rows per song with random histories of different lengths, in a pool full of other numbers."""

    def __init__(self, lengths: Sequence[int], *, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.lengths = lengths
        self.pool = make_pool(80, dtype)
        self.pool.keys.copy_(50 * normal(*self.pool.keys.shape, seed=seed))
        self.pool.values.copy_(50 * normal(*self.pool.values.shape, seed=seed + 1))
        self.pages = [
            tuple(shuffled(self.pool, pages_for(length, PAGE), seed=seed + row) for row in range(2))
            for length in lengths
        ]
        self.rows = [(pages, n) for both, n in zip(self.pages, lengths, strict=True) for pages in both]
        self.keys = [
            normal(LAYERS, n, KV_HEADS, HEAD_DIM, seed=seed + 10 + i).to(dtype) for i, (_, n) in self.each
        ]
        self.values = [
            normal(LAYERS, n, KV_HEADS, HEAD_DIM, seed=seed + 90 + i).to(dtype) for i, (_, n) in self.each
        ]
        self.queries = normal(LAYERS, len(self.rows), 1, HEADS, HEAD_DIM, seed=seed + 2).to(dtype)
        for i, (pages, length) in self.each:
            slots = torch.tensor(
                [pages[p // PAGE] * PAGE + p % PAGE for p in range(length - 1)], dtype=torch.int64
            )
            for layer in range(LAYERS):
                self.pool.store(layer, slots, self.keys[i][layer, :-1], self.values[i][layer, :-1])
        width = max(len(pages) for pages, _ in self.rows) + 2
        self.tables = torch.tensor(
            [[*pages, *[SCRATCH_PAGE] * (width - len(pages))] for pages, _ in self.rows], dtype=torch.int32
        )
        self.row_lengths = torch.tensor([length for _, length in self.rows])
        self.slots = decode_slots(self.pool, self.tables, self.row_lengths - 1)

    @property
    def each(self) -> list[tuple[int, tuple[list[int], int]]]:
        return list(enumerate(self.rows))

    def attended(self, attend: HostDecodeAttention | MaskedDecodeAttention, layer: int) -> Tensor:
        new_keys, new_values = (
            torch.stack([row[layer, -1:] for row in part]) for part in (self.keys, self.values)
        )
        got = attend(layer, self.queries[layer], new_keys, new_values)
        assert got.shape == (len(self.rows), 1, HEADS, HEAD_DIM)
        return got[:, 0]

    def expected(self, layer: int) -> Tensor:
        return torch.cat(
            [
                plain_attention(
                    self.queries[layer, i], self.keys[i][layer], self.values[i][layer], first_position=n - 1
                )
                for i, (_, n) in self.each
            ]
        )

    def host(self) -> HostDecodeAttention:
        return HostDecodeAttention(self.pool, self.slots, self.pages, self.lengths)

    def masked(self) -> MaskedDecodeAttention:
        return MaskedDecodeAttention(self.pool, self.slots, self.tables, self.row_lengths)


@pytest.mark.parametrize("lengths", [(1,), (4,), (5,), (9, 30, 1, 16, 23)])
@pytest.mark.parametrize("kind", ["host", "masked"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_a_new_token_attends_to_its_own_row(
    lengths: Sequence[int], kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    songs = Songs(lengths, seed=20, dtype=dtype)
    attend = getattr(songs, kind)()
    for layer in range(LAYERS):
        got = songs.attended(attend, layer)
        torch.testing.assert_close(got.double(), songs.expected(layer), rtol=0, atol=tolerance)


def test_on_the_host_a_song_is_bit_equal_in_any_company() -> None:
    songs = Songs((9, 30, 16), seed=40)
    together = songs.attended(songs.host(), 0)
    for song in range(3):
        rows = slice(2 * song, 2 * song + 2)
        alone = HostDecodeAttention(
            songs.pool, songs.slots[rows], songs.pages[song : song + 1], songs.lengths[song : song + 1]
        )
        keys, values = (
            torch.stack([row[0, -1:] for row in part[rows]]) for part in (songs.keys, songs.values)
        )
        assert torch.equal(alone(0, songs.queries[0, rows], keys, values)[:, 0], together[rows])


def test_there_is_no_paged_kernel_on_a_cpu() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert not paged_kernel_available(torch.device("cpu"), dtype)


# ------------------------------------------------------------ shared prefix


def test_shared_pages_leave_out_the_two_tokens_that_end_a_prompt() -> None:
    """A page of the twin may be shared if it lies wholly before them; the song's own tokens come after."""
    prefix = SharedPrefix(make_pool())
    for tokens in range(4, 60):
        pages = prefix.full_pages(tokens)
        assert pages * PAGE <= tokens - 2 < (pages + 1) * PAGE


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["acquire", "release", "evict"]), st.integers(0, 7)), max_size=60))
def test_shared_pages_are_counted_once(steps: list[tuple[str, int]]) -> None:
    pool = make_pool(20)
    prefix = SharedPrefix(pool)
    users: list[int] = []
    for what, number in steps:
        if what == "acquire":
            pages = prefix.acquire(number)
            users.append(number)
            assert pages == prefix.pages[:number]
        elif what == "release" and users:
            prefix.release(users.pop(number % len(users)))
        elif what == "evict":
            prefix.filled = len(prefix.pages)
            prefix.evict()
            assert len(prefix.pages) == prefix.filled == max(users, default=0)
        assert len(set(prefix.pages)) == len(prefix.pages) >= max(users, default=0)
        assert pool.free_pages == 20 - len(prefix.pages)
        in_copies = sum(users)
        assert prefix.shared_now == in_copies - max(users, default=0)
