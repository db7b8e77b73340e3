"""Small Hugging Face translation models, trained by transformers on real text with real tokenizers.

`build` writes a folder as `save_pretrained` does. Nothing is downloaded.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

SIZES = {
    "d_model": 128,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "max_position_embeddings": 128,
    "scale_embedding": True,
}
PIECES = 4000  # of a sentencepiece model


def build(
    family: str,
    folder: Path,
    sources: Sequence[str],
    targets: Sequence[str],
    steps: int,
    **sizes: int,
) -> None:
    """Train a tokenizer and a model of a family, and write them.

    Args:
        family: "marian" or "pegasus".
        folder: The folder to write; created.
        sources: Source sentences.
        targets: Their translations.
        steps: Training steps, of 64 pairs each.
        **sizes: Keys of config.json that differ from `SIZES`.
    """
    import torch

    folder.mkdir(parents=True)
    torch.manual_seed(0)
    model, tokenizer = FAMILIES[family](folder, sources, targets, SIZES | sizes)
    _train(model, tokenizer, sources, targets, steps)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _marian(
    folder: Path, sources: Sequence[str], targets: Sequence[str], sizes: dict[str, Any]
) -> tuple[Any, Any]:
    from sentencepiece import SentencePieceProcessor
    from transformers import GenerationConfig, MarianConfig, MarianMTModel, MarianTokenizer

    pieces: dict[str, None] = dict.fromkeys(["</s>", "<unk>"])
    for side, lines in (("source", sources), ("target", targets)):
        _train_sentencepiece(folder / f"{side}.spm", lines, PIECES)
        processor = SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        names = [processor.id_to_piece(index) for index in range(processor.get_piece_size())]
        pieces |= dict.fromkeys(name for name in names if name not in ("<s>", "<pad>"))
    pieces["<pad>"] = None
    (folder / "vocab.json").write_text(
        json.dumps({piece: index for index, piece in enumerate(pieces)}), "utf-8"
    )
    files = {name: str(folder / f"{name}.spm") for name in ("source", "target")}
    tokenizer = MarianTokenizer(
        files["source"], files["target"], str(folder / "vocab.json"), source_lang="en"
    )
    pad, eos = len(pieces) - 1, 0
    config = MarianConfig(
        vocab_size=len(pieces),
        pad_token_id=pad,
        decoder_start_token_id=pad,
        eos_token_id=eos,
        bos_token_id=eos,
        forced_eos_token_id=eos,
        activation_function="swish",
        **sizes,
    )
    model = MarianMTModel(config)
    model.generation_config = GenerationConfig(
        bad_words_ids=[[pad]],
        decoder_start_token_id=pad,
        eos_token_id=eos,
        forced_eos_token_id=eos,
        max_length=128,
        num_beams=4,
        pad_token_id=pad,
        renormalize_logits=True,
    )
    return model, tokenizer


def _pegasus(
    folder: Path, sources: Sequence[str], targets: Sequence[str], sizes: dict[str, Any]
) -> tuple[Any, Any]:
    from transformers import (
        GenerationConfig,
        PegasusConfig,
        PegasusForConditionalGeneration,
        PegasusTokenizer,
    )

    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}  # as in Pegasus's own models
    _train_sentencepiece(folder / "spiece.model", [*sources, *targets], 2 * PIECES, **ids)
    tokenizer = PegasusTokenizer.from_pretrained(folder)
    config = PegasusConfig(
        vocab_size=len(tokenizer),
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=1,
        forced_eos_token_id=1,
        activation_function="relu",
        **sizes,
    )
    model = PegasusForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=0,
        eos_token_id=1,
        forced_eos_token_id=1,
        length_penalty=0.8,
        max_length=64,
        num_beams=8,
        pad_token_id=0,
    )
    return model, tokenizer


FAMILIES: dict[str, Callable[..., tuple[Any, Any]]] = {"marian": _marian, "pegasus": _pegasus}


def _train_sentencepiece(path: Path, lines: Sequence[str], size: int, **ids: int) -> None:
    from sentencepiece import SentencePieceTrainer

    with path.open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=file,
            vocab_size=size,
            character_coverage=1.0,
            minloglevel=2,
            **ids,
        )


def _batches(
    model: Any, tokenizer: Any, sources: Sequence[str], targets: Sequence[str], steps: int
) -> Iterator[dict[str, Any]]:
    """Yield batches of 64 pairs of similar length, in random order."""
    import torch

    src = tokenizer(list(sources)).input_ids
    tgt = tokenizer(text_target=list(targets)).input_ids
    order = np.argsort([len(ids) for ids in src], kind="stable")
    starts = np.arange(0, len(order) - 63, 64)
    random = np.random.default_rng(0)

    def padded(rows: list[list[int]], value: int) -> Any:
        rows = [torch.tensor(row) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    for start in random.choice(starts, steps):
        members = order[start : start + 64]
        ids = padded([src[index] for index in members], model.config.pad_token_id)
        yield {
            "input_ids": ids,
            "attention_mask": (ids != model.config.pad_token_id).long(),
            "labels": padded([tgt[index] for index in members], -100),
        }


def _train(
    model: Any, tokenizer: Any, sources: Sequence[str], targets: Sequence[str], steps: int
) -> None:
    import torch

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 200, (steps - step) / (steps / 3))
    )
    model.train()
    batches = _batches(model, tokenizer, sources, targets, steps)
    for batch in track(batches, f"training {type(model).__name__}", total=steps):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"last loss {loss.item():.3f} nats a token")
