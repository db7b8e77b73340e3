"""Marian's own folders, read and written: against Marian's results and a rebuild in numpy."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
import torch

import jax_transformer
import torch_reference
from jax_transformer.commands.main import main
from jax_transformer.convert import from_huggingface, to_huggingface, to_torch
from jax_transformer.convert.huggingface import load_folder
from jax_transformer.runs.model_settings import read_tokenizer
from tests.convert.marian.published import PUBLISHED
from tests.convert.marian.rebuild import Marian
from tests.tiers import tiered, tiered_rows
from tests.tokenizers.sentencepiece_models import text, train

HERE = Path(__file__).parent
TRAINED = ["self_attention", "ssru"]
QUICK = ("opus_mt", "student_top")
SOURCE, TARGET = [4, 5, 1, 8, 0], [5, 2, 2, 0]


@pytest.mark.parametrize("name", TRAINED)
def test_translations_and_scores_are_those_of_marian(name):
    expected = json.loads((HERE / name / "marian.json").read_text())
    translator = jax_transformer.Translator(HERE / name)
    results = translator(expected["sources"], num_hypotheses=4)
    for result, hypotheses in zip(results, expected["translations"], strict=True):
        assert [each.text for each in result.hypotheses] == [text for text, *_ in hypotheses]
        scores = [each.score for each in result.hypotheses]
        np.testing.assert_allclose(scores, [score for *_, score in hypotheses], rtol=1e-5)


@pytest.mark.parametrize("name", tiered(TRAINED, ["ssru"]))
def test_both_frameworks_begin_with_a_zero_vector(name):
    config, params = from_huggingface(HERE / name)
    src, tgt = np.array([SOURCE]), np.array([[config.bos_id, *TARGET[:-1]]])
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        apply = functools.partial(jax_transformer.apply, config=config, src=src, tgt=tgt)
        summed = lambda params: (jnp.sum(logits := apply(params)), logits)  # noqa: E731
        (_, logits), gradient = jax.jit(jax.value_and_grad(summed, has_aux=True))(wide)
        logits, gradient = np.asarray(logits), np.asarray(gradient["token_embedding"]["embedding"])
    tensors = to_torch(wide, config)
    model = torch_reference.Transformer(config).double().eval()
    model.load_state_dict({key: torch.as_tensor(tensor) for key, tensor in tensors.items()})
    found = model(torch.tensor(src), torch.tensor(tgt))
    found.sum().backward()
    theirs = model.token_embedding.weight.grad.numpy()
    assert np.abs(found.detach().numpy() - logits).max() <= 1e-14 * np.abs(logits).max()
    assert np.abs(theirs - gradient).max() <= 1e-13 * np.abs(gradient).max()


@pytest.mark.parametrize(
    ("name", "options"),
    tiered_rows(PUBLISHED.items(), lambda name, _: name in QUICK),
    ids=PUBLISHED,
)
def test_a_folder_has_the_logits_of_a_rebuild_and_is_written_again(name, options, tmp_path):
    marian = Marian(options)
    config, params, tokenizer, _ = load_folder(marian.save(tmp_path / "model"))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        src, tgt = np.array([SOURCE]), np.array([[config.bos_id, *TARGET[:-1]]])
        logits = np.asarray(
            jax.jit(jax_transformer.apply, static_argnums=1)(wide, config, src, tgt)[0]
        )
    expected = marian.logits(SOURCE, TARGET)
    np.testing.assert_allclose(logits[:, :-1], expected, rtol=0, atol=1e-12 * abs(expected).max())
    assert np.exp(logits[:, -1] - logits.max()).max() == 0  # padding takes no probability

    back = tmp_path / "back"
    to_huggingface(params, config, back, family="marian_npz", tokenizer=tokenizer)
    with np.load(back / "model.npz") as written:
        for name, array in marian.params.items():
            np.testing.assert_array_equal(written[name], array)
    again = load_folder(back)
    assert again[0] == config
    jax.tree.map(np.testing.assert_array_equal, again[1], params)
    lines = ["a man on null", ' "  #', "5:30 ü </s> unknown"]
    assert again[2].encode_source(lines) == tokenizer.encode_source(lines)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A sentencepiece model, whose pieces have its own ids."""
    path = tmp_path_factory.mktemp("pieces") / "vocab.spm"
    path.write_bytes(train(text(5), 130))
    return path


def folder_of(size, folder):
    """A folder of Marian whose tables have `size` rows, without a vocabulary."""
    marian = Marian(words=size)
    marian.save(folder)
    (folder / "vocab.yml").unlink()
    return folder


