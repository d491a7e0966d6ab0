"""The autoregressive engine: every live song advances in every step, and windows are handed out on request.

Ordinary Python without threads or Triton: `admit`, `request_window`, `release` say what songs there are, and
`step` does one unit of work and returns what became ready. A song passes through
waiting (for a slot and pages) -> prefill (its prompt, a chunk per step) -> live -> finished, and is forgotten
on `release`, which is legal at any time. A live song runs ahead of what was asked for by a bounded number of
windows and then pauses.
"""

import contextlib
import enum
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from python_backend_models import chunking
from python_backend_models.contract import CONTEXT_RESERVE_TOKENS, WINDOW_FRAMES, WINDOW_HOP_FRAMES
from python_backend_models.engine.events import EventReader
from python_backend_models.engine.kv_cache import pages_for
from python_backend_models.engine.runner import FrameRunner

_LOG = logging.getLogger(__name__)
MOST_LEAD_IN_FRAMES = 1


class SongError(RuntimeError):
    """A song can't go on; the message is safe to show to a client."""


class NonFiniteError(SongError):
    """A value of the song was NaN or infinite."""


class EmptySongError(SongError):
    """The model ended the song before its first frame."""


class CapacityError(SongError):
    """The song could never be held, however long it waited."""


@dataclass(frozen=True)
class SongPlan:
    """What a song asks of the engine.

    Attributes:
        prompt: conditional token ids.
        twin: unconditional token ids, equally long.
        draw_seed: seed of the draws, see `sampling.ar_draw_seed`.
        max_frames: cap on the frames that are handed out.
        lead_in_frames: drawn frames that are fed back but not handed out, 0 or 1, see `sampling`.
    """

    prompt: Sequence[int]
    twin: Sequence[int]
    draw_seed: int
    max_frames: int
    lead_in_frames: int = 0


@dataclass(frozen=True)
class WindowResult:
    """One window of a song.

    Attributes:
        window: which frames, and whether they are the first or last.
        hidden: conditioning `[frames, 8 * hidden]` in the weights' dtype.
        codes: `[frames, 8]` int64.
        finish_reason: `stop` or `length` on the last window, else `None`.
    """

    window: chunking.Window
    hidden: Tensor
    codes: Tensor
    finish_reason: str | None


Delivery = tuple[int, WindowResult | SongError]


class Phase(enum.Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    LIVE = "live"
    FINISHED = "finished"


@dataclass
class Song:
    """Host state of one song."""

    key: int
    plan: SongPlan
    phase: Phase = Phase.WAITING
    slot: int | None = None
    pages: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    shared_pages: int = 0
    prefilled: list[int] = field(default_factory=lambda: [0, 0])
    drawn: int = 0
    confirmed: int = 0
    frames: int | None = None
    finish_reason: str | None = None
    windows_asked: int = 0
    windows_given: int = 0
    error: SongError | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.plan.prompt)


@dataclass(frozen=True)
class Census:
    """Counts for metrics and tests."""

    waiting: int
    live: int
    slots_free: int
    pages_free: int
    pages_shared: int


