"""Classifiers of folders against the pipelines of transformers."""

import os

import numpy as np
import pytest
import torch

from jax_transformer import Classifier, InputError, Translator
from tests.convert.families.case import foreign_model
from tests.convert.families.test_heads import classifier
from tests.models import unchecked
from tests.tiers import tiered
from tests.tokenizers.class_folders import write_bart, write_bert, write_mbart, write_t5
from tests.tokenizers.sentencepiece_models import odd_strings, text

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
# transformers refuses texts of different numbers of EOS, which an odd one may spell.
LINES = [line for line in odd_strings(text(1), 60) if "\0" not in line and "</s>" not in line]
NLI = {0: "contradiction", 1: "neutral", 2: "entailment"}
WRITERS = {
    "bart": ("bart", write_bart),
    "bart without tokenizer.json": ("bart", lambda folder: write_bart(folder, saved=False)),
    "bert": ("bart", write_bert),
    "mbart": ("mbart", lambda folder: write_mbart(folder, src_lang="en_XX")),
    "t5": ("t5", write_t5),
    "t5 without tokenizer.json": ("t5", lambda folder: write_t5(folder, saved=False)),
    "mt5": ("mt5", write_t5),
    "umt5": ("umt5", write_t5),
}


def write(folder, name="bart", head="sequence", problem="single_label_classification", **changes):
    """Write a classifier and its tokenizer; return both of transformers."""
    family, write_tokenizer = WRITERS[name]
    folder.mkdir()
    tokenizer = write_tokenizer(folder)
    end = tokenizer.sep_token_id if name == "bert" else tokenizer.eos_token_id
    body = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if family in ("bart", "mbart"):
        body |= {"max_position_embeddings": 90, "decoder_start_token_id": end}
    model = classifier(family, head, problem, body | {"eos_token_id": end}, **changes)
    model.save_pretrained(folder)
    return model, tokenizer


