"""The talker of the references, and ours, built from the same checkpoint tensors.

vllm-omni's talker is its own class, draws, depth loop, frame state and spans included; only the backbone is
transformers' Qwen3 instead of vLLM's, and the host-to-device staging needs no pinned memory.
"""

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from python_backend_models.networks import backbone, depth_decoder
from python_backend_models.networks.backbone import Backbone
from python_backend_models.networks.depth_decoder import DepthDecoder
from tests.parity import oracles
from tests.small_models import BACKBONE_CONFIG, DEPTH_CONFIG

Tensors = Mapping[str, Tensor]
AUDIO_END, C0_OFFSET, C0_CODES = 151670, 151675, 16384


@dataclass(frozen=True)
class Talker:
    """Configs and checkpoint tensors of the talker's two networks."""

    backbone_config: Mapping[str, Any]
    depth_config: Mapping[str, Any]
    backbone_tensors: Tensors
    depth_tensors: Tensors

    @property
    def hidden(self) -> int:
        return self.backbone_config["hidden_size"]


def random_talker(*, seed: int) -> Talker:
    """One random small size with random weights that keep activations near one."""
    generator = torch.Generator().manual_seed(seed)

    def one_of(*values: int) -> int:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    hidden, kv_heads = one_of(32, 64, 96), one_of(1, 2, 3)
    config = BACKBONE_CONFIG | {
        "hidden_size": hidden,
        "intermediate_size": one_of(64, 96, 160),
        "num_hidden_layers": one_of(2, 3, 5),
        "num_attention_heads": kv_heads * one_of(1, 2, 4),
        "num_key_value_heads": kv_heads,
        "head_dim": one_of(8, 16, 32),
    }
    depth_config = DEPTH_CONFIG | {
        "hidden_size": hidden,
        "num_layers": one_of(2, 3, 4),
        "num_attention_heads": one_of(2, 4),
        "intermediate_size": one_of(64, 96),
    }

    def random(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        made = {}
        for name, shape in shapes.items():
            noise = torch.randn(shape, generator=generator)
            gain = 1.2 if "layers." in name else 1.0
            fan_in = 1 if "embed" in name else shape[-1]
            made[name] = noise * (gain / math.sqrt(fan_in)) if len(shape) > 1 else 1 + 0.2 * noise
        return made

    tensors = random(backbone.checkpoint_shapes(config))
    return Talker(config, depth_config, tensors, random(depth_decoder.checkpoint_shapes(depth_config)))


def stored_in_bfloat16(talker: Talker) -> Talker:
    """The same talker with the weights that a bfloat16 checkpoint would hold, in float32."""

    def rounded(tensors: Tensors) -> Tensors:
        return {name: tensor.bfloat16().float() for name, tensor in tensors.items()}

    return replace(
        talker,
        backbone_tensors=rounded(talker.backbone_tensors),
        depth_tensors=rounded(talker.depth_tensors),
    )


def _cast(tensors: Tensors, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype, copy=True) for name, tensor in tensors.items()}


# --------------------------------------------------------------------- ours


def own_backbone(talker: Talker, *, dtype: torch.dtype = torch.float32) -> Backbone:
    with torch.device("meta"):
        network = Backbone(talker.backbone_config)
    converted = dict(backbone.convert(_cast(talker.backbone_tensors, dtype)))
    network.load_state_dict(converted, strict=True, assign=True)
    return network.eval().requires_grad_(False)


def own_depth_decoder(talker: Talker, *, dtype: torch.dtype = torch.float32) -> DepthDecoder:
    with torch.device("meta"):
        network = DepthDecoder(talker.depth_config)
    converted = dict(depth_decoder.convert(_cast(talker.depth_tensors, dtype)))
    network.load_state_dict(converted, strict=True, assign=True)
    return network.eval().requires_grad_(False)


# --------------------------------------------------------------- references