class TalkerEngine:
    """Steps all live songs together.

    Args:
        runner: executes prompt chunks and frame steps on the device.
        run_ahead_windows: windows a song may have ready beyond those asked for.
        prefill_chunk_tokens: prompt tokens computed between two frame steps, so that a long prompt doesn't
            hold up the other songs. Chunk bounds are fixed by the prompt alone, hence its bits are, too.
        read_interval_frames: frames between two looks at the device's stop flags.
    """

    def __init__(
        self,
        runner: FrameRunner,
        *,
        run_ahead_windows: int = 1,
        prefill_chunk_tokens: int = 512,
        read_interval_frames: int = 1,
    ) -> None:
        self.runner = runner
        self.run_ahead_windows = run_ahead_windows
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.frames_in_last_step = 0
        self.prefilled_in_last_step = False
        self._songs: OrderedDict[int, Song] = OrderedDict()
        self._free_slots = list(range(runner.state.dummy_slot))
        self._events = EventReader(runner.state.events, interval_frames=read_interval_frames)
        needed = ring_frames(run_ahead_windows)
        if runner.state.frames.shape[1] < needed:
            raise ValueError(f"ring of {runner.state.frames.shape[1]} frames, {needed} needed")

    # ------------------------------------------------------------- requests

    def admit(self, key: int, plan: SongPlan) -> None:
        """Queue a song; it starts when a slot and its pages are free, first come first served.

        Raises:
            CapacityError: the whole pool couldn't hold it.
            ValueError: the key is in use, or the plan is malformed.
        """
        if key in self._songs:
            raise ValueError(f"song {key} is already here")
        if len(plan.prompt) != len(plan.twin) or len(plan.prompt) < 4 or plan.max_frames < 1:
            raise ValueError("a plan needs two equally long prompts of at least 4 tokens and a frame cap")
        if not 0 <= plan.lead_in_frames <= MOST_LEAD_IN_FRAMES:
            raise ValueError(f"lead_in_frames is {plan.lead_in_frames}, not 0 or {MOST_LEAD_IN_FRAMES}")
        song = Song(key, plan)
        needed, pool = self._pages_per_row(song), self.runner.pool
        if 2 * needed > pool.pages or needed > self.runner.state.tables.shape[2]:
            raise CapacityError(
                f"a prompt of {song.prompt_tokens} tokens and {plan.max_frames} frames needs {2 * needed} "
                f"pages of {pool.page_tokens} tokens; the server has {pool.pages}"
            )
        self._songs[key] = song

    def request_window(self, key: int) -> None:
        """Ask for the song's next window; it comes out of a later `step`.

        Raises:
            KeyError: no such song.
        """
        self._songs[key].windows_asked += 1

    def withdraw_request(self, key: int) -> None:
        """Take back the last `request_window` of a song that has not been answered; the song goes on.

        Raises:
            KeyError: no such song.
        """
        song = self._songs[key]
        song.windows_asked = max(song.windows_given, song.windows_asked - 1)

    def release(self, key: int) -> bool:
        """Forget a song and free all it holds; whether there was one."""
        song = self._songs.pop(key, None)
        if song is None:
            return False
        self._free_pages(song)
        if song.slot is not None:
            self._free_slots.append(song.slot)
            self._free_slots.sort()
        return True

    def fail_all(self, error: SongError) -> list[Delivery]:
        """Give every song this error, for when the device itself failed."""
        deliveries = []
        for song in self._songs.values():
            song.error = error
            if song.windows_given < song.windows_asked:
                deliveries.append(self._fail(song, error))
        return deliveries

    @property
    def census(self) -> Census:
        phases = [song.phase for song in self._songs.values()]
        return Census(
            waiting=phases.count(Phase.WAITING),
            live=len(phases) - phases.count(Phase.WAITING),
            slots_free=len(self._free_slots),
            pages_free=self.runner.pool.free_pages + self.runner.prefix.idle_pages,
            pages_shared=self.runner.prefix.shared_now,
        )

    # ----------------------------------------------------------------- work

    @torch.inference_mode()
    def step(self) -> tuple[list[Delivery], bool]:
        """Do one unit of work: at most one prompt chunk and one frame for every song that may run.

        Returns:
            what became ready, and whether there may be more to do without a new request.
        """
        # The current device belongs to a thread, and the engine's is not the one that loaded the weights.
        device = self.runner.device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            return self._step()

    def _step(self) -> tuple[list[Delivery], bool]:
        self._start_waiting()
        prefilling = self._prefill_one()
        lanes = [song for song in self._songs.values() if self._may_run(song)]
        self.frames_in_last_step = len(lanes)
        if lanes:
            self.runner.step([song.slot for song in lanes], [self._row_pages(song) for song in lanes])
            for song in lanes:
                song.drawn += 1
        ended = self._read_events(lanes)
        deliveries = [delivery for song in self._songs.values() if (delivery := self._deliver(song))]
        more = prefilling or lanes or deliveries or self._unconfirmed()
        # The pages of a song that ended may be what another waits for.
        return deliveries, bool(more or (ended and self._somebody_waits()))

    def _start_waiting(self) -> None:
        """Give slots and pages to waiting songs in order; nobody overtakes one that waits for pages."""
        for song in self._songs.values():
            if song.phase is not Phase.WAITING or song.error:
                continue
            if not self._free_slots or not self._reserve(song):
                return
            song.slot = self._free_slots.pop(0)
            song.phase = Phase.PREFILL

    def _pages_per_row(self, song: Song) -> int:
        tokens = song.prompt_tokens + song.plan.max_frames + CONTEXT_RESERVE_TOKENS
        return pages_for(tokens, self.runner.pool.page_tokens)

    def _reserve(self, song: Song) -> bool:
        pool, prefix = self.runner.pool, self.runner.prefix
        per_row = self._pages_per_row(song)
        shared = prefix.full_pages(song.prompt_tokens)

        def needed() -> int:
            return 2 * per_row - shared + max(0, shared - len(prefix.pages))

        if needed() > pool.free_pages:
            prefix.evict()
        if needed() > pool.free_pages:
            return False
        common = prefix.acquire(shared)
        song.shared_pages = shared
        song.pages = (pool.reserve(per_row), [*common, *pool.reserve(per_row - shared)])
        return True

    def _free_pages(self, song: Song) -> None:
        conditional, unconditional = song.pages
        self.runner.pool.release([*conditional, *unconditional[song.shared_pages :]])
        self.runner.prefix.release(song.shared_pages)
        song.pages, song.shared_pages = ([], []), 0

    def _prefill_one(self) -> bool:
        song = next((s for s in self._songs.values() if s.phase is Phase.PREFILL and not s.error), None)
        self.prefilled_in_last_step = song is not None
        if song is None:
            return False
        try:
            self._prefill_chunk(song)
        except Exception:
            # Say, no memory for a long prompt: nothing of another song was touched.
            _LOG.exception("a prompt of %d tokens failed", song.prompt_tokens)
            song.error = SongError("the talker failed on this song's prompt")
        return True

    def _prefill_chunk(self, song: Song) -> None:
        for row, token_ids in enumerate((song.plan.prompt, song.plan.twin)):
            if row == 1:
                song.prefilled[1] = max(
                    song.prefilled[1],
                    min(self.runner.prefix.filled, song.shared_pages) * self.runner.pool.page_tokens,
                )
            start = song.prefilled[row]
            if start < len(token_ids):
                end = min(len(token_ids), start + self._chunk_tokens(song, row, start))
                last = self.runner.prefill(token_ids[start:end], song.pages[row], first_position=start)
                song.prefilled[row] = end
                if row == 1:
                    full = min(end // self.runner.pool.page_tokens, song.shared_pages)
                    self.runner.prefix.filled = max(self.runner.prefix.filled, full)
                if end == len(token_ids):
                    self.runner.hold(song.slot, row, last)
                    if row == 1:
                        self._go_live(song)
                return
        raise AssertionError("a song in prefill has tokens left")  # both rows end in the branch above

    def _chunk_tokens(self, song: Song, row: int, start: int) -> int:
        """Shared pages are computed page by page, so that any song may compute any of them."""
        page_tokens = self.runner.pool.page_tokens
        if row == 1 and start < song.shared_pages * page_tokens:
            return page_tokens
        return self.prefill_chunk_tokens

    def _go_live(self, song: Song) -> None:
        self.runner.place(song.slot, seed=song.plan.draw_seed, tokens=song.prompt_tokens, pages=song.pages)
        song.phase = Phase.LIVE

    def _row_pages(self, song: Song) -> tuple[tuple[list[int], list[int]], int]:
        return song.pages, song.prompt_tokens + song.drawn + 1

    def _may_run(self, song: Song) -> bool:
        if song.phase is not Phase.LIVE or song.error:
            return False
        ahead = max(song.windows_asked, 1) + self.run_ahead_windows - 1
        wanted = ahead * WINDOW_HOP_FRAMES + WINDOW_FRAMES + 1
        return song.drawn < song.plan.lead_in_frames + min(song.plan.max_frames, wanted)

    # -------------------------------------------------------------- results

    def _read_events(self, lanes: Sequence[Song]) -> bool:
        """Take in what the device has told of the songs; whether one of them ended."""
        live = [song for song in self._songs.values() if song.phase is Phase.LIVE]
        urgent = not lanes or any(self._at_boundary(song) for song in lanes)
        read = self._events.advance({song.key: (song.slot, song.drawn) for song in live}, urgent=urgent)
        for key, (drawn, stopped_at, broken_at) in read.items():
            song = self._songs.get(key)
            if song is None or song.phase is not Phase.LIVE:
                continue
            song.confirmed = drawn
            last = min(stopped_at, drawn - 1)
            if broken_at <= last:
                song.error = NonFiniteError(f"frame {broken_at} has a value that is not finite")
                self.runner.scrub([*song.pages[0], *song.pages[1][song.shared_pages :]])
                self._finish(song, 0, None)
            elif stopped_at < drawn:
                self._finish(song, stopped_at - song.plan.lead_in_frames, "stop")
            elif drawn >= song.plan.lead_in_frames + song.plan.max_frames:
                self._finish(song, song.plan.max_frames, "length")
        return any(song.phase is Phase.FINISHED for song in live)

    def _somebody_waits(self) -> bool:
        return any(s.phase is Phase.WAITING and not s.error for s in self._songs.values())

    def _at_boundary(self, song: Song) -> bool:
        emitted = song.drawn - song.plan.lead_in_frames
        return emitted >= song.plan.max_frames or emitted % WINDOW_HOP_FRAMES == 1

    def _unconfirmed(self) -> bool:
        return any(s.phase is Phase.LIVE and s.confirmed < s.drawn for s in self._songs.values())

    def _finish(self, song: Song, frames: int, reason: str | None) -> None:
        song.phase, song.frames, song.finish_reason = Phase.FINISHED, frames, reason
        self._free_pages(song)
        if frames <= 0 and song.error is None:
            song.error = EmptySongError("the model ended the song before its first frame; try another seed")

    def _fail(self, song: Song, error: SongError) -> Delivery:
        song.error = error
        song.windows_given = song.windows_asked
        return song.key, error

    def _deliver(self, song: Song) -> Delivery | None:
        if song.windows_given >= song.windows_asked:
            return None
        if song.error:
            return self._fail(song, song.error)
        if song.phase not in (Phase.LIVE, Phase.FINISHED):
            return None
        finished = song.phase is Phase.FINISHED
        frames = song.frames if finished else max(0, song.confirmed - song.plan.lead_in_frames)
        window = chunking.window_at(song.windows_given, frames, finished=finished)
        if window is None:
            if not finished:
                return None
            return self._fail(song, SongError("the song has ended; there is no further window"))
        song.windows_given += 1
        hidden, codes = self.runner.collect(
            song.slot,
            song.plan.lead_in_frames + window.start_frame,
            song.plan.lead_in_frames + window.end_frame,
        )
        return song.key, WindowResult(window, hidden, codes, song.finish_reason if window.is_last else None)


def ring_frames(run_ahead_windows: int) -> int:
    """Frames a slot must hold: from the oldest window not handed out to the furthest run ahead."""
    return (run_ahead_windows * WINDOW_HOP_FRAMES) + WINDOW_FRAMES + 1 + MOST_LEAD_IN_FRAMES
