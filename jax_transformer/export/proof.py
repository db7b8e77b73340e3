"""What an export is proven by: random sources that the artifact and `generate` both translate."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int32

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding import GenerationConfig, generate
from jax_transformer.errors import InputError
from jax_transformer.model.checks import check_text
from jax_transformer.text.batches import pad
from jax_transformer.translation.model_folder import TrainedModel

PROOF_SOURCES, PROOF_LENGTH = 16, 24  # sources; their most ordinary tokens


class Proof(NamedTuple):
    """Sources and the translations of them that an artifact must find."""

    src: Int32[np.ndarray, "batch length"]  # padded at the right
    max_new_tokens: int
    translations: list[list[int]]  # token ids, EOS included


def check_expressible(
    config: TransformerConfig,
    expressible: Mapping[str, tuple[Any, ...]],
    program: str,
    free: Collection[str] | None = None,
) -> None:
    """Refuse a field of a config that has none of the values that a program can express.

    Args:
        expressible: The values that the program can express of a field.
        free: The other fields of which it can express every value; None is all of them. What is in
            neither must have its default.
    """
    if free is not None:
        fields = {each.name: each.default for each in dataclasses.fields(config)}
        others = [name for name in fields if name not in free and name not in expressible]
        expressible = {**expressible, **{name: (fields[name],) for name in others}}
    for name, values in expressible.items():
        if (value := getattr(config, name)) not in values:
            allowed = " or ".join(map(repr, values))
            raise InputError(f"{name}={value!r}: {program} can express {allowed} alone")


def greedy_search(model: TrainedModel) -> GenerationConfig:
    """Return the options of greedy search with the model's first tokens."""
    return GenerationConfig(
        model.config.max_length,
        start_token=model.generation.get("start_token"),
        forced_first_token=model.generation.get("forced_first_token"),
    )


def float32(leaf: Array | np.ndarray) -> np.ndarray:
    """Return a copy of a parameter in float32."""
    return np.array(leaf, np.float32)


def prove(model: TrainedModel, generation: GenerationConfig) -> Proof:
    """Return random sources of several lengths, and what `generate` makes of them."""
    config, tokenizer = model.config, model.tokenizer
    check_text(config)
    prefix, suffix = tokenizer.affixes("source")
    special = {config.pad_id, config.bos_id, config.eos_id, tokenizer.unk_id}
    ordinary = [token_id for token_id in range(tokenizer.src_vocab_size) if token_id not in special]
    random = np.random.default_rng(0)
    longest = min(PROOF_LENGTH, config.max_length - len(prefix) - len(suffix))
    lengths = random.integers(1, longest, PROOF_SOURCES, endpoint=True)
    rows = [[*prefix, *random.choice(ordinary, length).tolist(), *suffix] for length in lengths]
    src = pad(rows, config.pad_id)
    most = min(2 * PROOF_LENGTH, generation.max_new_tokens)
    most = max(most, 1 + (generation.min_new_tokens or 0))
    found = generate(model.params, config, src, generation, max_new_tokens=most)
    lengths = np.asarray(found.lengths)[:, 0]
    tokens = np.asarray(found.tokens)[:, 0]
    ids = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    return Proof(src, most, ids)


def check_proof(
    proof: Proof, found: Sequence[Sequence[int]], folder: Path, program: str, exact: bool
) -> str:
    """Return a line that says how many translations of an artifact are equal.

    Args:
        found: The token ids of each translation, EOS included.
        program: What has run the artifact.
        exact: Whether a translation that differs is refused.

    Raises:
        InputError: A translation differs, though it must not.
    """
    pairs, count = zip(proof.translations, found, strict=True), len(proof.translations)
    equal = sum(list(ours) == list(theirs) for ours, theirs in pairs)
    if exact and equal < count:
        raise InputError(
            f"{folder}: not written, because {count - equal} of {count} random sources are "
            f"translated otherwise by {program}"
        )
    return f"{equal} of {count} random sources have the same translation, id for id"
