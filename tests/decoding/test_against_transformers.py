"""Every hypothesis and score of a search beside those of transformers, rule by rule.

The models are random, but their targets vary: the output table is not the embedding table, all
biases are random, and the bias of EOS is high. Both sides compute in float64, so that no near-tie
decides.
"""

import dataclasses
import itertools
import os

import jax
import numpy as np
import pytest
import torch

from jax_transformer.convert.huggingface import from_huggingface
from tests.convert.families.bart_lineage import sinusoids
from tests.decoding.float64_torch import Float64Torch
from tests.decoding.plain import quick_generate
from tests.parity.ladder import ROUNDED, score_error
from tests.tiers import tiered

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

VOCABULARY, EOS, PAD = 24, 0, 23  # padding is also the start token, as in every Marian
SEEDS = (1, 2)
BATCH, SOURCE_LENGTH, LONGEST = 16, 7, 6
PENALTIES = (-1.0, 0.0, 0.6, 1.0, 2.0)
STOPPING = (True, False, "never")
ROWS = np.arange(BATCH)
PREFIX = np.random.default_rng(3).integers(1, PAD, (BATCH, 2))
STARTS = np.random.default_rng(4).integers(1, PAD, BATCH)
RAGGED = np.arange(2) < (ROWS % 3)[:, None]
LIMITS = np.array([LONGEST, 5, 1, 3])[ROWS % 4]
SEQUENCES = ((5,), (EOS,), (7, 8), (PAD, 9), (3, 4, 5), (11, 11))


def models():
    """Yield models of transformers of one shape, and the same models here."""
    config = transformers.MarianConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        activation_function="relu",
        max_position_embeddings=16,
        pad_token_id=PAD,
        decoder_start_token_id=PAD,
        eos_token_id=EOS,
        forced_eos_token_id=None,
    )
    for seed in SEEDS:
        model = transformers.MarianMTModel(config).double().eval()
        random = torch.Generator().manual_seed(seed)
        for name, leaf in [*model.named_parameters(), *model.named_buffers()]:
            if "embed_positions" in name:
                leaf.data = sinusoids(*leaf.shape)
            else:
                deviation = 0.3 if leaf.ndim == 1 else 1.0 if "shared" in name else 0.5
                leaf.data.normal_(float("norm.weight" in name), deviation, generator=random)
        own_config, params = from_huggingface(model)
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
        model.lm_head.weight.data.normal_(generator=random)
        # Without the mean, which the biases inside the model make large, one token always wins.
        targets = torch.randint(1, PAD, (BATCH, LONGEST), generator=random)
        with torch.no_grad():
            logits = model(**as_inputs(sources(seed)), decoder_input_ids=targets).logits
        model.final_logits_bias -= logits.mean(dim=(0, 1))
        model.final_logits_bias[0, EOS] += 2.0
        params["output_projection"] = {
            "kernel": model.lm_head.weight.data.T.numpy(),
            "bias": model.final_logits_bias[0].numpy(),
        }
        yield model, dataclasses.replace(own_config, output_projection="linear"), params


def sources(seed):
    random = np.random.default_rng(seed)
    src = np.full((BATCH, SOURCE_LENGTH), PAD, np.int32)
    for row, length in enumerate(random.integers(1, SOURCE_LENGTH, BATCH)):
        src[row, :length] = random.integers(1, PAD, length)
        src[row, length] = (EOS, PAD)[row % 2]  # n-grams of one token would forbid each EOS
    return src


def as_inputs(src):
    return {
        "input_ids": torch.tensor(src).long(),
        "attention_mask": torch.tensor(src != PAD).long(),
    }


@pytest.fixture(autouse=True)
def float64_search(monkeypatch):
    monkeypatch.setattr(transformers.generation.utils, "torch", Float64Torch())


@pytest.fixture(scope="module")
def every_model():
    jax.config.update("jax_enable_x64", True)
    yield list(models())
    jax.config.update("jax_enable_x64", False)


