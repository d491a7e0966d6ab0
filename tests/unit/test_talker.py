"""The talker engine against the plain sequential loop, alone and in company."""

import pytest
import torch

from python_backend_models import chunking, offline, sampling
from python_backend_models.engine.runner import FrameRunner
from python_backend_models.engine.talker import (
    CapacityError,
    EmptySongError,
    NonFiniteError,
    Phase,
    SongError,
    SongPlan,
    TalkerEngine,
    WindowResult,
    ring_frames,
)
from tests.small_models import small_backbone, small_depth_decoder

BACKBONE, DEPTH = small_backbone(), small_depth_decoder()
Songs = dict[int, list[WindowResult] | SongError]


def plan(seed: int, *, tokens: int = 40, max_frames: int = 30, profile: str = "vllm-omni") -> SongPlan:
    generator = torch.Generator().manual_seed(seed)
    prompt = [151644, *torch.randint(0, 5000, (tokens - 3,), generator=generator).tolist(), 151645, 151669]
    twin = [151644, *[151654] * (tokens - 3), 151645, 151669]
    return SongPlan(
        prompt,
        twin,
        sampling.ar_draw_seed(seed, profile=profile),
        max_frames,
        lead_in_frames=sampling.lead_in_frames(profile),
    )


def make_engine(
    *,
    slots: int = 8,
    pages: int = 600,
    page_tokens: int = 8,
    backbone=BACKBONE,
    run_ahead: int = 1,
    **options,
) -> TalkerEngine:
    runner = FrameRunner(
        backbone,
        DEPTH,
        slots=slots,
        pages=pages,
        page_tokens=page_tokens,
        ring_frames=ring_frames(run_ahead),
    )
    return TalkerEngine(runner, run_ahead_windows=run_ahead, **options)


def collect(
    engine: TalkerEngine, keys: list[int], *, steps: int = 5000
) -> dict[int, list[WindowResult] | SongError]:
    """Ask for every window of every song as soon as the one before it has come; release songs that end."""
    songs: Songs = {key: [] for key in keys}
    for key in keys:
        engine.request_window(key)
    open_songs = set(keys)
    for _ in range(steps):
        deliveries, _ = engine.step()
        for key, result in deliveries:
            if isinstance(result, SongError):
                songs[key] = result
            else:
                songs[key].append(result)
                if result.finish_reason is None:
                    engine.request_window(key)
                    continue
            open_songs.discard(key)
            engine.release(key)
        if not open_songs:
            return songs
    raise AssertionError(f"songs {open_songs} did not end")


def joined(windows: list[WindowResult]) -> tuple[torch.Tensor, torch.Tensor]:
    codes, hidden = [], []
    for result in windows:
        hop = len(result.codes) if result.window.is_last else 100
        codes.append(result.codes[:hop])
        hidden.append(result.hidden[:hop])
    return torch.cat(codes), torch.cat(hidden)


def solo(song: SongPlan, *, seed: int | None = None, profile: str = "vllm-omni", backbone=BACKBONE):
    return offline.write_frames(
        backbone,
        DEPTH,
        song.prompt,
        song.twin,
        seed=song.draw_seed if seed is None else seed,
        max_frames=song.max_frames,
        profile=profile,
    )


@pytest.mark.parametrize(
    ("max_frames", "profile"),
    [(1, "vllm-omni"), (200, "vllm-omni"), (301, "vllm-omni"), (1, "sglang-omni"), (201, "sglang-omni")],
)
def test_windows_equal_the_plain_loop(max_frames: int, profile: str) -> None:
    song = plan(3, max_frames=max_frames, profile=profile)
    engine = make_engine()
    engine.admit(1, song)
    windows = collect(engine, [1])[1]
    codes, hidden, reason = solo(song, seed=3, profile=profile)
    assert [r.window for r in windows] == chunking.windows(max_frames)
    assert windows[-1].finish_reason == reason == "length"
    got_codes, got_hidden = joined(windows)
    assert torch.equal(got_codes, codes)
    # The plain loop runs the twin's prompt in one piece, the engine page by page: same sums, other order.
    torch.testing.assert_close(got_hidden, hidden, rtol=0, atol=1e-5)


def test_overlapping_frames_of_adjacent_windows_are_the_same() -> None:
    engine = make_engine()
    engine.admit(1, plan(5, max_frames=301))
    first, second, third = collect(engine, [1])[1]
    assert torch.equal(first.hidden[100:], second.hidden[:100])
    assert torch.equal(second.codes[100:], third.codes[:100])


def test_songs_are_the_same_alone_and_in_company() -> None:
    """Different lengths, prompts and seeds together; then joined mid-way, with a neighbour cancelled."""
    plans = {key: plan(key, tokens=20 + 7 * key, max_frames=20 + 13 * key) for key in range(8)}
    engine = make_engine()
    for key, song in plans.items():
        engine.admit(key, song)
    together = collect(engine, list(plans))
    late = make_engine()
    late.admit(100, plan(100, max_frames=200))
    late.request_window(100)
    for _ in range(9):
        late.step()
    for key in (0, 7):
        late.admit(key, plans[key])
    for _ in range(6):
        late.step()
    late.release(100)
    joined_midway = collect(late, [0, 7])
    for key, song in plans.items():
        alone = make_engine()
        alone.admit(key, song)
        codes, hidden = joined(collect(alone, [key])[key])
        for result in (together[key], joined_midway.get(key, together[key])):
            got_codes, got_hidden = joined(result)
            assert torch.equal(got_codes, codes), key
            assert torch.equal(got_hidden, hidden), key


