"""Facts of the MiniMax Music 3 checkpoint and of what a client gets. None of them is a knob.

Source: the official component configs (revision fbdf52fb) and the published implementations that agree on
them (vllm-omni 0.30.0, sglang-omni, diffusers 0.42.1). Sizes that a small checkpoint may change
(widths, depths) are read from its config.json files and are not here.
"""

from typing import Final

# Frames and codebooks. One frame is 40 ms of music: a semantic code c0 and seven residual codes c1..c7.
FRAME_RATE_HZ: Final = 25
CODEBOOKS: Final = 8
C0_CODES: Final = 16384
RESIDUAL_CODES: Final = 1024
MAX_SONG_FRAMES: Final = 9000

# The two published implementations that can be matched; they differ in a few places. The first is default.
PROFILES: Final = ("vllm-omni", "sglang-omni")

# Prompt and context, in tokens of the backbone.
MAX_PROMPT_TOKENS: Final = 5000
CONTEXT_TOKENS: Final = 10240
# A song needs prompt + frames + 2 positions: two more than frames, so that a stop drawn after the
# last frame and the lead-in frame of the `sglang-omni` profile fit as well.
CONTEXT_RESERVE_TOKENS: Final = 2
MAX_CAPTION_CHARACTERS: Final = 20_000
# A bound on work, not on music: 20 characters for each of the 5,000 tokens, where English has 4 to 5 and
# Chinese 1 to 2. Only lyrics made of padding, or of words that are dropped anyway, could need more.
MAX_LYRICS_CHARACTERS: Final = 100_000

# Token ids. The nine named ones are verified against the tokenizer at start. Text is below TEXT_TOKENS,
# everything that steers the model is at or above it.
TEXT_TOKENS: Final = 151643
IM_START: Final = 151644
IM_END: Final = 151645
AUDIO_CFG: Final = 151654
AUDIO_START: Final = 151669
AUDIO_END: Final = 151670
CAPTION_START: Final = 151671
CAPTION_END: Final = 151672
LYRICS_START: Final = 151673
LYRICS_END: Final = 151674
C0_TOKEN_OFFSET: Final = 151675
SPECIAL_TOKEN_IDS: Final[dict[str, int]] = {
    "<|im_start|>": IM_START,
    "<|im_end|>": IM_END,
    "<|audio_cfg|>": AUDIO_CFG,
    "<|audio_start|>": AUDIO_START,
    "<|audio_end|>": AUDIO_END,
    "<|caption_start|>": CAPTION_START,
    "<|caption_end|>": CAPTION_END,
    "<|lyrics_start|>": LYRICS_START,
    "<|lyrics_end|>": LYRICS_END,
}

# Guided sampling of the autoregressive half.
AR_GUIDANCE_SCALE: Final = 1.5
TOP_K: Final = 50

# Windows of the acoustic half: 200 frames every 100, in latents of 512 samples at 44.1 kHz.
WINDOW_FRAMES: Final = 200
WINDOW_HOP_FRAMES: Final = 100
LATENT_HOP_SAMPLES: Final = 512
LATENTS_PER_FRAME: Final = (441, 128)  # exactly 441/128, as numerator and denominator
CARRY_LATENTS: Final = 172
CARRY_END_LATENTS: Final = 344  # the carry is latents [L - 344, L - 172) of a window
LEFT_CROP_LATENTS: Final = 86
RIGHT_CROP_LATENTS: Final = 258

# Flow matching.
EULER_STEPS: Final = 30
FLOW_GUIDANCE_SCALE: Final = 1.7
PROMPT_SIGMA: Final = 1e-6

# Sound.
VOCODER_RATE_HZ: Final = 44_100
OUTPUT_RATE_HZ: Final = 32_000
CHANNELS: Final = 2
AUDIO_ENCODINGS: Final = ("f32", "s16", "s16_base64")
MAX_SEED: Final = 2**63 - 1
# 44,100 and 32,000 Hz meet every 441 and 320 samples; the resampler works in such blocks.
RESAMPLER_BLOCK_SAMPLES: Final = 441