@pytest.mark.parametrize("kind", tiered(["spm", "two_spm", "opus_mt"], ["opus_mt"]))
def test_sentencepiece_vocabularies_are_read_and_written(kind, pieces, tmp_path):
    model = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    folder, content = folder_of(model.get_piece_size(), tmp_path / "model"), pieces.read_bytes()
    ids = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    if kind == "spm":
        (folder / "vocab.deen.spm").write_bytes(content)
    elif kind == "two_spm":
        for side in ("src", "trg"):
            (folder / f"vocab.{side}.spm").write_bytes(content)
    else:  # the pieces have other ids than in the model
        last = len(ids) - 1
        ids = {piece: i if piece in ("</s>", "<unk>") else last - i for piece, i in ids.items()}
        ids = dict(zip(sorted(ids, key=ids.get), range(len(ids)), strict=True))
        for name in ("source.spm", "target.spm"):
            (folder / name).write_bytes(content)
        lines = [f"{json.dumps(piece)}: {i}" for piece, i in ids.items()]
        (folder / "opus.spm32k-spm32k.vocab.yml").write_text("\n".join(lines))
        (folder / "decoder.yml").write_text("vocabs: [opus.spm32k-spm32k.vocab.yml]\n")
    lines = ["ein Mann </s> und", "  x 7 ", "<unk> €", "Straße"]
    encoded = [
        [ids[piece] if piece in ids else ids["<unk>"] for piece in model.encode(line, out_type=str)]
        for line in lines
    ]
    config, params, tokenizer, generation = load_folder(folder)
    assert tokenizer.encode_source(lines) == [[*row, ids["</s>"]] for row in encoded]
    assert generation["banned_tokens"] == (ids["<unk>"],)
    assert [tokenizer.decode(row) for row in tokenizer.encode_target(lines[:1])] == [
        model.decode(model.encode(lines[0]))
    ]
    to_huggingface(params, config, tmp_path / "o", family="marian_npz", tokenizer=tokenizer)
    written = {path.name for path in (tmp_path / "o").iterdir()} - {"model.npz", "decoder.yml"}
    of_pieces = {"source.spm", "target.spm", "vocab.yml"}
    assert written == (of_pieces if kind == "opus_mt" else {"vocab.spm"})
    again = load_folder(tmp_path / "o")
    assert again[0] == config
    assert again[2].encode_target(lines) == tokenizer.encode_target(lines)
    assert again[3]["beam_size"] == 6
    if kind == "spm":
        assert read_tokenizer(pieces).encode_source(lines) == tokenizer.encode_source(lines)


def test_the_file_of_the_weights_is_the_folder(tmp_path):
    path = HERE / "ssru" / "model.npz"
    of_file, of_folder = jax_transformer.load(path), jax_transformer.load(path.parent)
    assert of_file.config == of_folder.config
    jax.tree.map(np.testing.assert_array_equal, of_file.params, of_folder.params)


@pytest.mark.exhaustive
def test_a_trained_model_goes_home_with_the_search_of_its_folder(tmp_path):
    pairs = [("Ein Mann spielt .", "A man is in a black shirt .")] * 8
    home = HERE / "self_attention"
    settings = {"init": home, "steps": 3, "schedule": "constant"}
    jax_transformer.train(pairs, tmp_path / "run", **settings, learning_rate=0.01)
    back = tmp_path / "back"
    main(["convert", str(tmp_path / "run"), str(back), "--output-layout=marian_npz"])
    before, after = jax_transformer.load(home), jax_transformer.load(back)
    trained = jax_transformer.load(tmp_path / "run")
    assert after.config == dataclasses.replace(trained.config, max_length=after.config.max_length)
    assert dict(after.generation) == dict(before.generation)
    table, again = (each.params["token_embedding"]["embedding"] for each in (trained, after))
    assert not np.array_equal(table, before.params["token_embedding"]["embedding"])
    np.testing.assert_array_equal(table[:-1], again[:-1])  # the last row is that of padding


@pytest.mark.exhaustive
def test_targets_end_by_the_length_of_the_source():
    translator = jax_transformer.Translator(HERE / "self_attention")
    lines = ["Ein Mann", "Eine Frau sitzt auf einem Mann und"]
    for factor in (1.0, 2.0):
        options = {"banned_tokens": (0,), "max_length_factor": factor, "beam_size": 1}
        results = translator(lines, **options)
        lengths = [int(factor * (len(line.split()) + 1)) for line in lines]
        assert [len(result.tokens) for result in results] == lengths


def test_words_that_are_called_as_padding_and_language_codes_keep_their_ids(tmp_path):
    folder = folder_of(5, tmp_path / "model")
    words = ["</s>", "<unk>", "<pad>", ">>deu<<", "a"]
    (folder / "vocab.yml").write_text("".join(f'"{word}": {i}\n' for i, word in enumerate(words)))
    config, _, tokenizer, _ = load_folder(folder)
    assert (config.pad_id, tokenizer.pad_id) == (5, 5)
    lines = ["a <pad> a", ">>deu<< a", ">>deu<<a", ">>eng<< a", "a >>deu<<"]
    expected = [[4, 2, 4], [3, 4], [3, 4], [1, 4], [4, 3]]
    assert tokenizer.encode_source(lines) == [[*ids, 0] for ids in expected]
    assert tokenizer.decode([4, 2, 0]) == "a <pad>"
