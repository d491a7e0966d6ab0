"""The listening page in a real Chromium: typed, played, cancelled, downloaded; by keys alone; on a phone."""

import io
import re
import shutil
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser, Page, expect, sync_playwright

from client.gateway.encoders import FORMATS
from python_backend_models.cleaning import dropped_words
from tests.client.fake_server import one_chunk_then_nothing, song_audio
from tests.gateway.conftest import MakeGateway, StandIn
from tests.gateway.gateway import CAPTION, LYRICS, Gateway
from tests.gateway.scripts import Gated, nothing
from tests.triton.server import TritonServer, wait_until

CHROMIUM_OPTIONS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --mute-audio"
)
SOON_MS, SONG_MS = 10_000, 120_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    assert program, "this machine has no chromium; ./build.sh test installs it"
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=CHROMIUM_OPTIONS.split())
        yield running
        running.close()


class Visit:
    """The page opened anew; when it closes, nobody but its gateway was asked anything, and nothing broke."""

    def __init__(self, browser: Browser, gateway: Gateway, **options: object) -> None:
        self.gateway = gateway
        self.context = browser.new_context(accept_downloads=True, **options)
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.problems: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._hear)
        self.page.goto(gateway.url)
        expect(self.page.locator("#server")).to_have_text("Ready", timeout=SOON_MS)

    def _hear(self, message: object) -> None:
        # Chromium itself notes every answer that is an error.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.problems.append(message.text)

    def __enter__(self) -> Page:
        return self.page

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.context.close()
        if kind is None:
            assert self.problems == []
            others = [
                url for url in self.asked if not url.startswith((self.gateway.url + "/", "blob:", "data:"))
            ]
            assert others == []


def write(page: Page, *, seconds: int, seed: int, takes: int = 1, lyrics: str = LYRICS) -> None:
    """Fill in the form as a person does."""
    page.get_by_label("Sound").fill(CAPTION)
    page.get_by_label("Lyrics", exact=True).fill(lyrics)
    page.get_by_label(re.compile("^Length")).fill(str(seconds))
    page.get_by_label("Seed", exact=True).fill(str(seed))
    page.get_by_role("combobox", name="Takes").select_option(str(takes))


def download(page: Page, take: int = 0) -> tuple[str, bytes]:
    with page.expect_download() as coming:
        page.locator(".take").nth(take).get_by_text("Download").click()
    return coming.value.suggested_filename, Path(coming.value.path()).read_bytes()


def position_s(page: Page) -> int:
    """Where the first take stands, in whole seconds."""
    return int(page.locator(".wave").first.get_attribute("aria-valuenow") or 0)


# ---------------------------------------------------------------- through the real server


def test_a_song_is_typed_played_and_downloaded(browser: Browser, gateway: Gateway) -> None:
    with Visit(browser, gateway) as page:
        write(page, seconds=2, seed=11)
        page.get_by_role("button", name="Sing").click()
        take = page.locator(".take")
        expect(take).to_have_attribute("data-state", "done", timeout=SONG_MS)
        expect(take.locator(".state")).to_have_text("0:02, the length that was set.")
        # It began to play by itself, and stops at its end.
        expect(take.get_by_role("button", name="Play")).to_be_enabled(timeout=SOON_MS)
        take.get_by_role("slider").focus()
        page.keyboard.press("Home")
        take.locator(".play").click()
        wait_until(lambda: position_s(page) >= 1, timeout_s=10, what="the song to be heard")
        expect(take.get_by_role("button", name="Play")).to_be_visible(timeout=SOON_MS)
        name, song = download(page)
        assert name == "song-seed11.wav"
        assert song == gateway.sing(seed=11, max_new_tokens=50).body
        heard = page.evaluate(WAVE_BARS)
        assert heard > 0


# How many columns of the wave's picture have ink.
WAVE_BARS = """() => {
  const canvas = document.querySelector('.wave');
  const {data, width, height} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  let inked = 0;
  for (let x = 0; x < width; x += 1) if (data[4 * ((height >> 1) * width + x) + 3]) inked += 1;
  return inked;
}"""


