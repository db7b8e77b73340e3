"""Speed of `generate` beside Hugging Face and CTranslate2: python -m benchmarks.decoding.

Of one model of each lineage: Marian and M2M100, which descend from BART, and T5. The same weights
and sources, greedy and beam search, exactly `NEW_TOKENS` tokens a target, float32 on one core,
called in turn, each call right after a discarded one. Needs the extra "test", and Linux
(sched_setaffinity).
"""

import json
import os
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import tyro
from jaxtyping import Int32
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.systems import processor, spread, start, stop, time_in_turn
from jax_transformer import TransformerConfig, convert, generate, init_params

VOCAB_SIZE = 8_000
NEW_TOKENS = 64
SOURCE_LENGTHS = (28, 36)  # shortest and longest
BATCHES = (1, 8, 32)
BEAM_SIZES = (1, 4)
FIRST = 4  # ids below are special


class Lineage(NamedTuple):
    """A model that is timed: the base size of Vaswani et al. 2017.

    Attributes:
        preset: Preset of `TransformerConfig`.
        fields: Fields that differ from it.
        model_type: Family in `convert.families`.
        model: Class of transformers.
        loader: Class of CTranslate2's converter.
        tokens: Special tokens by id; CTranslate2 reads words.
    """

    preset: str
    fields: dict[str, Any]
    model_type: str
    model: str
    loader: str
    tokens: dict[int, str]

    @property
    def config(self) -> TransformerConfig:
        """The shape of the model."""
        vocabulary = {"src_vocab_size": VOCAB_SIZE, "tgt_vocab_size": VOCAB_SIZE}
        return TransformerConfig.preset(self.preset, **vocabulary, **self.fields)

    @property
    def words(self) -> list[str]:
        """The token of each id."""
        return [self.tokens.get(index, str(index)) for index in range(VOCAB_SIZE)]


LINEAGES = {
    "marian": Lineage(
        "marian",
        {"pad_id": VOCAB_SIZE - 1, "bos_id": VOCAB_SIZE - 1},
        "marian",
        "MarianMTModel",
        "MarianMTLoader",
        {0: "</s>", 1: "<unk>", VOCAB_SIZE - 1: "<pad>"},
    ),
    "m2m100": Lineage(
        "m2m100",
        {
            "d_model": 512,
            "num_heads": 8,
            "d_ff": 2048,
            "num_encoder_layers": 6,
            "num_decoder_layers": 6,
        },
        "m2m_100",
        "M2M100ForConditionalGeneration",
        "M2M100Loader",
        {0: "<s>", 1: "<pad>", 2: "</s>", 3: "<unk>"},
    ),
    "t5": Lineage(
        "t5",
        {},
        "t5",
        "T5ForConditionalGeneration",
        "T5Loader",
        {0: "<pad>", 1: "</s>", 2: "<unk>"},
    ),
}

Sources = Int32[np.ndarray, "batch source_length"]
Targets = Int32[np.ndarray, "batch target_length"]
System = Callable[[Sources, int], Targets]  # of sources and a beam size


def write_models(folder: Path, lineage: Lineage) -> None:
    """Write the model for each system: folder/huggingface, folder/ctranslate2.

    The kernels are four times as large as drawn: a smaller model repeats one token for ever. The
    row of padding, which begins a target, is 0 as in the opus-mt models; CTranslate2 relies on it.
    """
    import transformers
    from ctranslate2.converters import transformers as loaders

    config, words = lineage.config, lineage.words
    params = init_params(jax.random.key(0), config)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: 4 * leaf if path[-1].key == "kernel" else leaf, params
    )
    table = params["token_embedding"]["embedding"]
    params["token_embedding"]["embedding"] = table.at[config.pad_id].set(0)
    convert.to_huggingface(params, config, folder / "huggingface", family=lineage.model_type)
    # TransformersConverter would want a tokenizer's files; its loader wants these of its fields.
    tokenizer = SimpleNamespace(
        bos_token=words[config.bos_id],
        eos_token=words[config.eos_id],
        pad_token=words[config.pad_id],
        unk_token="<unk>",
        special_tokens_map={},
        num_madeup_words=0,
        convert_ids_to_tokens=lambda index: words[index],
        get_vocab=lambda: {token: index for index, token in enumerate(words)},
    )
    model_class = getattr(transformers, lineage.model)
    model = model_class.from_pretrained(folder / "huggingface")
    specification = getattr(loaders, lineage.loader)()(model, tokenizer)
    specification.validate()
    specification.optimize(quantization="float32")
    (folder / "ctranslate2").mkdir()
    specification.save(folder / "ctranslate2")


def load_ours(folder: Path, lineage: Lineage) -> System:
    """Return `generate` of this library."""
    config, params = convert.from_huggingface(folder / "huggingface")

    def run(src: Sources, beam_size: int) -> Targets:
        hypotheses = generate(
            params,
            config,
            src,
            max_new_tokens=NEW_TOKENS,
            beam_size=beam_size,
            banned_tokens=(config.eos_id,),
        )
        return np.asarray(hypotheses.tokens[:, 0])

    return run


