"""Turn a GGUF file of a Llama-architecture model into a folder of bf16 safetensors that vLLM loads.

Runs in the engine's environment: ``python -m services.local_sched.vllm_ext.convert_gguf FILE FOLDER``. vLLM
itself reads no GGUF; package registries carry small models in that form only.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig

from shared.errors import FestinaError

WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
PER_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def convert(source: Path, target: Path) -> None:
    """Write `source`'s weights, configuration and tokenizer to the folder `target`, made if need be.

    Raises:
        FestinaError: the file is of another architecture, whose tensors this does not know.
    """
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    if architecture != "llama":
        raise FestinaError(
            f"{source.name} holds a {architecture!r} model; only 'llama' ones can be converted."
        )
    weights = _weights(reader)
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    _config(reader, weights).save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(
        target, save_jinja_files=False
    )  # the chat template goes into tokenizer_config.json


def _field(reader: GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()


def _weights(reader: GGUFReader) -> dict[str, torch.Tensor]:
    """Return the model's tensors by their names in a Llama checkpoint, as bf16."""
    heads_of = {
        "attn_q": _field(reader, "llama.attention.head_count"),
        "attn_k": _field(reader, "llama.attention.head_count_kv"),
    }
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        name = WHOLE_MODEL.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{PER_LAYER[part]}.weight"
            if part in heads_of:
                values = _unpermute(values, heads_of[part])
        weights[name] = torch.from_numpy(np.array(values, order="C")).to(torch.bfloat16)
    return weights


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo the order GGUF gives the rows of each head: it interleaves the two halves that RoPE rotates."""
    rows_per_half = values.shape[0] // heads // 2
    split = values.reshape(heads, rows_per_half, 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def _config(reader: GGUFReader, weights: dict[str, torch.Tensor]) -> LlamaConfig:
    def llama(name: str) -> Any:
        return _field(reader, f"llama.{name}")

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=weights["model.embed_tokens.weight"].shape[0],
        hidden_size=llama("embedding_length"),
        intermediate_size=llama("feed_forward_length"),
        num_hidden_layers=llama("block_count"),
        num_attention_heads=llama("attention.head_count"),
        num_key_value_heads=llama("attention.head_count_kv"),
        max_position_embeddings=llama("context_length"),
        rope_theta=llama("rope.freq_base"),
        rms_norm_eps=llama("attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="lm_head.weight" not in weights,
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
    )


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