def test_cancel_frees_the_place(browser: Browser, gateway: Gateway, server: TritonServer) -> None:
    with Visit(browser, gateway) as page:
        write(page, seconds=360, seed=1)
        page.get_by_role("button", name="Sing").click()
        take = page.locator(".take")
        expect(take).to_have_attribute("data-state", "writing", timeout=SONG_MS)
        take.get_by_role("button", name="Cancel").click()
        expect(take.locator(".state")).to_have_text(re.compile("^Cancelled after 0:"), timeout=SOON_MS)
        name, part = download(page)
        assert name == "song-seed1-part.wav"
        with wave.open(io.BytesIO(part)) as file:
            assert file.getnframes() > 32_000
    line = re.compile(r"song (\w+): client_gone, pcm as sse, seed 1,")
    wait_until(
        lambda: any(f"song {song}: cancelled" in server.log_text() for song in line.findall(gateway.log())),
        timeout_s=60,
        what="the server to give the song up",
    )


def test_an_audio_element_plays_a_song_as_it_is_made(browser: Browser, gateway: Gateway) -> None:
    with Visit(browser, gateway) as page:
        played_s = page.evaluate(
            """async (query) => {
              const audio = new Audio('v1/audio/speech?' + new URLSearchParams(query));
              await audio.play();
              await new Promise((done, failed) => { audio.onended = done; audio.onerror = failed; });
              return audio.currentTime;
            }""",
            {"input": LYRICS, "instructions": CAPTION, "seed": "11", "max_new_tokens": "50"},
        )
        assert played_s == pytest.approx(2, abs=0.1)


# ---------------------------------------------------------------- in front of a fake server


def test_takes_side_by_side(browser: Browser, stand_in: StandIn) -> None:
    songs = Gated()
    stand_in.server.script = songs
    with Visit(browser, stand_in.gateway) as page:
        write(page, seconds=10, seed=2**63 - 3, takes=3)
        page.get_by_role("button", name="Sing").click()
        takes = page.locator(".take")
        for index in range(3):
            expect(takes.nth(index)).to_have_attribute("data-state", "writing", timeout=SOON_MS)
        # The first plays while it is being written, the others wait to be chosen; only one plays at a time.
        expect(takes.nth(0).locator(".play")).to_have_text("Pause", timeout=SOON_MS)
        wait_until(lambda: position_s(page) >= 1, timeout_s=10, what="the song to be heard")
        takes.nth(1).locator(".play").click()
        expect(takes.nth(0).locator(".play")).to_have_text("Play")
        expect(takes.nth(1).locator(".play")).to_have_text("Pause")
        songs.open.set()
        for index in range(3):
            expect(takes.nth(index)).to_have_attribute("data-state", "done", timeout=SOON_MS)
            name, song = download(page, index)
            assert name == f"song-seed{2**63 - 3 + index}.wav"
            assert song[44:] == song_audio(250, 2**63 - 3 + index).tobytes()
        columns = {round(takes.nth(index).bounding_box()["y"]) for index in range(2)}
        assert len(columns) == 1
        takes.nth(0).get_by_role("button", name="Remove this take").click()
        expect(takes).to_have_count(2)


def test_playing_goes_on_after_a_gap(browser: Browser, stand_in: StandIn) -> None:
    songs = Gated()
    stand_in.server.script = songs
    with Visit(browser, stand_in.gateway) as page:
        write(page, seconds=10, seed=0)
        page.get_by_role("button", name="Sing").click()
        expect(page.locator(".take")).to_have_attribute("data-state", "writing", timeout=SOON_MS)
        # What has come is 4 s long; the player comes to its end and waits there.
        page.locator(".wave").focus()
        page.keyboard.press("End")
        wait_until(lambda: position_s(page) == 4, timeout_s=10, what="the end of what is there")
        expect(page.locator(".play")).to_have_text("Pause")
        songs.open.set()
        wait_until(lambda: position_s(page) >= 5, timeout_s=10, what="the song to go on")


# Files in memory that the page still holds by their address.
COUNT_FILES = """
  window.files = new Set();
  const { createObjectURL, revokeObjectURL } = URL;
  URL.createObjectURL = (file) => {
    const url = createObjectURL.call(URL, file);
    files.add(url);
    return url;
  };
  URL.revokeObjectURL = (url) => {
    files.delete(url);
    revokeObjectURL.call(URL, url);
  };
"""


