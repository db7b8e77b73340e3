"""Whisper: a source of sound, and the layers of the BART lineage (Radford et al. 2022)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax_transformer.convert.families import bart_lineage
from jax_transformer.convert.families.family import generation_without_forced_end
from jax_transformer.convert.table import Layout, Operation, Row

# torch.nn.Conv1d has the weight [outputs, inputs, width].
CONVOLUTION = Operation(transposed=True, shape=("d_model", -1, 3))
LAYOUT = Layout(
    "whisper",
    (
        Row("model.encoder.conv{i}.weight", "source_convolution_{i}/kernel", CONVOLUTION),
        Row("model.encoder.conv{i}.bias", "source_convolution_{i}/bias"),
        Row("model.decoder.embed_tokens.weight", "target_embedding/embedding"),
        Row("proj_out.weight", "target_embedding/embedding", when=("output_projection", "tied")),
        *bart_lineage.stack_rows("model."),
    ),
)
SMALLEST = 51_864  # tokens of the smallest published vocabulary
# Behind <|startoflm|>, which no text holds, stand three tokens and 1,501 times.
UNUSED_FROM_END = 1505


def padding_beside(vocab_size: int, eos_id: int, bands: int | None) -> int:
    """Return the id that stands for padding where a file pads with EOS: that of <|startoflm|>.

    EOS is to be learned, and padding is not. transformers pads the labels of a batch by -100, and
    hides no padding of the decoder's input, which causal attention does not read before its end.
    """
    if vocab_size >= SMALLEST:  # also where tokens were added: the start, 99 languages, two tasks
        return eos_id + 103 + (bands == 128)  # and the language that large-v3 has brought
    pad_id = max(0, vocab_size - UNUSED_FROM_END)
    return pad_id + (pad_id == eos_id)


def _implied(fields: Mapping[str, Any]) -> dict[str, int]:
    if fields["pad_id"] != fields["eos_id"]:
        return {}
    eos_id, bands = fields["eos_id"], fields["source_features"]
    return {"pad_id": padding_beside(fields["tgt_vocab_size"], eos_id, bands)}


def _written(values: dict[str, Any]) -> dict[str, Any]:
    eos_id, bands = values["eos_token_id"], values["num_mel_bins"]
    is_eos = values["pad_token_id"] == padding_beside(values["vocab_size"], eos_id, bands)
    return {**values, "pad_token_id": eos_id} if is_eos else values


LENGTHS = {"max_source_positions": "encoder_max_length", "max_target_positions": "max_length"}
WHISPER = replace(
    bart_lineage.BART,
    model_type="whisper",
    architecture="WhisperForConditionalGeneration",
    heads=(),
    preset="whisper",
    layout=LAYOUT,
    # transformers pads with EOS, which it does not generate twice.
    generation=lambda config: {
        **generation_without_forced_end(config),
        "pad_token_id": config.eos_id,
    },
    fields={
        "vocab_size": ("src_vocab_size", "tgt_vocab_size"),
        "num_mel_bins": "source_features",
        **LENGTHS,
        **{k: name for k, name in bart_lineage.FIELDS.items() if k != "max_position_embeddings"},
    },
    # The class has this key, and does not read it.
    words={"activation_function": bart_lineage.WORDS["activation_function"]},
    # SpecAugment hides frames and bands in training.
    training_only={**bart_lineage.BART.training_only, "apply_spec_augment": False},
    defaults={
        **bart_lineage.DEFAULTS,
        "vocab_size": 51_865,
        "num_mel_bins": 80,
        "d_model": 384,
        **bart_lineage.sizes(4, 6, 1536),
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "dropout": 0.0,
        **dict.fromkeys(("pad_token_id", "eos_token_id"), 50_256),
        "decoder_start_token_id": 50_257,
    },
    implied=_implied,
    written=_written,
    tokenizer="WhisperTokenizer",
)
FAMILIES = (WHISPER,)
