"""Writes the folder of a row: config.json, generation_config.json, tokenizer, random weights."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

WHISPER_LANGUAGES = transformers.models.whisper.tokenization_whisper.LANGUAGES
WEIGHTS = ("model", "pytorch_model")  # what the names of files with weights begin with
SINUSOIDAL = ("marian", "pegasus", "m2m_100")  # whose position tables are computed
# By what the sizes of a published config.json are divided.
DIVISORS = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 6, "num_decoder_layers": 6}
DIVISORS |= {"max_source_positions": 30, "max_target_positions": 8}
DIVISORS |= {"max_initial_timestamp_index": 5, "num_heads": 4, "num_hidden_layers": 12}
DIVISORS |= {"max_length": 8, "min_length": 8}
for _side in ("encoder", "decoder"):
    DIVISORS |= {f"{_side}_layers": 12, f"{_side}_ffn_dim": 64, f"{_side}_attention_heads": 4}


def small(value, vocabulary, key=None):
    """Return a value of a published file for a small model."""
    if isinstance(value, str) and value.startswith("@"):
        name, more = value[1:], value[1] in "+-"
        return 1 + max(vocabulary.values()) + int(name) if more else vocabulary[name]
    if isinstance(value, dict):
        return {key: small(item, vocabulary, key) for key, item in value.items()}
    if isinstance(value, list):
        return [small(item, vocabulary) for item in value]
    return max(1, value // DIVISORS[key]) if value and key in DIVISORS else value


def auto_class(model_type):
    kind = "SpeechSeq2Seq" if model_type == "whisper" else "Seq2SeqLM"
    return getattr(transformers, f"AutoModelFor{kind}")


def random_model(folder, seed=0):
    """Return the model of a config.json whose every leaf is random, biases and norms too."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = auto_class(config.model_type).from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, leaf in [*model.named_parameters(), *model.named_buffers()]:
        if "embed_positions" in name and config.model_type in SINUSOIDAL:
            continue
        is_norm = leaf.ndim == 1 and name.endswith("weight")
        deviation = leaf[0].numel() ** -0.5 if leaf.ndim > 1 and leaf.shape[0] > 1 else 0.1
        if name.endswith(("out_proj.weight", "fc2.weight", ".o.weight", "wo.weight")):
            deviation *= 4  # else a tied table repeats the token that it has read
        leaf.data.normal_(float(is_norm), deviation, generator=generator)
    return model


def write_weights(folder, model, form):
    """Write weights in the published form.

    Its words: bin or safetensors; shards; base (of the class without a head); classifier (of the
    class for sequences); half (float16).
    """
    tensors = model.state_dict()
    if "base" in form or "classifier" in form:
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if not name.startswith(("lm_head", "final_logits_bias"))
        }
    if "base" in form:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if "classifier" in form:
        size, labels = model.config.d_model, model.config.num_labels
        for name, shape in {"dense": (size, size), "out_proj": (labels, size)}.items():
            drawn = {"weight": torch.randn(shape), "bias": torch.randn(shape[:1])}
            tensors |= {f"classification_head.{name}.{leaf}": x for leaf, x in drawn.items()}
    if "half" in form:
        halves = {tensor.data_ptr(): tensor.half() for tensor in tensors.values()}
        tensors = {name: halves[tensor.data_ptr()] for name, tensor in tensors.items()}
    if "safetensors" in form:  # no tensor twice, and nothing that is computed
        first = {tensor.data_ptr(): name for name, tensor in reversed(tensors.items())}
        computed = "embed_positions" if model.config.model_type in SINUSOIDAL else "-"
        tensors = {name: tensors[name] for name in first.values() if computed not in name}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    elif "shards" in form:
        names, index = list(tensors), {}
        for number in (1, 2):
            file = f"pytorch_model-0000{number}-of-00002.bin"
            part = names[number - 1 :: 2]
            torch.save({name: tensors[name] for name in part}, folder / file)
            index |= dict.fromkeys(part, file)
        content = {"metadata": {"total_size": 0}, "weight_map": index}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(content))
    else:
        torch.save(tensors, folder / "pytorch_model.bin")


def write_folder(row, folder):
    """Write everything that the folder of a row has."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = row.tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(small(row.config, ids), indent=2))
    if row.generation is not None:
        content = small(row.generation, ids)
        (folder / "generation_config.json").write_text(json.dumps(content, indent=2))
    if row.weights:
        write_weights(folder, random_model(folder), row.weights.split())