def test_removed_takes_leave_no_file_behind(browser: Browser, stand_in: StandIn) -> None:
    songs = Gated()
    stand_in.server.script = songs
    with Visit(browser, stand_in.gateway) as page:
        page.evaluate(COUNT_FILES)
        write(page, seconds=10, seed=0, takes=2)
        page.get_by_role("button", name="Sing").click()
        takes = page.locator(".take")
        for index in range(2):
            expect(takes.nth(index)).to_have_attribute("data-state", "writing", timeout=SOON_MS)
        takes.nth(0).get_by_role("button", name="Remove this take").click()
        assert stand_in.server.cancelled.wait(10)
        # The one that is kept is whole only after the removed one has come to its end in the page.
        songs.open.set()
        expect(takes).to_have_attribute("data-state", "done", timeout=SOON_MS)
        assert page.evaluate("files.size") == 1
        takes.get_by_role("button", name="Remove this take").click()
        assert page.evaluate("files.size") == 0


def test_with_keys_alone(browser: Browser, stand_in: StandIn) -> None:
    with Visit(browser, stand_in.gateway) as page:
        stops = []
        for _ in range(22):
            page.keyboard.press("Tab")
            stops.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        for stop in ("caption", "example", "Verse", "lyrics", "length", "seed", "random", "count", "sing"):
            assert stop in stops
        page.get_by_label("Sound").focus()
        page.keyboard.type(CAPTION)
        page.get_by_role("button", name="Verse", exact=True).focus()
        page.keyboard.press("Enter")
        page.keyboard.type("la la la")
        page.get_by_role("button", name="Chorus", exact=True).focus()
        page.keyboard.press("Space")
        page.keyboard.type("oh")
        assert page.get_by_label("Lyrics", exact=True).input_value() == "[Verse]\nla la la\n[Chorus]\noh"
        page.keyboard.press("Control+Enter")
        take = page.locator(".take")
        expect(take).to_have_attribute("data-state", "done", timeout=SOON_MS)
        page.locator(".wave").focus()
        page.keyboard.press("Space")
        expect(take.locator(".play")).to_have_text(re.compile("Play|Pause"))
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        assert position_s(page) >= 5


def test_phone_width(browser: Browser, stand_in: StandIn) -> None:
    phone = {"width": 360, "height": 740}
    with Visit(browser, stand_in.gateway, viewport=phone, has_touch=True, is_mobile=True) as page:
        write(page, seconds=10, seed=7, takes=2, lyrics="[Verse] " + "verylongword" * 12)
        page.get_by_role("button", name="Sing").tap()
        expect(page.locator(".take")).to_have_count(2)
        expect(page.locator(".take").nth(1)).to_have_attribute("data-state", "done", timeout=SOON_MS)
        assert page.evaluate("document.documentElement.scrollWidth") <= phone["width"]
        for element in page.locator(
            "button:visible, a.button:visible, textarea, input:visible, select"
        ).all():
            box = element.bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= phone["width"]


def test_problems_are_told(browser: Browser, stand_in: StandIn, make_gateway: MakeGateway) -> None:
    with Visit(browser, stand_in.gateway) as page:
        page.get_by_role("button", name="Sing").click()
        expect(page.get_by_role("alert")).to_have_text("Say what it sounds like first.")
        write(page, seconds=10, seed=2**63)
        page.get_by_role("button", name="Sing").click()
        expect(page.get_by_role("alert")).to_have_text(f"The seed is a whole number from 0 to {2**63 - 1}.")
        assert stand_in.server.requests == []
        stand_in.server.script = nothing
        write(page, seconds=10, seed=5)
        page.get_by_role("button", name="Sing").click()
        expect(page.locator(".state")).to_have_text(re.compile(r"^Waiting for the first sound … \d+ s$"))
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator(".state")).to_have_text("Cancelled.")
        assert stand_in.server.cancelled.wait(10)
    gateway = make_gateway(stand_in.server.url, MUSIC3_GATEWAY_KEY="open sesame")
    with Visit(browser, gateway) as page:
        write(page, seconds=10, seed=5)
        page.get_by_role("button", name="Sing").click()
        expect(page.locator(".state")).to_have_text(re.compile("a valid key is needed"), timeout=SOON_MS)
        stand_in.server.script = one_chunk_then_nothing
        page.get_by_label("Key", exact=True).fill("open sesame")
        page.get_by_role("button", name="Sing").click()
        expect(page.locator(".take").first).to_have_attribute("data-state", "writing", timeout=SOON_MS)
        gateway.stop()
        expect(page.locator(".take").first).to_have_attribute("data-state", "failed", timeout=SOON_MS)
        expect(page.locator("#server")).to_have_attribute("data-state", "away", timeout=SOON_MS)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "pcm"])