def expected(model, tokenizer, texts):
    """Return the scores by transformers, each text alone."""
    rows = []
    for item in texts:
        # A list: beside one text, an empty second one counts as none.
        parts = [[part] for part in ((item,) if isinstance(item, str) else item)]
        inputs = tokenizer(*parts, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            rows.append(model(**inputs).logits[0].numpy())
    return np.stack(rows)


@pytest.mark.parametrize("name", tiered(WRITERS, ["bart", "mbart", "t5"]))
def test_texts_and_pairs_have_the_scores_of_transformers(name, tmp_path):
    model, tokenizer = write(tmp_path / "model", name, id2label=NLI)
    found = Classifier(tmp_path / "model", max_tokens=200)
    pairs = [*zip(LINES[:20], LINES[20:40], strict=True), ("", "x"), ("a", "")]
    # The decoder reads padding that a text spells. In mBART it would move the language code that
    # transformers begins with, and counts tokens for.
    pad = tokenizer.pad_token if name != "mbart" else "b"
    spelled = [f"a {pad} b", pad]
    for texts in ([*LINES[:30], *spelled], pairs):
        wanted = torch.tensor(expected(model, tokenizer, texts)).softmax(-1).numpy()
        said = found(texts)
        for one, row in zip(said, wanted, strict=True):
            np.testing.assert_allclose([*one.probabilities.values()], row, atol=2e-6)
            assert [*one.probabilities] == [*NLI.values()]
            assert (one.label, one.score) == (NLI[row.argmax()], max(one.probabilities.values()))


@pytest.mark.parametrize("most", [9, 12, 17])
@pytest.mark.parametrize("name", tiered(WRITERS, ["bart"]))
def test_a_long_pair_is_cut_as_transformers_cuts_it(name, most, tmp_path):
    _, tokenizer = write(tmp_path / "model", name)
    ours = Classifier(tmp_path / "model").model.tokenizer
    pairs = [(LINES[n], LINES[-n]) for n in range(1, 25)]
    for pair in pairs:
        kept = tokenizer(*pair, truncation="longest_first", max_length=most).input_ids
        assert ours.encode_pairs([pair], most) == [kept]
        assert ours.encode_pairs([pair]) == [tokenizer(*pair).input_ids]


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_numbers_and_several_labels_are_those_of_the_pipeline(problem, tmp_path):
    model, tokenizer = write(tmp_path / "model", problem=problem)
    found = Classifier(tmp_path / "model")(LINES[:9])
    wanted = expected(model, tokenizer, LINES[:9])
    wanted = wanted if problem == "regression" else 1 / (1 + np.exp(-wanted))
    values = [[*one.probabilities.values()] for one in found]
    np.testing.assert_allclose(values, wanted, atol=2e-6)
    assert [one.label for one in found] == [f"LABEL_{row.argmax()}" for row in wanted]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("labels", [NLI, {0: "ENTAILMENT", 1: "neutral", 2: "contradiction"}])
def test_zero_shot_is_that_of_the_pipeline(several, labels, tmp_path):
    model, tokenizer = write(tmp_path / "model", id2label=labels)
    candidates = ["ab", "b c", "travel {}"[:6]]
    pipeline = transformers.pipeline(
        "zero-shot-classification", model=model, tokenizer=tokenizer, device="cpu"
    )
    lines = [line for line in LINES if line.strip()][:6]
    template = "It is about {}, one."
    found = Classifier(tmp_path / "model").zero_shot(
        lines, candidates, template=template, several=several
    )
    for line, one in zip(lines, found, strict=True):
        said = pipeline(line, candidates, hypothesis_template=template, multi_label=several)
        wanted = dict(zip(said["labels"], said["scores"], strict=True))
        assert one.label == said["labels"][0]
        for label, probability in one.probabilities.items():
            assert abs(probability - wanted[label]) <= 2e-6


def test_tokens_have_the_scores_of_transformers(tmp_path):
    model, tokenizer = write(tmp_path / "model", "t5", "token")
    lines = [line for line in LINES if line.strip()][:12]
    tagged = Classifier(tmp_path / "model").tag([*lines, ""])
    assert tagged.pop() == []
    for line, found in zip(lines, tagged, strict=True):
        inputs = tokenizer(line, return_tensors="pt")
        with torch.no_grad():
            wanted = model(**inputs).logits[0, :-1].softmax(-1).numpy()
        values = [[*one.probabilities.values()] for _, one in found]
        np.testing.assert_allclose(np.reshape(values, wanted.shape), wanted, atol=2e-6)
        spelt = "".join(token for token, _ in found)
        assert spelt.strip() == tokenizer.decode(inputs.input_ids[0, :-1]).strip()


@unchecked()
def test_what_cannot_be_classified_is_refused_in_one_line(tmp_path):
    write(tmp_path / "model", id2label=NLI)
    found = Classifier(tmp_path / "model")
    assert repr(found).startswith("Classifier(")
    assert "\n" not in repr(found)
    assert found([]) == []
    for call, message in (
        (lambda: found("a text"), "texts='a text' must be a list of texts"),
        (lambda: found(["a", ("a", "b")]), "texts and pairs of texts are mixed"),
        (lambda: found(["a", 3]), "text 2 is 3, and must be a string"),
        (lambda: found([("a", None)]), "text 2 is None"),
        (lambda: found(["a", "b " * 200]), "text 2 has .* but the model takes 90; set max_length"),
        (lambda: found.tag(["a"]), "head='sequence' needs a call"),
        (lambda: found.zero_shot(["a"], []), r"labels=\[\] and template="),
        (lambda: found.zero_shot(["a"], ["b"], template="x"), "template='x' must"),
        (lambda: Classifier(tmp_path / "model", dtype="int8"), "dtype='int8' must be"),
        (lambda: Classifier(tmp_path / "model", max_length=0), "max_length=0 must be at least 1"),
        (lambda: Translator(tmp_path / "model")("a"), "scores labels, not tokens: use Classifier"),
    ):
        with pytest.raises(InputError, match=message) as refusal:
            call()
        assert "\n" not in str(refusal.value)
    cut = Classifier(tmp_path / "model", max_length=30)(["a", "b " * 200])
    assert len(cut) == 2
    write(tmp_path / "other")
    with pytest.raises(InputError, match='must begin with "entail"'):
        Classifier(tmp_path / "other").zero_shot(["a"], ["b"])
    (tmp_path / "whole").mkdir()
    size = len(write_bart(tmp_path / "whole"))
    foreign_model("bart", vocab_size=size, pad_token_id=1).save_pretrained(tmp_path / "whole")
    with pytest.raises(InputError, match="has no classification head; use Translator or Embedder"):
        Classifier(tmp_path / "whole")
