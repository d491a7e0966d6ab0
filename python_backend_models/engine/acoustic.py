"""The acoustic stages: windows of hidden states to latents, latents to sound, many songs at once.

Stateless: what a song's next window needs from this one is the carry that comes back with it. Items of equal
length are computed together, and each item's result is the same as if it were alone: exactly, where the
device's kernels treat rows alike. An item that is malformed or comes out non-finite gets an exception in
its place; the others are unharmed. Not for two threads at once.
Source of the solve: vllm-omni 0.30.0; golden vectors in tests/unit/test_acoustic.py.
"""

import hashlib
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from python_backend_models.chunking import window_latents, windows
from python_backend_models.contract import (
    CARRY_END_LATENTS,
    CARRY_LATENTS,
    EULER_STEPS,
    FLOW_GUIDANCE_SCALE,
    PROMPT_SIGMA,
    WINDOW_FRAMES,
)
from python_backend_models.engine.batching import attempt, checked_sizes, in_groups
from python_backend_models.engine.graphs import CudaRecorder, GraphedFunction
from python_backend_models.engine.precision import resolve, resolve_attention
from python_backend_models.networks.condition_encoder import ConditionEncoder
from python_backend_models.networks.flow_transformer import FlowTransformer
from python_backend_models.networks.vocoder import Snake, Vocoder

_LOG: Final = logging.getLogger(__name__)
# A batch is cut into these sizes, largest first: never padded, since the work is per row. One window fills
# a CPU's cores; eight together took 28 % longer there than one by one, for they leave the caches.
BATCH_SIZES: Final = {"cuda": (8, 4, 2, 1), "cpu": (1,)}
_SEED_PERSON: Final = b"minimax-ttm"


class NonFiniteError(ArithmeticError):
    """A window's own result holds NaN or infinity."""


@dataclass(frozen=True)
class Carry:
    """The middle of a window's overlap with the next one, which the next one repeats exactly."""

    latent: Tensor  # [128, 172]
    condition: Tensor  # [2048, 172]


@dataclass(frozen=True)
class FlowWindow:
    """One window to solve."""

    hidden: Tensor  # [frames, layers * hidden], any float type, any device
    seed: int  # of the request, 0 ... 2^64 - 1
    window_index: int
    carry: Carry | None  # from the window before; None for a first window


@dataclass(frozen=True)
class FlowResult:
    """A solved window, on the engine's device."""

    latent: Tensor  # [128, latents], float32
    carry: Carry


@dataclass(frozen=True)
class _Start:
    """A window made ready for the solver."""

    noise: Tensor  # [128, latents]
    condition: Tensor  # [2048, latents], its beginning replaced by the carry's
    share: Tensor  # [latents, width], of the condition in the input tokens
    prompt: Tensor  # [128, pinned latents]