def qwen3(talker: Talker, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """transformers' `Qwen3ForCausalLM`."""
    module = oracles.library("transformers.models.qwen3.modeling_qwen3")
    config = oracles.library("transformers").Qwen3Config(**talker.backbone_config)
    with torch.device("meta"):
        model = module.Qwen3ForCausalLM(config)
    model.load_state_dict(_cast(talker.backbone_tensors, dtype), strict=True, assign=True)
    # Computed, not stored, so it must not stay on `meta`.
    model.model.rotary_emb = module.Qwen3RotaryEmbedding(config)
    return model.eval().requires_grad_(False)


def vllm_omni_depth_decoder(talker: Talker, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """vllm-omni's depth decoder, loaded by its own function; the embedding table is not part of it."""
    decoder = oracles.vllm_omni("rvq_decoder").RVQDepthDecoder(**vllm_omni_depth_sizes(talker)).to(dtype)
    tensors = _cast(talker.depth_tensors, dtype)
    del tensors["audio_embeddings.weight"]
    decoder.load_checkpoint_state(tensors)
    return decoder.eval().requires_grad_(False)


def vllm_omni_depth_sizes(talker: Talker) -> dict[str, int]:
    config = talker.depth_config
    return {
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_layers"],
        "num_heads": config["num_attention_heads"],
        "intermediate_size": config["intermediate_size"],
        "max_seq_len": config["max_position_embeddings"],
    }


def diffusers_depth_decoder(talker: Talker, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    config = {key: value for key, value in talker.depth_config.items() if not key.startswith("_")}
    network = oracles.diffusers_network("rvq_depth_decoder", config, talker.depth_tensors)
    for parameter in network.parameters():  # its own `to` warns
        parameter.data = parameter.data.to(dtype)
    return network


@dataclass(frozen=True)
class ReferenceSong:
    """What a reference's talker makes of a prompt.

    Attributes:
        codes: `[frames, 8]` int64.
        hidden: `[frames, 8 * hidden]`.
        finish_reason: `stop` or `length`.
        spans: first frame, end frame and finality of each hand-over to the acoustic stage.
    """

    codes: Tensor
    hidden: Tensor
    finish_reason: str
    spans: list[tuple[int, int, bool]]


class _UnpinnedStage:
    """vllm-omni's staging of small index vectors, in memory that a machine without CUDA has."""

    def __init__(self, rows: int, capacity: int, device: torch.device) -> None:
        self.device = device

    def push(self, values: Sequence[Sequence[int]], count: int) -> Tensor:
        return torch.tensor([list(row)[:count] for row in values], device=self.device)


class VllmOmniTalker:
    """vllm-omni's talker stage, one song at a time."""

    def __init__(self, talker: Talker, *, dtype: torch.dtype = torch.float32) -> None:
        self.language_model = qwen3(talker, dtype=dtype)
        module = oracles.vllm_omni("talker")
        hf_config = types.SimpleNamespace(
            hidden_size=talker.hidden,
            vocab_size=talker.backbone_config["vocab_size"],
            tie_word_embeddings=False,
        )
        decoder = partial(module.RVQDepthDecoder, **vllm_omni_depth_sizes(talker))
        with mock.patch.multiple(
            module,
            Qwen3Model=lambda **_: self.language_model.model,
            ParallelLMHead=lambda *_, **__: self.language_model.lm_head,
            LogitsProcessor=lambda _: lambda head, hidden: head(hidden),
            RVQDepthDecoder=lambda hidden_size: decoder(),
        ):
            stage = module.MiniMaxMusic3TalkerForConditionalGeneration(
                vllm_config=types.SimpleNamespace(
                    model_config=types.SimpleNamespace(hf_config=hf_config), scheduler_config=None
                )
            )
        module.PinnedIndexStage = _UnpinnedStage
        module.SamplerOutput = types.SimpleNamespace
        tensors = _cast(talker.depth_tensors, dtype)
        stage.audio_embeddings.weight = nn.Parameter(tensors.pop("audio_embeddings.weight"))
        stage.rvq_decoder.to(dtype).load_checkpoint_state(tensors)
        self.stage = stage.eval().requires_grad_(False)

    @torch.inference_mode()
    def song(
        self, prompt: Sequence[int], twin: Sequence[int], *, seed: int, max_frames: int
    ) -> ReferenceSong:
        """Drive the stage step by step, as its engine would: forward, logits, sample, post-process.

        Args:
            seed: of the draws, used as it is.
        """
        stage, model = self.stage, self.language_model.model
        stage._states.clear()
        stage._row_pair_ids, stage._row_roles = ["song", "song"], ["cond", "uncond"]
        stage._row_seeds, stage._row_max_frames = [seed, seed], [max_frames, max_frames]
        stage._row_prompt_tokens, stage._row_sample_eligible = [len(prompt)] * 2, [True, True]
        embeddings, cache, spans = model.embed_tokens(torch.tensor([list(prompt), list(twin)])), None, []
        while True:
            output = model(inputs_embeds=embeddings, cache=cache, use_cache=True)
            cache, hidden = output.past_key_values, output.last_hidden_state[:, -1]
            stage.sample(stage.compute_logits(hidden), None)
            if payload := stage.postprocess(hidden, global_request_id=["song"]):
                spans.append(payload)
            state = stage._states["song"]
            if state.finished:
                break
            embeddings = stage.embed_frames(state.last_codes.expand(2, -1)).unsqueeze(1)
        bounds = []
        whole = torch.empty(state.generated_frames, 8 * embeddings.shape[-1], dtype=embeddings.dtype)
        for span in spans:
            start, latent = span["meta"]["num_processed_tokens"], span["latent"]
            whole[start : start + len(latent)] = latent
            bounds.append((start, start + len(latent), span["meta"]["last_chunk"]))
        codes = torch.cat(state.codes) if state.codes else torch.empty(0, 8, dtype=torch.int64)
        return ReferenceSong(codes, whole, state.finish_reason, bounds)


@torch.inference_mode()
def diffusers_song(
    talker: Talker, prompt: Sequence[int], twin: Sequence[int], *, seed: int, max_frames: int
) -> tuple[Tensor, Tensor]:
    """diffusers' autoregressive step, with vllm-omni's seeded draws in place of a torch generator's.

    Returns:
        All drawn codes `[draws, 8]`, the frame that is only fed back included, and the hidden states
        `[frames, 8 * hidden]` that it emits.
    """
    encoders = oracles.library("diffusers.modular_pipelines.minimax_music3.encoders")
    state = oracles.library("diffusers.modular_pipelines.modular_pipeline").PipelineState()
    draw = oracles.vllm_omni("sampling").sample_topk_seeded
    drawable = torch.tensor([AUDIO_END, *range(C0_OFFSET, C0_OFFSET + C0_CODES)])
    drawn: list[int] = []

    def seeded(logits: Tensor, generator: object) -> Tensor:
        first_codebook = len(drawn) % 8 == 0
        columns = logits[:, drawable] if first_codebook else logits
        column = draw(columns, torch.tensor([seed]), torch.tensor([len(drawn)]))
        drawn.append(column.item() - 1 if first_codebook else column.item())
        return drawable[column] if first_codebook else column

    state.set("text_ids", torch.tensor([list(prompt), list(twin)]))
    state.set("audio_duration", max_frames / 25)
    components = types.SimpleNamespace(
        _execution_device=torch.device("cpu"),
        frame_rate=25.0,
        language_model=qwen3(talker),
        rvq_depth_decoder=diffusers_depth_decoder(talker),
    )
    with mock.patch.object(encoders, "_sample_top_k", side_effect=seeded):
        _, state = encoders.MiniMaxMusic3AutoregressiveStep()(components, state)
    whole_frames = len(drawn) // 8 * 8
    return torch.tensor(drawn[:whole_frames]).view(-1, 8), state.get("frame_hiddens")[0]
