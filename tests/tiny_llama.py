"""A second model for the real engine: a small Llama with weights drawn at random, made on the spot."""

import json
from pathlib import Path

import numpy as np

from shared.model import ModelSpec

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 4, 256, 4, 2, 64, 512
SPREAD = 0.08  # wide enough that greedy answers do not hang on rounding


def make_tiny_llama(folder: Path, name: str, like: ModelSpec, seed: int = 0) -> ModelSpec:
    """Write its weights, in fp32, and borrow the tokenizer of the model `like`; returns what it is."""
    vocab = json.loads(Path(like.weights, "config.json").read_text())["vocab_size"]
    folder.mkdir(parents=True)
    for file in Path(like.tokenizer).glob("*token*"):
        (folder / file.name).symlink_to(file)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": like.context_tokens,
        "tie_word_embeddings": True,
        "vocab_size": vocab,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    params = _write_safetensors(folder / "model.safetensors", _shapes(vocab), seed)
    return ModelSpec(
        name=name,
        engine="vllm",
        params=params,
        layers=LAYERS,
        hidden=HIDDEN,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        weight_bytes=4 * params,
        kv_bytes_per_token=LAYERS * 2 * KV_HEADS * HEAD_DIM * 4,
        context_tokens=like.context_tokens,
        tokenizer=str(folder),
        weights=str(folder),
        objectives=like.objectives,
        keep_alive_ms=None,
    )


def _shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    attention, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        of_layer = {
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
            "self_attn.q_proj.weight": (attention, HIDDEN),
            "self_attn.k_proj.weight": (kv, HIDDEN),
            "self_attn.v_proj.weight": (kv, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, attention),
            "mlp.gate_proj.weight": (MLP, HIDDEN),
            "mlp.up_proj.weight": (MLP, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, MLP),
        }
        shapes |= {f"model.layers.{layer}.{part}": shape for part, shape in of_layer.items()}
    return shapes


def _write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> int:
    """Write random matrices, and ones where a norm has its weights; returns the number of parameters."""
    random = np.random.default_rng(seed)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    blobs, end = [], 0
    for name, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else random.normal(0.0, SPREAD, shape)
        blobs.append(values.astype("<f4").tobytes())
        start, end = end, end + len(blobs[-1])
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))
    return end // 4