def test_everything_is_free_after_the_songs() -> None:
    engine = make_engine(slots=2, pages=60)
    before = engine.census
    for key in range(5):
        engine.admit(key, plan(key, max_frames=12))
    assert engine.census.waiting == 5
    collect(engine, list(range(5)))
    engine.runner.prefix.evict()
    assert engine.census == before


def test_songs_wait_for_pages_in_order_and_all_finish() -> None:
    """Twice as many songs as the pool can hold, one of them large: nobody overtakes, nobody starves."""
    engine = make_engine(slots=8, pages=40)
    for key in range(6):
        engine.admit(key, plan(key, tokens=16, max_frames=100 if key == 1 else 20))
        engine.request_window(key)
    order = []
    while len(order) < 6:
        deliveries, more = engine.step()
        assert more
        started = [song.phase is not Phase.WAITING for song in engine._songs.values()]
        assert started == sorted(started, reverse=True), "a later song started before an earlier one"
        for key, result in deliveries:
            assert isinstance(result, WindowResult)
            order.append(key)
            engine.release(key)
    assert engine.census.live == engine.census.waiting == 0


def test_a_song_that_can_never_fit_is_refused_with_the_numbers() -> None:
    engine = make_engine(pages=10)
    with pytest.raises(CapacityError, match=r"needs 36 pages of 8 tokens; the server has 10"):
        engine.admit(1, plan(1, max_frames=100))
    assert engine.census.waiting == 0


def test_run_ahead_is_bounded() -> None:
    engine = make_engine()
    engine.admit(1, plan(1, max_frames=900))
    engine.request_window(1)
    delivered = []
    for _ in range(700):
        deliveries, more = engine.step()
        delivered += deliveries
    assert len(delivered) == 1
    assert not more
    assert engine._songs[1].drawn == 301
    engine.request_window(1)
    deliveries, _ = engine.step()
    assert deliveries[0][1].window.index == 1


def stop_backbone(at_most: float):
    """A backbone whose stop logit is high enough that songs end by themselves."""
    backbone = small_backbone(seed=11)
    backbone.lm_head.weight.data[0] = backbone.lm_head.weight.data[1:].mean(dim=0) + at_most * torch.randn(
        32, generator=torch.Generator().manual_seed(2)
    )
    return backbone


def test_stop_ends_a_song_at_its_exact_frame() -> None:
    backbone = stop_backbone(0.9)
    lengths = set()
    for seed in range(12):
        song = plan(seed, max_frames=120)
        codes, hidden, reason = solo(song, backbone=backbone)
        engine = make_engine(backbone=backbone)
        engine.admit(1, song)
        windows = collect(engine, [1])[1]
        if not len(codes):
            assert isinstance(windows, EmptySongError)
            continue
        assert windows[-1].finish_reason == reason
        got_codes, got_hidden = joined(windows)
        assert torch.equal(got_codes, codes)
        torch.testing.assert_close(got_hidden, hidden, rtol=0, atol=1e-5)
        lengths.add(len(codes))
    assert len(lengths) > 3, "the model should stop at various lengths"


def test_a_broken_song_ends_alone() -> None:
    """NaN in one song's state: it fails; its neighbour and the next user of its pages are untouched."""
    good, bad = plan(1, max_frames=60), plan(2, max_frames=60)
    engine = make_engine(pages=60)
    for key, song in ((1, good), (2, bad)):
        engine.admit(key, song)
        engine.request_window(key)
    for _ in range(10):
        engine.step()
    engine.runner.state.hidden[engine._songs[2].slot, 1, 3] = float("nan")
    results = {}
    while len(results) < 2:
        for key, result in engine.step()[0]:
            results[key] = result
            engine.release(key)
    assert isinstance(results[2], NonFiniteError)
    assert torch.equal(joined([results[1]])[0], solo(good)[0])
    engine.admit(3, bad)
    assert torch.equal(joined(collect(engine, [3])[3])[0], solo(bad)[0])
    assert not engine.runner.pool.keys.isnan().any()
    assert not engine.runner.pool.values.isnan().any()


def test_release_in_every_phase_gives_everything_back() -> None:
    for steps in (0, 1, 2, 3, 30):
        engine = make_engine(slots=1, pages=60)
        before = engine.census
        engine.admit(1, plan(1, tokens=60, max_frames=20))
        engine.request_window(1)
        for _ in range(steps):
            engine.step()
        assert engine.release(1)
        assert not engine.release(1)
        engine.runner.prefix.evict()
        assert engine.census == before


def test_unconditional_prefix_is_shared_and_changes_nothing() -> None:
    plans = {key: plan(key, tokens=50 + 9 * key, max_frames=40) for key in range(4)}
    engine = make_engine()
    for key, song in plans.items():
        engine.admit(key, song)
    while any(song.phase is not Phase.LIVE for song in engine._songs.values()):
        engine.step()
    shared = [(len(song.prompt) - 2) // 8 for song in plans.values()]
    assert engine.census.pages_shared == sum(shared) - max(shared)
    results = collect(engine, list(plans))
    for key, song in plans.items():
        codes, hidden, _ = solo(song)
        got_codes, got_hidden = joined(results[key])
        assert torch.equal(got_codes, codes)
        torch.testing.assert_close(got_hidden, hidden, rtol=0, atol=1e-5)
