"""The window schedule against the published table, a step-by-step emulation, and its own invariants."""

import itertools

import pytest

from python_backend_models import chunking

# frames -> (windows: first frame, end frame, latents, kept latents), latents, 44.1 kHz and 32 kHz samples.
# Source: vllm-omni 0.30.0, run.
SONGS = {
    1: ([(0, 1, 3, (0, 3))], 3, 1536, 1115),
    50: ([(0, 50, 172, (0, 172))], 172, 88064, 63902),
    100: ([(0, 100, 344, (0, 344))], 344, 176128, 127803),
    150: ([(0, 150, 516, (0, 516))], 516, 264192, 191704),
    199: ([(0, 199, 685, (0, 685))], 685, 350720, 254491),
    200: ([(0, 200, 689, (0, 689))], 689, 352768, 255977),
    201: ([(0, 200, 689, (0, 431)), (100, 201, 347, (86, 347))], 692, 354304, 257092),
    250: ([(0, 200, 689, (0, 431)), (100, 250, 516, (86, 516))], 861, 440832, 319879),
    300: ([(0, 200, 689, (0, 431)), (100, 300, 689, (86, 689))], 1034, 529408, 384151),
    350: (
        [(0, 200, 689, (0, 431)), (100, 300, 689, (86, 431)), (200, 350, 516, (86, 516))],
        1206,
        617472,
        448053,
    ),
    450: (
        [
            (0, 200, 689, (0, 431)),
            (100, 300, 689, (86, 431)),
            (200, 400, 689, (86, 431)),
            (300, 450, 516, (86, 516)),
        ],
        1551,
        794112,
        576227,
    ),
}
# frames -> windows, latents, 32 kHz samples.
LONGER = {
    301: (3, 1037, 385266),
    400: (3, 1379, 512326),
    500: (4, 1724, 640500),
    1500: (14, 5174, 1922241),
    9000: (89, 31049, 11535302),
}
# The first songs whose last sample is lost, streamed and in one call, and how many of 9000 there are.
SHORT_BY_ONE_STREAMED = ([271, 399, 429, 557, 1038], 47)
SHORT_BY_ONE_WHOLE = ([271, 399, 414, 429, 444, 452], 2312)


@pytest.mark.parametrize("frames", SONGS)
def test_published_table(frames: int) -> None:
    expected, latents, samples_44k, samples_32k = SONGS[frames]
    made = chunking.windows(frames)
    assert [
        (
            window.start_frame,
            window.end_frame,
            window.latents,
            (window.crop_samples[0] // 512, window.latents - window.crop_samples[1] // 512),
        )
        for window in made
    ] == expected
    assert [window.index for window in made] == list(range(len(expected)))
    assert [window.is_first for window in made] == [True] + [False] * (len(expected) - 1)
    assert [window.is_last for window in made] == [False] * (len(expected) - 1) + [True]
    assert chunking.song_latents(frames) == latents
    assert chunking.song_samples_44k(frames) == samples_44k
    assert chunking.song_samples_32k(frames) == samples_32k


@pytest.mark.parametrize("frames", LONGER)
def test_published_totals(frames: int) -> None:
    count, latents, samples_32k = LONGER[frames]
    assert len(chunking.windows(frames)) == count
    assert chunking.song_latents(frames) == latents
    assert chunking.song_samples_32k(frames) == samples_32k


def test_published_window_lengths() -> None:
    lengths = {1: 3, 50: 172, 100: 344, 101: 347, 150: 516, 199: 685, 200: 689}
    assert {frames: chunking.window_latents(frames) for frames in lengths} == lengths


def test_window_length_is_the_reference_formula_truncated() -> None:
    for frames in range(1, 9001):
        assert chunking.window_latents(frames) == max(1, int(frames * 44100 / 24000 * 960 / 512))


def test_no_frames_no_windows() -> None:
    assert chunking.windows(0) == []
    assert chunking.song_latents(0) == chunking.song_samples_44k(0) == chunking.song_samples_32k(0) == 0
    assert chunking.window_at(0, 0, finished=True) is None


@pytest.mark.parametrize(
    ("streamed", "expected"), [(True, SHORT_BY_ONE_STREAMED), (False, SHORT_BY_ONE_WHOLE)]
)
def test_songs_whose_last_sample_is_lost(streamed: bool, expected: tuple[list[int], int]) -> None:
    first, count = expected
    missing = {
        frames: -(-chunking.song_samples_44k(frames) * 320 // 441)
        - chunking.song_samples_32k(frames, streamed=streamed)
        for frames in range(1, 9001)
    }
    assert set(missing.values()) == {0, 1}
    short = [frames for frames, samples in missing.items() if samples]
    assert short[: len(first)] == first
    assert len(short) == count


def test_a_running_song_releases_the_finished_song_s_windows_one_frame_late() -> None:
    for total in (1, 199, 200, 201, 202, 300, 301, 399, 400, 401, 957):
        released: list[tuple[int, chunking.Window]] = []
        for frames in range(total + 1):
            while window := chunking.window_at(len(released), frames, finished=False):
                released.append((frames, window))
        early = len(released)
        while window := chunking.window_at(len(released), total, finished=True):
            released.append((total, window))
        assert [window for _, window in released] == chunking.windows(total)
        assert [frames for frames, _ in released[:early]] == [100 * k + 201 for k in range(early)]
        assert 0 < len(released) - early <= 2


def test_kept_sound_is_one_unbroken_line_in_latents() -> None:
    for frames in range(201, 1200, 7):
        made = chunking.windows(frames)
        for before, after in itertools.pairwise(made):
            # Latent 345 of a window is latent 0 of the next; the kept parts must meet there.
            end = before.latents - before.crop_samples[1] // 512
            assert end - 345 == after.crop_samples[0] // 512
        assert sum(window.kept_samples for window in made) == chunking.song_samples_44k(frames)
        assert len(made) == -(-frames // 100) - 1
        assert 101 <= made[-1].frames <= 200
