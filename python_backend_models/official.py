"""The official checkpoint's component configs, and digests of its tensor lists.

What `MiniMaxAI/MiniMax-Music3` at revision fbdf52fb holds, as published in the fixture of a public port
(appautomaton/mlx-minimax-music3, Apache-2.0). A digest is the SHA-256 over the sorted lines
`name|shape|dtype` of a component; the vocoder's is over that port's folded names, so it isn't here.
"""

from typing import Any, Final

REVISION: Final = "fbdf52fbaaca799592917417eb05f1899f1255ec"
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "language_model": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 10240,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": 200_000,
    },
    "rvq_depth_decoder": {
        "audio_vocab_size": 1024,
        "hidden_size": 4096,
        "intermediate_size": 6144,
        "max_position_embeddings": 16,
        "num_attention_heads": 16,
        "num_codebooks": 8,
        "num_layers": 4,
    },
    "condition_encoder": {
        "condition_hidden_dim": 4096,
        "input_hop_length": 960,
        "input_sampling_rate": 24000,
        "num_condition_layers": 8,
        "out_dim": 2048,
        "output_hop_length": 512,
        "output_sampling_rate": 44100,
    },
    "transformer": {
        "attention_head_dim": 64,
        "condition_dim": 2048,
        "ff_inner_dim": 8192,
        "fourier_embedding_dim": 256,
        "in_channels": 128,
        "num_attention_heads": 32,
        "num_layers": 36,
        "rotary_dim": 32,
    },
    "vocoder": {
        "decoder_hidden_dim": 1536,
        "decoder_input_dim": 1024,
        "latent_channels": 128,
        "sampling_rate": 44100,
        "upsampling_ratios": [8, 8, 4, 2],
    },
}
DTYPES: Final = {
    "language_model": "BF16",
    "rvq_depth_decoder": "BF16",
    "condition_encoder": "F32",
    "transformer": "F32",
    "vocoder": "F32",
}
TENSOR_DIGESTS: Final = {
    "language_model": "b6c914a58f8fdb196a0f8e7326dba7799ce5cae4c76ca679f3a2bd60780d1a05",
    "rvq_depth_decoder": "aa462f06d2a53deb4c430ecbe9ee038d72943c954e1bb0c228760e58f18a7729",
    "condition_encoder": "c0d1c18e03e39fafcabb1bd28dad8477ff26abdeb18433d634632244fbaff803",
    "transformer": "3ad8e6ed9386a88f435a6b7aa63d3fb65688f31eba025c1b9b651d068972bc3f",
}
