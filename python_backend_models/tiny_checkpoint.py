"""Write a small random checkpoint in the official layout.

`python -m python_backend_models.tiny_checkpoint DIR` (`--help` lists the options).

Same folders, file names, tensor names, dtypes, shards and special token ids as the official one; only widths
and depths are smaller. The same arguments give the same bytes. What it sings is noise, but of a useful kind:
audible and bounded, left unlike right, other for every caption, lyrics and seed, and never two frames alike.
Songs run to their frame cap unless `stop_logit` says otherwise.
"""

import argparse
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

from python_backend_models import contract, tiny_weights
from python_backend_models.networks import (
    backbone,
    condition_encoder,
    depth_decoder,
    flow_transformer,
    vocoder,
)

MARKER = "tiny_checkpoint.json"
VOCABULARY = 200_000

# Backbone: hidden, layers, heads, KV heads, head dim, MLP. Depth: layers, heads, MLP. Encoder: width.
# Flow transformer: layers, heads, head dim, rotary dim, MLP, time features. Vocoder: input, hidden width.
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "tiny": {
        "language_model": (64, 3, 4, 2, 16, 128),
        "rvq_depth_decoder": (2, 4, 96),
        "condition_encoder": (32,),
        "transformer": (2, 4, 16, 8, 128, 16),
        "vocoder": (32, 64),
    },
    "small": {
        "language_model": (256, 4, 8, 2, 32, 768),
        "rvq_depth_decoder": (3, 4, 384),
        "condition_encoder": (128,),
        "transformer": (3, 4, 32, 16, 512, 64),
        "vocoder": (64, 128),
    },
    "mid": {
        "language_model": (1024, 8, 8, 2, 128, 3072),
        "rvq_depth_decoder": (4, 8, 1536),
        "condition_encoder": (384,),
        "transformer": (4, 6, 64, 32, 1536, 256),
        "vocoder": (256, 384),
    },
}


def component_configs(size: str) -> dict[str, dict[str, Any]]:
    """The `config.json` of each component, by folder. Raises ValueError on an unknown size."""
    if size not in SIZES:
        raise ValueError(f"size is {size!r}; allowed: {', '.join(SIZES)}")
    sizes = SIZES[size]
    hidden, layers, heads, kv_heads, head_dim, inner = sizes["language_model"]
    depth_layers, depth_heads, depth_inner = sizes["rvq_depth_decoder"]
    (condition,) = sizes["condition_encoder"]
    flow_layers, flow_heads, flow_head_dim, rotary, flow_inner, features = sizes["transformer"]
    vocoder_input, vocoder_hidden = sizes["vocoder"]
    return {
        "language_model": {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": "bfloat16",
            "head_dim": head_dim,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "max_position_embeddings": contract.CONTEXT_TOKENS,
            "model_type": "qwen3",
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
            "tie_word_embeddings": False,
            "vocab_size": VOCABULARY,
        },
        "rvq_depth_decoder": {
            "_class_name": "MiniMaxMusic3RVQDepthDecoder",
            "audio_vocab_size": contract.RESIDUAL_CODES,
            "hidden_size": hidden,
            "intermediate_size": depth_inner,
            "max_position_embeddings": 16,
            "num_attention_heads": depth_heads,
            "num_codebooks": contract.CODEBOOKS,
            "num_layers": depth_layers,
        },
        "condition_encoder": {
            "_class_name": "MiniMaxMusic3ConditionEncoder",
            "condition_hidden_dim": hidden,
            "input_hop_length": 960,
            "input_sampling_rate": 24_000,
            "num_condition_layers": contract.CODEBOOKS,
            "out_dim": condition,
            "output_hop_length": contract.LATENT_HOP_SAMPLES,
            "output_sampling_rate": contract.VOCODER_RATE_HZ,
        },
        "transformer": {
            "_class_name": "MiniMaxMusic3Transformer1DModel",
            "attention_head_dim": flow_head_dim,
            "condition_dim": condition,
            "ff_inner_dim": flow_inner,
            "fourier_embedding_dim": features,
            "in_channels": 128,
            "num_attention_heads": flow_heads,
            "num_layers": flow_layers,
            "rotary_dim": rotary,
        },
        "vocoder": {
            "_class_name": "MiniMaxMusic3Vocoder",
            "decoder_hidden_dim": vocoder_hidden,
            "decoder_input_dim": vocoder_input,
            "latent_channels": 128,
            "sampling_rate": contract.VOCODER_RATE_HZ,
            "upsampling_ratios": [8, 8, 4, 2],
        },
    }


# Per folder: network module, file stem, dtype, number of shards (the official ones are larger than one file).
LAYOUT: dict[str, tuple[Any, str, torch.dtype, int]] = {
    "language_model": (backbone, "model", torch.bfloat16, 2),
    "rvq_depth_decoder": (depth_decoder, "diffusion_pytorch_model", torch.bfloat16, 1),
    "condition_encoder": (condition_encoder, "diffusion_pytorch_model", torch.float32, 1),
    "transformer": (flow_transformer, "diffusion_pytorch_model", torch.float32, 2),
    "vocoder": (vocoder, "diffusion_pytorch_model", torch.float32, 1),
}
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "invert_sigmas": True,
    "num_train_timesteps": 1,
    "shift": 1.0,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": False,
}
MODEL_INDEX = {
    "_class_name": "MiniMaxMusic3ModularPipeline",
    "condition_encoder": ["diffusers", "MiniMaxMusic3ConditionEncoder"],
    "language_model": ["transformers", "Qwen3ForCausalLM"],
    "rvq_depth_decoder": ["diffusers", "MiniMaxMusic3RVQDepthDecoder"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "MiniMaxMusic3Transformer1DModel"],
    "vocoder": ["diffusers", "MiniMaxMusic3Vocoder"],
}