class FlowEngine:
    """Solves windows: condition, then Euler steps of the guided flow from noise to latents.

    Args:
        encoder, transformer: with their weights; moved to `device` and cast in place.
        device: where to compute. The noise is drawn there too, so songs differ between CPU and CUDA.
        precision: of the transformer's blocks, by name. What is computed once per window stays float32; so do
            the latents' own projections, except in tf32.
        attention: kernel by name, or `auto`.
        steps, guidance_scale: of the solve.
        graphs: on CUDA, record full windows as CUDA graphs, one for each of `batch_sizes`. Ignored elsewhere.
        batch_sizes: how many windows are solved together; must hold 1. By default the device's `BATCH_SIZES`.
        compiled: let torch.compile fuse what surrounds the blocks' products; the first call takes a minute.

    Raises:
        ValueError: the device can't honour the precision, the attention kernel or the compilation, or encoder
            and transformer don't fit each other.
    """

    def __init__(
        self,
        encoder: ConditionEncoder,
        transformer: FlowTransformer,
        *,
        device: torch.device | str,
        precision: str = "float32",
        attention: str = "auto",
        steps: int = EULER_STEPS,
        guidance_scale: float = FLOW_GUIDANCE_SCALE,
        graphs: bool = True,
        batch_sizes: Sequence[int] | None = None,
        compiled: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self._precision = resolve(precision, self.device)
        self._attention = resolve_attention(
            attention,
            self._precision,
            tokens=1 + window_latents(WINDOW_FRAMES),
            heads=transformer.config["num_attention_heads"],
            head_dim=transformer.config["attention_head_dim"],
        )
        _LOG.info("flow in %s with %s attention on %s", precision, self._attention.name, self.device)
        width = encoder.config["out_dim"]
        if width != transformer.condition_channels:
            raise ValueError(
                f"encoder makes {width} channels, transformer takes {transformer.condition_channels}"
            )
        self._encoder = encoder.to(self.device, torch.float32).eval()
        self._transformer = transformer.to(self.device, torch.float32).eval()
        for module in transformer.transformer_blocks.modules():
            if isinstance(module, nn.Linear):
                module.to(self._precision.weight_dtype)
        if compiled:
            for block in transformer.transformer_blocks:
                block.compile(dynamic=True)
            tokens = torch.zeros(2, 3, transformer.proj_in.out_features, device=self.device)
            rotary = transformer.rotary(2)
            # As in `solve`: torch compiles anew for other global switches.
            with self._precision.active(), self._attention.active():
                _try_compiled(lambda: transformer.transformer_blocks[0](tokens, rotary))
        self._steps, self._guidance_scale = steps, guidance_scale
        self._batch_sizes = checked_sizes(batch_sizes or BATCH_SIZES[self.device.type])
        times = torch.tensor([step / steps for step in range(steps)], dtype=torch.float32)
        self._times = times.tolist()
        # float32 throughout, like the reference: 1 - fl(fl(1 - 1e-6) * t).
        self._noise_shares = (1.0 - (1.0 - PROMPT_SIGMA) * times).tolist()
        self._float32 = resolve("float32", self.device)
        with torch.inference_mode(), self._float32.active():
            self._time_tokens = transformer.time_tokens(times.to(self.device))
            self._folded = transformer.fold()
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}
        recorder = CudaRecorder(self.device) if graphs and self.device.type == "cuda" else None
        # 30 steps of the largest batch are 1,700 TFLOP, and the first one runs every kernel that they do.
        self._integrate = GraphedFunction(self._euler, recorder, warm_up=self._first_step)
        if recorder:
            self._record_full_windows()

    def solve(self, windows: Sequence[FlowWindow]) -> list[FlowResult | Exception]:
        """Results in the order of the windows; ValueError or NonFiniteError in the place of a bad one."""
        with torch.inference_mode(), self._float32.active():
            starts = [attempt(self._start, window) for window in windows]
        with torch.inference_mode(), self._precision.active(), self._attention.active():
            return in_groups(
                starts, lambda start: start.noise.shape[1], self._solve_together, self._batch_sizes
            )

    def _start(self, window: FlowWindow) -> _Start:
        frames = window.hidden.shape[0]
        width = self._encoder.layers * self._encoder.config["condition_hidden_dim"]
        if window.hidden.ndim != 2 or not 1 <= frames <= WINDOW_FRAMES or window.hidden.shape[1] != width:
            raise ValueError(
                f"hidden must be [1 ... {WINDOW_FRAMES}, {width}], not {list(window.hidden.shape)}"
            )
        condition = self._encoder(window.hidden[None].to(self.device))[0]
        channels, latents = self._transformer.latent_channels, condition.shape[1]
        noise = draw_noise(window.seed, window.window_index, (channels, latents), device=self.device)
        prompt = noise[:, :0]
        if window.carry is not None:
            given = [list(window.carry.latent.shape), list(window.carry.condition.shape)]
            length = given[0][-1]
            if given != [[channels, length], [len(condition), length]]:
                raise ValueError(f"carry must be [{channels}, n] and [{len(condition)}, n], not {given}")
            prompt = window.carry.latent[:, :latents].to(self.device, torch.float32)
            pinned = prompt.shape[1]
            condition[:, :pinned] = window.carry.condition[:, :pinned].to(self.device)
        share = self._transformer.condition_tokens(condition[None])[0]
        return _Start(noise, condition, share, prompt)

    def _solve_together(self, starts: Sequence[_Start]) -> list[FlowResult | Exception]:
        noise = torch.stack([start.noise.t() for start in starts])
        full = noise.shape[1] == window_latents(WINDOW_FRAMES)
        lengths = [start.prompt.shape[1] for start in starts]
        reach = max(*lengths, CARRY_LATENTS) if full else max(lengths)
        prompt = noise.new_zeros(len(starts), reach, noise.shape[2])
        for row, start in zip(prompt, starts, strict=True):
            row[: start.prompt.shape[1]] = start.prompt.t()
        positions, ends = torch.arange(reach), torch.tensor(lengths)
        pinned = (positions < ends[:, None])[..., None].to(self.device)
        shares = torch.stack([start.share for start in starts])
        latents = self._integrate(noise, shares, prompt, pinned).transpose(1, 2).contiguous()
        finite = torch.isfinite(latents).flatten(1).all(dim=1).tolist()
        return [
            FlowResult(latent, _carry_of(latent, start.condition))
            if ok
            else NonFiniteError("the solve is not finite")
            for latent, start, ok in zip(latents, starts, finite, strict=True)
        ]

    def _first_step(self, x: Tensor, shares: Tensor, prompt: Tensor, pinned: Tensor) -> Tensor:
        return self._euler(x, shares, prompt, pinned, steps=1)

    def _euler(
        self, x: Tensor, shares: Tensor, prompt: Tensor, pinned: Tensor, *, steps: int | None = None
    ) -> Tensor:
        """The solve: every tensor that differs between calls is an argument, so it can be a CUDA graph.

        Args:
            x: noise `[batch, latents, 128]`, overwritten with the result.
            shares: of the condition in the input tokens, `[batch, latents, width]`.
            prompt: latents that the beginning must take, `[batch, reach, 128]`.
            pinned: which of them count, `[batch, reach, 1]`, bool.
            steps: how many of the solve's steps to do; all by default.
        """
        rotary = self._rotary_tables(x.shape[1])
        head = x[:, : prompt.shape[1]]
        noise = head.clone()
        schedule = zip(self._times, self._noise_shares, self._time_tokens, strict=True)
        for time, noise_share, token in itertools.islice(schedule, steps):
            if head.shape[1]:
                head.copy_(torch.where(pinned, noise_share * noise + time * prompt, head))
            guided, plain = self._transformer.velocities(x, token, shares, folded=self._folded, rotary=rotary)
            step = self._guidance_scale * guided + (1.0 - self._guidance_scale) * plain
            x.add_((1.0 / self._steps) * step)
        if head.shape[1]:
            head.copy_(torch.where(pinned, prompt, head))
        return x

    def _rotary_tables(self, latents: int) -> tuple[Tensor, Tensor]:
        if latents not in self._rotary:
            self._rotary[latents] = self._transformer.rotary(latents)
        return self._rotary[latents]

    def _record_full_windows(self) -> None:
        latents, channels = window_latents(WINDOW_FRAMES), self._transformer.latent_channels
        with torch.inference_mode(), self._precision.active(), self._attention.active():
            for batch in self._batch_sizes:
                noise = torch.zeros(batch, latents, channels, device=self.device)
                shares = noise.new_zeros(batch, latents, self._time_tokens.shape[1])
                pinned = torch.ones(batch, CARRY_LATENTS, 1, dtype=torch.bool, device=self.device)
                self._rotary_tables(latents)
                self._integrate.record(noise, shares, noise[:, :CARRY_LATENTS], pinned)
        _LOG.info("recorded the solve for %d of %s windows", self._integrate.recorded, self._batch_sizes)


