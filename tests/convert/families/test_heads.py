"""Classifiers of transformers: their folders, read and given back, and their scores."""

import jax
import numpy as np
import pytest
import torch

from jax_transformer import InputError, classification_loss, classify, convert, load, save
from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.huggingface import read_model_config
from jax_transformer.convert.origin import read_origin
from jax_transformer.convert.table import flatten
from jax_transformer.model.tree import filled_params
from tests.convert.families.case import (
    as_inputs,
    change_values,
    foreign_model,
    goes_home,
    strictly_loaded,
    transformers,
    widened,
)
from tests.convert.tools import assert_same_params, assert_same_tensors, gradient_error
from tests.parity.ladder import error
from tests.tiers import tiered, tiered_rows

CLASSES = [(family, head) for family in FAMILIES for head in FAMILIES[family].classes_of_heads()]
QUICK = [("mbart", "sequence"), ("umt5", "sequence"), ("t5", "token")]
PROBLEMS = {
    "regression": {"num_labels": 1},
    "single_label_classification": {"id2label": {0: "no", 1: "yes", 2: "a b/c.d"}},
    "multi_label_classification": {"num_labels": 2},
}
ONE_LABEL = ("single_label_classification",)


def classifier(family, head, problem="single_label_classification", body=None, **changes):
    """Return a model of transformers with a head; `body` are changes of `foreign_model`."""
    body = foreign_model(family, **(body or {}))
    name = FAMILIES[family].classes_of_heads()[head]
    values = body.config.to_dict() | {"problem_type": problem, **PROBLEMS[problem], **changes}
    values.pop("architectures")
    values["label2id"] = {label: i for i, label in (values.get("id2label") or {}).items()}
    torch.manual_seed(3)
    model = getattr(transformers, name)(type(body.config)(**values)).eval()
    own = {n.removeprefix("transformer."): n for n in model.state_dict()}
    shared = {own[n]: x for n, x in body.state_dict().items() if n in own}
    model.load_state_dict(shared, strict=False)
    for name, leaf in model.named_parameters():
        if "classif" in name:
            leaf.data.normal_(0, 0.4)
    return model


def sources(config, last=()):
    random = np.random.default_rng(5)
    src = np.full((3, 11), config.pad_token_id, np.int32)
    for row, length in enumerate((11, 6, 3)):
        text = random.integers(6, config.vocab_size - 3, length)
        text[text == config.pad_token_id] = 7
        src[row, :length] = [*text[: length - 1 - len(last)], config.eos_token_id, *last]
    return src


def targets_of(problem, scores, random):
    if problem == "single_label_classification":
        return random.integers(0, scores.shape[-1], scores.shape[:-1])
    return random.integers(0, 2, scores.shape).astype(np.float64)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("family", "head", "problem"),
    tiered_rows(
        [(*row, problem) for row in CLASSES for problem in PROBLEMS if "token" not in row]
        + [(*row, "single_label_classification") for row in CLASSES if "token" in row],
        lambda family, head, problem: (family, head) in QUICK and problem in ONE_LABEL,
        lambda family, head, problem: family in ("bart", "mt5") or problem in ONE_LABEL,
    ),
)
def test_scores_and_gradients_are_those_of_the_class(family, head, problem, tmp_path):
    model = widened(classifier(family, head, problem), family)
    model.save_pretrained(tmp_path)
    config, params = convert.from_huggingface(tmp_path)
    assert (config.head, config.scores_are) == (head, problem)
    src = sources(model.config, last=[9] if config.head_start == "last_token" else [])
    inputs = as_inputs(config, src)
    theirs = model(**inputs)
    seen = (src != config.pad_id) if head == "token" else np.ones(len(src), bool)
    targets = targets_of(problem, theirs.logits, np.random.default_rng(1))
    if head == "token":
        targets = np.where(seen, targets, -100)
    model(**inputs, labels=torch.from_numpy(targets)).loss.backward()

    def loss(params):
        scores = classify(params, config, src)
        total, count = classification_loss(scores, targets, config)
        return total / count, scores

    gradients, scores = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert error(scores[seen], theirs.logits[seen]) <= 1e-14
    gradients = convert.to_torch(gradients, config, FAMILIES[family].layout.name)
    compared = 0
    for name, parameter in model.named_parameters():
        own = gradients.get(FAMILIES[family].layout_name(name))
        if parameter.grad is not None and own is not None and "shared" not in name:
            assert gradient_error(own, parameter.grad) <= 1e-11, name
            compared += 1
    assert compared >= 20