# Qwen2's split, as in its tokenizer.json.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Some merges, so that tokens of several bytes occur; Ġ is a space and Ċ a line feed.
_MERGES = (
    *("Ġ t", "h e", "Ġt he", "i n", "Ġ a", "e r", "o n", "r e", "Ġ s", "o u", "n d", "Ġa nd", "in g"),
    *(
        "v er",
        "s e",
        "ver se",
        "c h",
        "o r",
        "u s",
        "or us",
        "ch orus",
        "s t",
        "a r",
        "st ar",
        "star t",
        "] Ċ",
    ),
)


def tokenizer_description() -> dict[str, Any]:
    """A `tokenizer.json` in Qwen2's form: a small byte-level BPE with the model's nine special ids."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    texts = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in _MERGES)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token, token_id in contract.SPECIAL_TOKEN_IDS.items()
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            # The special tokens stand here too: their ids leave gaps, which a loader that counts its
            # added tokens on from the vocabulary's size would close.
            "vocab": {text: i for i, text in enumerate(texts)} | contract.SPECIAL_TOKEN_IDS,
            "merges": [merge.split(" ") for merge in _MERGES],
        },
    }


def write_tiny_checkpoint(
    directory: Path, *, seed: int = 0, size: str = "tiny", stop_logit: float | None = None
) -> Path:
    """Write the checkpoint, unless it is there already, and return `directory`.

    Args:
        directory: made if missing. A folder with anything else in it than an earlier checkpoint of this
            function is refused.
        seed: of the weights.
        size: one of `SIZES`.
        stop_logit: about what the logit of stop is at every frame, where the c0 logits have a standard
            deviation of 2.5. None: stop is never among the 50 columns that are drawn from. In size tiny, 7
            gives songs of about 40 to 400 frames, 8 of 30 to 160, 10 of 10 to 80.

    Raises:
        FileExistsError: the folder holds something else.
        ValueError: unknown size.
    """
    configs = component_configs(size)
    directory = directory.resolve()
    made_of = {
        "seed": seed,
        "size": size,
        "stop_logit": stop_logit,
        "tool": _own_digest(),
        "torch": torch.__version__,
    }
    if _is_made_of(directory, made_of):
        return directory
    if directory.exists() and not (directory / MARKER).is_file() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty and holds no checkpoint made by this tool")
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its place and moved there whole: an interrupted run leaves no half checkpoint.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        unfinished.chmod(0o755)
        for folder, config in configs.items():
            _write_component(unfinished / folder, config, seed=seed, stop_logit=stop_logit)
        _write_json(unfinished / "scheduler" / "scheduler_config.json", SCHEDULER)
        _write_json(unfinished / "tokenizer" / "tokenizer.json", tokenizer_description())
        _write_json(unfinished / "tokenizer" / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})
        _write_json(unfinished / "model_index.json", MODEL_INDEX)
        _write_json(unfinished / MARKER, made_of)
        if not _is_made_of(directory, made_of):  # another process may have been quicker
            if directory.exists():
                shutil.rmtree(directory)
            unfinished.replace(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def _own_digest() -> str:
    sources = (Path(__file__), Path(tiny_weights.__file__))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def _is_made_of(directory: Path, made_of: dict[str, Any]) -> bool:
    marker = directory / MARKER
    return marker.is_file() and bool(json.loads(marker.read_text(encoding="utf-8")) == made_of)


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _write_component(folder: Path, config: dict[str, Any], *, seed: int, stop_logit: float | None) -> None:
    module, stem, dtype, shard_count = LAYOUT[folder.name]
    _write_json(folder / "config.json", config)
    shapes: Mapping[str, tuple[int, ...]] = module.checkpoint_shapes(config)
    shards = list(_sharded(shapes, shard_count))
    files: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        suffix = f"-{number:05d}-of-{len(shards):05d}" if shard_count > 1 else ""
        tensors = {
            name: tiny_weights.tensor(
                f"{folder.name}/{name}", shapes[name], seed=seed, stop_logit=stop_logit
            ).to(dtype)
            for name in names
        }
        file = folder / f"{stem}{suffix}.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(0o644)
        files |= dict.fromkeys(names, file.name)
    if shard_count > 1:
        total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": files}
        _write_json(folder / f"{stem}.safetensors.index.json", index)


def _sharded(shapes: Mapping[str, tuple[int, ...]], count: int) -> Iterator[list[str]]:
    """Names in order, cut into `count` runs of about equal size."""
    total, passed = sum(map(math.prod, shapes.values())), 0
    runs: list[list[str]] = [[] for _ in range(count)]
    for name, shape in shapes.items():
        # By its middle, so that one large tensor does not leave a run empty.
        runs[min(count - 1, int(count * (passed + math.prod(shape) / 2) / total))].append(name)
        passed += math.prod(shape)
    return filter(None, runs)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m python_backend_models.tiny_checkpoint",
        description="Write a small random checkpoint in the official layout.",
    )
    parser.add_argument("directory", type=Path, help="new or empty folder, or one made by this tool")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="default: tiny (about 53 MB)")
    parser.add_argument("--stop-logit", type=float, help="let songs stop by themselves")
    arguments = parser.parse_args()
    try:
        path = write_tiny_checkpoint(
            arguments.directory,
            seed=arguments.seed,
            size=arguments.size,
            stop_logit=arguments.stop_logit,
        )
    except (FileExistsError, OSError) as error:
        parser.exit(1, f"tiny_checkpoint: {error}\n")
    print(path)


if __name__ == "__main__":
    main()