def as_transformers(options):
    """Return the options of `generate` under the names of transformers."""
    names = {
        "beam_size": "num_beams",
        "num_hypotheses": "num_return_sequences",
        "start_token": "decoder_start_token_id",
        "eos_ids": "eos_token_id",
        "forced_first_token": "forced_bos_token_id",
        "forced_last_token": "forced_eos_token_id",
        "begin_suppressed_tokens": "begin_suppress_tokens",
        "renormalize": "renormalize_logits",
    }
    values = dict(options)
    bad = [[] if values.pop("allow_padding", False) else [PAD]]
    bad += [[token] for token in values.pop("banned_tokens", ())]
    bad += map(list, values.pop("banned_sequences", ()))
    values["bad_words_ids"] = [ids for ids in bad if ids] or None
    prefix = values.pop("prefix", None)
    values = {
        names.get(name, name): list(value) if isinstance(value, tuple | np.ndarray) else value
        for name, value in values.items()
    }
    if prefix is not None:
        start = np.broadcast_to(options.get("start_token", PAD), len(prefix))[:, None]
        values["decoder_input_ids"] = torch.tensor(np.concatenate([start, prefix], axis=1))
    return values


def hypotheses_of(model, src, options):
    """Return tokens (padding after the end), lengths and scores of rows of one length."""
    beams, prefix = options["beam_size"], options.get("prefix")
    result = model.generate(
        **as_inputs(src),
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **as_transformers(options),
    )
    prompt = 1 if prefix is None else 1 + prefix.shape[1]
    tokens = result.sequences[:, prompt:]
    is_end = np.isin(tokens, options.get("eos_ids", (EOS,)))
    lengths = np.where(is_end.any(axis=1), is_end.argmax(axis=1) + 1, tokens.shape[1])
    places = np.arange(tokens.shape[1])
    if beams > 1:
        scores = result.sequences_scores.numpy()
    else:  # transformers returns no sum, only the numbers to be added up
        chosen = result.scores if options.get("renormalize") else result.logits
        chosen = torch.stack(chosen, dim=1).log_softmax(dim=-1)
        added = chosen.gather(-1, tokens[..., None])[..., 0].numpy()
        forced = (places == 0) & ("forced_first_token" in options and prefix is None)
        forced |= (places == options["max_new_tokens"] - 1) & ("forced_last_token" in options)
        added = np.where((places < lengths[:, None]) & ~forced, added, 0)
        scores = added.sum(axis=1) / lengths ** options["length_penalty"]
    tokens = np.where(places < lengths[:, None], tokens, PAD)
    if prefix is not None:
        tokens = np.concatenate([np.repeat(prefix, beams, axis=0), tokens], axis=1)
    return tokens, lengths + prompt - 1, scores


def found_by_transformers(model, src, options):
    """Return all hypotheses as `generate` does; transformers gets the rows of one length."""
    shape = (BATCH, options["beam_size"])
    options = dict(options)
    prefix = options.pop("prefix", np.zeros((BATCH, 0), np.int32))
    limits = options.pop("length_limits", np.full(BATCH, LONGEST))
    prefixes = np.count_nonzero(prefix != PAD, axis=1)
    tokens = np.full((*shape, prefix.shape[1] + LONGEST), PAD)
    lengths, scores = np.zeros(shape, int), np.zeros(shape)
    for length, limit in set(zip(prefixes.tolist(), limits.tolist(), strict=True)):
        rows = np.flatnonzero((prefixes == length) & (limits == limit))
        changed = {"max_new_tokens": limit}
        if length:
            changed["prefix"] = prefix[rows, :length]
        if isinstance(options.get("start_token"), np.ndarray):
            changed["start_token"] = options["start_token"][rows]
        some, *others = hypotheses_of(model, src[rows], options | changed)
        tokens[rows, :, : some.shape[1]] = some.reshape(len(rows), shape[1], -1)
        lengths[rows], scores[rows] = (part.reshape(len(rows), shape[1]) for part in others)
    # Where a source has too few targets, transformers fills up with copies that score -1e9.
    copies = scores < -1e6
    tokens[copies], lengths[copies], scores[copies] = PAD, 0, -np.inf
    return tokens, lengths, scores