def test_a_browser_decodes_every_format(browser: Browser, stand_in: StandIn, name: str) -> None:
    """Streams, decoded by what shares no code with the encoder, to the song's length (the song is noise)."""
    with Visit(browser, stand_in.gateway) as page:
        seconds = page.evaluate(
            """async (fields) => {
              const answer = await fetch('v1/audio/speech', {method: 'POST', body: JSON.stringify(fields)});
              const context = new OfflineAudioContext(2, 1, 32000);
              return (await context.decodeAudioData(await answer.arrayBuffer())).duration;
            }""",
            {"input": LYRICS, "instructions": CAPTION, "stream": True, "response_format": name},
        )
    longer_s = 3 * 1152 / 32_000 if name == "mp3" else 0
    assert 0 <= seconds - len(song_audio(250, 0)) / 32_000 <= longer_s + 1e-3


# ---------------------------------------------------------------- warnings while typing

LINES = st.lists(
    st.one_of(
        st.sampled_from(
            ["[Verse]", "[Verse] words", "[Verse][x]  y", "[00:12.3] la", "[] x", "[a", "\ufeff[Verse]", "la"]
        ),
        st.text(alphabet="[] \t\r\x1f\x85\u2028\u00a0\u200b\ufeff:019aé日!-", max_size=12),
    ),
    max_size=5,
).map("\n".join)
DROPPED = re.compile(r"lyrics line (\d+): (.*)")


def expected_losses(lyrics: str) -> list[tuple[int, str]]:
    """Lines and kinds of what is lost, as the model's own rules in Python say it."""
    found = []
    for warning in dropped_words(lyrics):
        numbered = DROPPED.fullmatch(warning)
        if numbered is None:
            found.append((0, "nothing"))
            continue
        text = numbered[2]
        words = "stamp" if "with the time stamp" in text else "words"
        found.append((int(numbered[1]), words if " is dropped, because " in text else "tag"))
    return found


def test_warnings_while_typing_are_the_models(browser: Browser, stand_in: StandIn) -> None:
    with Visit(browser, stand_in.gateway) as page:
        page.evaluate("async () => { window.rules = await import('/lyrics.js'); }")

        @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
        @given(LINES)
        def same(lyrics: str) -> None:
            lost = page.evaluate("(text) => rules.lostWords(text).map((l) => [l.line, l.kind])", lyrics)
            if lyrics.strip():
                assert [tuple(each) for each in lost] == expected_losses(lyrics)

        same()


def test_a_warning_can_be_mended(browser: Browser, stand_in: StandIn) -> None:
    with Visit(browser, stand_in.gateway) as page:
        lyrics = page.get_by_label("Lyrics", exact=True)
        lyrics.focus()
        page.keyboard.type("[Verse] gone words")
        warning = page.locator("#warnings li").first
        expect(warning).to_contain_text("Line 1: “gone words” will not be sung")
        warning.get_by_role("button").click()
        expect(page.locator("#warnings li")).to_have_count(0)
        assert lyrics.input_value() == "[Verse]\ngone words"
        page.keyboard.press("Control+z")
        assert lyrics.input_value() == "[Verse] gone words"
        # What was written is still there when the page is opened again.
        page.reload()
        assert lyrics.input_value() == "[Verse] gone words"


def test_the_song_is_noise_that_differs_by_seed() -> None:
    """So that downloads compared above cannot be mixed up."""
    assert not np.array_equal(song_audio(250, 0), song_audio(250, 1))