def load_huggingface(folder: Path, lineage: Lineage) -> System:
    """Return `generate` of transformers."""
    import torch
    import transformers

    torch.set_num_threads(1)
    model_class = getattr(transformers, lineage.model)
    model = model_class.from_pretrained(folder / "huggingface").eval()
    model.generation_config.max_length = None  # max_new_tokens is given
    model.generation_config.forced_eos_token_id = None

    def run(src: Sources, beam_size: int) -> Targets:
        ids = torch.tensor(src, dtype=torch.int64)
        mask = (ids != model.config.pad_token_id).long()
        with torch.inference_mode():
            targets = model.generate(
                ids,
                attention_mask=mask,
                num_beams=beam_size,
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
            )
        return targets[:, 1:].numpy().astype(np.int32)  # without the begin

    return run


def load_ctranslate2(folder: Path, lineage: Lineage) -> System:
    """Return `translate_batch` of CTranslate2."""
    import ctranslate2

    translator = ctranslate2.Translator(
        str(folder / "ctranslate2"), compute_type="float32", inter_threads=1, intra_threads=1
    )
    words, pad_id = lineage.words, lineage.config.pad_id
    ids = {token: index for index, token in enumerate(words)}

    def run(src: Sources, beam_size: int) -> Targets:
        results = translator.translate_batch(
            [[words[index] for index in row if index != pad_id] for row in src],
            beam_size=beam_size,
            max_decoding_length=NEW_TOKENS,
            min_decoding_length=NEW_TOKENS,
        )
        rows = [[ids[token] for token in result.hypotheses[0]] for result in results]
        return np.array(rows, np.int32)

    return run


LOADERS = {"ours": load_ours, "Hugging Face": load_huggingface, "CTranslate2": load_ctranslate2}


def draw_sources(batch: int, pad_id: int) -> Sources:
    """Return random sources, all but those of the longest length padded."""
    random = np.random.default_rng(batch)
    shortest, longest = SOURCE_LENGTHS
    src = random.integers(FIRST, VOCAB_SIZE - 1, (batch, longest), dtype=np.int32)
    lengths = random.integers(shortest, longest + 1, batch)
    src[np.arange(longest) >= lengths[:, None]] = pad_id
    return src[:, : lengths.max()]


def compare(
    systems: dict[str, Connection], src: Sources, beam_size: int, rounds: int
) -> dict[str, Any]:
    """Return the seconds of each system in each round, and in how many rows its ids are others."""
    targets, seconds = time_in_turn(systems, (src, beam_size), rounds)
    batch = len(src)
    return {
        "batch": batch,
        "beam_size": beam_size,
        "seconds": seconds,
        "rows_that_differ": {
            name: int((found != targets["ours"]).any(axis=1).sum())
            for name, found in targets.items()
        },
    }


def cells(result: dict[str, Any]) -> list[str]:
    """Return a result as a row of the table."""
    seconds = result["seconds"]
    ratios = [np.divide(seconds[name], seconds["ours"]) for name in list(LOADERS)[1:]]
    return [
        str(result["batch"]),
        "greedy" if result["beam_size"] == 1 else f"beam {result['beam_size']}",
        *(f"{median(taken):.3f}" for taken in seconds.values()),
        *map(spread, ratios),
        *(str(result["rows_that_differ"][name]) for name in list(LOADERS)[1:]),
    ]


def main(
    lineage: Literal[tuple(LINEAGES)] = "marian",
    rounds: int = 5,
    core: int = 0,
    json_file: Path | None = None,
) -> None:
    """Time all three systems on every task, print seconds and ratios.

    Args:
        lineage: The model that is timed.
        rounds: How often each system is timed on each task, in turn with the others.
        core: The one core that everything runs on.
        json_file: Where to write the seconds of every call, if anywhere.
    """
    os.sched_setaffinity(0, {core})  # inherited by the processes begun from here on
    others = list(LOADERS)[1:]
    table = Table("batch", "search", *(f"{name}, s" for name in LOADERS))
    for heading in (*(f"{name} / ours" for name in others), *(f"ids unlike {n}" for n in others)):
        table.add_column(heading)
    results = []
    with tempfile.TemporaryDirectory() as name:
        model = LINEAGES[lineage]
        write_models(Path(name), model)
        systems = start(LOADERS, Path(name), model)
        for beam_size in BEAM_SIZES:
            for batch in track(BATCHES, "greedy" if beam_size == 1 else f"beam {beam_size}"):
                src = draw_sources(batch, model.config.pad_id)
                results.append(compare(systems, src, beam_size, rounds))
                table.add_row(*cells(results[-1]))
        stop(systems)
    versions = {name: version(name) for name in ("jax", "transformers", "torch", "ctranslate2")}
    Console().print(
        table,
        f"Seconds are the median of {rounds} calls, ratios the least, median and most of {rounds} "
        f"rounds, ids rows of the batch. {lineage}: {NEW_TOKENS} tokens a target, float32, one "
        f"core: {processor()}. {', '.join(f'{n} {v}' for n, v in versions.items())}.",
    )
    if json_file is not None:
        record = {
            "lineage": lineage,
            "processor": processor(),
            "versions": versions,
            "results": results,
        }
        json_file.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