CASES = {
    "plain": {},
    "forced": {"forced_first_token": 5, "forced_last_token": EOS, "min_new_tokens": 2},
    "limits": {"forced_last_token": 6, "start_token": STARTS, "length_limits": LIMITS},
    "n-grams": {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 1},
    "words": {
        "banned_tokens": (2, 3),
        "banned_sequences": SEQUENCES,
        "encoder_no_repeat_ngram_size": 2,
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 3,
    },
    "begin": {
        "begin_suppressed_tokens": (EOS, 4, 6, 8),
        "forced_first_token": 7,
        "eos_ids": (EOS, 1, 2),
        "renormalize": True,
        "banned_tokens": (3,),
    },
    "ends": {
        "eos_ids": (EOS, 4),
        "begin_suppressed_tokens": (EOS, 6),
        "allow_padding": True,
        "min_new_tokens": 2,
    },
    "prefix": {
        "prefix": PREFIX,
        "forced_first_token": 5,
        "forced_last_token": EOS,
        "begin_suppressed_tokens": (4, 8),
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 2,
    },
    "prefixes": {  # of 0, 1 and 2 tokens, one of them EOS
        "prefix": np.where((ROWS == 2)[:, None], EOS, np.where(RAGGED, PREFIX, PAD)),
        "start_token": 3,
        "forced_first_token": 5,
        "begin_suppressed_tokens": (EOS, 8),
        "banned_sequences": SEQUENCES,
        "repetition_penalty": 0.7,
        "renormalize": True,
    },
}
SEARCHES = [(name, 1, ("never",)) for name in CASES]
SEARCHES += [(name, beams, STOPPING) for name in ("plain", "forced") for beams in (3, 4)]
QUICK = [("words", 1, ("never",)), ("forced", 3, STOPPING)]
SEARCHES += [
    ("limits", 4, (False,)),
    ("n-grams", 3, ("never",)),
    ("words", 4, (False,)),
    ("begin", 3, (False,)),
    ("ends", 4, (True,)),
    ("prefix", 3, (False,)),
    ("prefixes", 4, (False,)),
]


@pytest.fixture(scope="module")
def tally():
    """Print the sums of all comparisons."""
    results = []
    yield results
    count, different, worst = zip(*results, strict=True)
    print(
        f"\n{sum(count):,} hypotheses, {sum(different)} differ, worst score {max(worst):.0e}",
        end="",
    )


@pytest.mark.parametrize("search", tiered(SEARCHES, QUICK), ids=str)
def test_ids_and_scores_are_those_of_transformers(every_model, tally, search):
    name, beams, kinds = search
    by_kind, seen = {}, set()
    for kind, (index, penalty) in itertools.product(kinds, enumerate(PENALTIES)):
        model, config, params = every_model[index % len(SEEDS)]
        src = sources(seed=index)
        options = {
            "max_new_tokens": LONGEST,
            "beam_size": beams,
            "num_hypotheses": beams,
            "length_penalty": penalty,
            "early_stopping": kind,
            **CASES[name],
        }
        tokens, lengths, scores = found_by_transformers(model, src, options)
        found = quick_generate(params, config, src, length_normalization="power", **options)
        same = np.all(found.tokens == tokens, axis=-1) & (found.lengths == lengths)
        apart = score_error(found.scores, scores)
        tally.append((same.size, (~same).sum(), apart))
        assert same.all(), (kind, penalty)
        assert apart <= ROUNDED, (kind, penalty)
        by_kind.setdefault(kind, []).append(tokens)
        seen |= set(lengths.flat)
    assert len(seen) > 3
    if len(kinds) == len(STOPPING):  # each kind finds something that another does not
        for one, other in itertools.combinations(by_kind.values(), 2):
            assert any((a != b).any() for a, b in zip(one, other, strict=True))


def test_a_memory_is_searched_as_encoder_outputs_are(every_model):
    model, config, params = every_model[0]
    src = sources(seed=0)
    memory = np.random.default_rng(5).normal(size=(BATCH, SOURCE_LENGTH, config.d_model))
    outputs = transformers.modeling_outputs.BaseModelOutput(torch.from_numpy(memory))
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": LONGEST}
    result = model.generate(
        encoder_outputs=outputs,
        attention_mask=as_inputs(src)["attention_mask"],
        bad_words_ids=[[PAD]],
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    options = {"beam_size": 3, "num_hypotheses": 3, "max_new_tokens": LONGEST}
    options |= {"length_penalty": 1.0, "length_normalization": "power", "early_stopping": False}
    found = quick_generate(params, config, src, memory=memory, **options)
    tokens = np.asarray(found.tokens).reshape(3 * BATCH, LONGEST)
    np.testing.assert_array_equal(tokens, result.sequences[:, 1:])
    assert score_error(found.scores.ravel(), result.sequences_scores.numpy()) <= ROUNDED