@pytest.mark.parametrize(("family", "head"), tiered_rows(CLASSES, lambda *row: row in QUICK))
def test_a_folder_comes_back_and_transformers_reads_it_strictly(family, head, tmp_path):
    model = classifier(family, head, classifier_dropout=0.25)
    model.save_pretrained(tmp_path / "model")
    config, params = goes_home(tmp_path / "model", tmp_path / "home")
    assert config.labels == ("no", "yes", "a b/c.d")
    assert config.head_dropout == 0.25
    assert_same_params(params, convert.from_huggingface(model)[1])
    convert.to_huggingface(params, config, tmp_path / "new", family=family)
    for home in ("home", "new"):
        again = strictly_loaded(type(model), tmp_path / home)
        assert_same_tensors(again.state_dict(), model.state_dict())
        assert again.config.id2label == {0: "no", 1: "yes", 2: "a b/c.d"}
        assert again.config.problem_type == "single_label_classification"
        assert again.config.classifier_dropout == 0.25
    encoder = convert.from_huggingface(tmp_path / "model", part="encoder")[0]
    assert (encoder.head, encoder.num_decoder_layers) == ("none", 0)


def test_an_own_folder_keeps_head_and_labels(tmp_path):
    config, params = convert.from_huggingface(classifier("bart", "sequence"))
    save(tmp_path / "own", (config, params, None))
    again = load(tmp_path / "own")
    assert again.config == config
    assert_same_params(again.params, params)


@pytest.mark.parametrize("number", [2, 3])
def test_labels_without_names_are_as_many_as_the_weights_have(number, tmp_path):
    model = classifier("bart", "sequence", "regression", num_labels=number)
    model.save_pretrained(tmp_path)
    # Two have no names, and transformers itself takes them for three.
    config, _ = convert.from_huggingface(change_values(tmp_path, id2label="absent"))
    assert config.labels == tuple(f"LABEL_{label}" for label in range(number))


@pytest.mark.parametrize("family", tiered(["bart", "mbart", "t5"], ["t5"]))
def test_a_head_on_a_model_that_generates_goes_home_as_a_classifier(family, tmp_path):
    model = foreign_model(family)
    model.config.id2label = {0: "x", 1: "y", 2: "z"}
    model.save_pretrained(tmp_path / "base")
    config, body = convert.from_huggingface(tmp_path / "base")
    start = FAMILIES[family].head_start
    config = config.with_head("sequence", labels=["no", "yes"], head_start=start)
    params = filled_params(jax.random.key(0), body, config)
    same = {path: leaf for path, leaf in flatten(params).items() if not path.startswith("head")}
    assert_same_tensors(same, {path: flatten(body)[path] for path in same})
    origin, _ = read_origin(tmp_path / "base")
    convert.to_huggingface(params, config, tmp_path / "home", origin=origin)
    name = FAMILIES[family].classes_of_heads()["sequence"]
    again = strictly_loaded(getattr(transformers, name), tmp_path / "home")
    assert again.config.id2label == {0: "no", 1: "yes"}
    assert again.config.label2id == {"no": 0, "yes": 1}
    src = sources(again.config, last=[9] if start == "last_token" else [])
    with torch.no_grad():
        theirs = again(**as_inputs(config, src)).logits
    assert error(jax.jit(classify, static_argnums=1)(params, config, src), theirs) <= 2e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "must name the labels from 0, without gaps"),
        ({"id2label": ["a", "b"]}, "must name the labels from 0"),
        ({"id2label": {"0": "a", "1": "a"}}, "each once"),
        ({"id2label": {"0": "a", "1": 5}}, "labels"),
        ({"problem_type": "ranking"}, "problem_type='ranking' must be"),
        ({"classifier_dropout": 2}, "head_dropout=2 must be"),
        ({"id2label": None, "num_labels": 10**12}, "num_labels=.* must be a whole number"),
    ],
)
def test_a_damaged_head_is_refused_in_one_line(changes, message, tmp_path):
    classifier("bart", "sequence").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=message) as refusal:
        read_model_config(change_values(tmp_path, **changes))
    assert "\n" not in str(refusal.value)


def test_a_family_without_the_class_is_refused():
    config, params = convert.from_huggingface(classifier("bart", "sequence"))
    with pytest.raises(InputError, match="no class for the encoder of a PegasusForConditional"):
        convert.to_huggingface(params, config, "x", family="pegasus")