@dataclass(frozen=True)
class _Excerpt:
    """The part of a window that is decoded, and the part of its sound that is kept."""

    latent: Tensor  # [128, latents]
    start: int  # samples
    end: int


class VocoderEngine:
    """Decodes latents and crops the sound to what the window adds to its song.

    Args:
        vocoder: with its weights; moved to `device` and cast in place.
        device: where to compute.
        precision: of the convolutions, by name.
        graphs: on CUDA, record the lengths of full windows as CUDA graphs. Ignored elsewhere.
        batch_sizes: as in `FlowEngine`.
        compiled: let torch.compile fuse the snakes.

    Raises:
        ValueError: the device can't honour the precision or the compilation.
    """

    def __init__(
        self,
        vocoder: Vocoder,
        *,
        device: torch.device | str,
        precision: str = "float32",
        graphs: bool = True,
        batch_sizes: Sequence[int] | None = None,
        compiled: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self._precision = resolve(precision, self.device)
        self._vocoder = vocoder.to(self.device, torch.float32).eval()
        for module in vocoder.modules():
            if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
                module.to(self._precision.weight_dtype)
            elif compiled and isinstance(module, Snake):
                module.compile(dynamic=True)
        if compiled:
            channels = vocoder.config["decoder_hidden_dim"]
            with self._precision.active():
                _try_compiled(
                    lambda: vocoder.blocks[0].snake1(torch.zeros(2, channels, 3, device=self.device))
                )
        self._batch_sizes = checked_sizes(batch_sizes or BATCH_SIZES[self.device.type])
        recorder = CudaRecorder(self.device) if graphs and self.device.type == "cuda" else None
        self._forward = GraphedFunction(vocoder.forward, recorder)
        if recorder:
            self._record_full_windows()

    def decode(self, latents: Sequence[Tensor], crops: Sequence[tuple[int, int]]) -> list[Tensor | Exception]:
        """Sound of each window.

        Args:
            latents: `[128, latents]` each, the whole window.
            crops: samples to cut from the left and the right of each window's sound.

        Returns:
            `[2, samples]` float32 between -1 and 1 in each window's place, or ValueError or NonFiniteError.
        """
        with torch.inference_mode(), self._precision.active():
            excerpts = [attempt(self._excerpt, *pair) for pair in zip(latents, crops, strict=True)]
            return in_groups(
                excerpts, lambda excerpt: excerpt.latent.shape[1], self._decode_together, self._batch_sizes
            )

    def _excerpt(self, latent: Tensor, crop: tuple[int, int]) -> _Excerpt:
        """The latents that the kept sound depends on; decoding the others would be wasted work."""
        channels, hop = self._vocoder.config["latent_channels"], self._vocoder.hop_samples
        if latent.ndim != 2 or latent.shape[0] != channels or latent.shape[1] == 0:
            raise ValueError(f"latent must be [{channels}, latents], not {list(latent.shape)}")
        left, right = crop
        samples = latent.shape[1] * hop
        if min(crop) < 0 or left + right >= samples:
            raise ValueError(f"a crop of {left} and {right} leaves nothing of {samples} samples")
        first = max(0, left // hop - self._vocoder.reach_latents)
        end = min(latent.shape[1], -(-(samples - right) // hop) + self._vocoder.reach_latents)
        excerpt = latent[:, first:end].to(self.device, torch.float32)
        return _Excerpt(excerpt, left - first * hop, samples - right - first * hop)

    def _decode_together(self, excerpts: Sequence[_Excerpt]) -> list[Tensor | Exception]:
        sound = self._forward(torch.stack([excerpt.latent for excerpt in excerpts]))
        kept = [row[:, item.start : item.end] for row, item in zip(sound, excerpts, strict=True)]
        finite = torch.stack([torch.isfinite(row).all() for row in kept]).tolist()
        return [
            row.clamp(-1.0, 1.0) if ok else NonFiniteError("the sound is not finite")
            for row, ok in zip(kept, finite, strict=True)
        ]

    def _record_full_windows(self) -> None:
        channels = self._vocoder.config["latent_channels"]
        with torch.inference_mode(), self._precision.active():
            for window in windows(2 * WINDOW_FRAMES)[:-1]:  # a first one and one amid a song
                latent = torch.zeros(channels, window.latents, device=self.device)
                excerpt = self._excerpt(latent, window.crop_samples).latent
                for batch in self._batch_sizes:
                    self._forward.record(excerpt.expand(batch, -1, -1))
        _LOG.info("recorded the vocoder for %d shapes", self._forward.recorded)


def noise_seed(seed: int, window_index: int) -> int:
    """Seed of a window's noise generator: 63 bits of BLAKE2b over the request's seed and the window's index.

    Raises:
        OverflowError: `seed` is not 0 ... 2^64 - 1.
    """
    message = seed.to_bytes(8, "little")
    for label in (b"dit", str(window_index).encode()):
        message += len(label).to_bytes(4, "little") + label
    digest = hashlib.blake2b(message, digest_size=8, person=_SEED_PERSON).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)


def draw_noise(seed: int, window_index: int, shape: tuple[int, int], *, device: torch.device) -> Tensor:
    """Standard normal noise a window starts from, `[channels, latents]`, from the device's own generator."""
    generator = torch.Generator(device).manual_seed(noise_seed(seed, window_index))
    return torch.randn(shape, generator=generator, device=device)


def _try_compiled(call: Callable[[], object]) -> None:
    """Let torch.compile fail now, if it does: at a song's first window it would be too late."""
    try:
        with torch.inference_mode():
            call()
    except RuntimeError as error:
        raise ValueError(f"compiled: torch.compile does not work here: {error}") from error


def _carry_of(latent: Tensor, condition: Tensor) -> Carry:
    start = max(0, latent.shape[1] - CARRY_END_LATENTS)
    end = max(start, latent.shape[1] - CARRY_END_LATENTS + CARRY_LATENTS)
    return Carry(latent[:, start:end].clone(), condition[:, start:end].clone())
