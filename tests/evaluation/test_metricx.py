"""MetricX beside the mT5 of transformers: the inputs, the logit, the bounds."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jax_transformer import InputError
from jax_transformer.commands import main as cli
from jax_transformer.evaluation.metricx import LONGEST, SCORE_ID, inputs, load_metricx
from tests.tokenizers.class_folders import T5
from tests.tokenizers.sentencepiece_models import text, train

SIZES = {"d_model": 8, "d_kv": 3, "num_heads": 2, "d_ff": 12, "num_layers": 2}
SIZES |= {"num_decoder_layers": 1, "relative_attention_num_buckets": 8, "vocab_size": 250_112}
LINES = text(3, lines=30)
SOURCES, REFERENCES, TRANSLATIONS = LINES[:9], LINES[9:18], LINES[18:27]
TRANSLATIONS[2:4] = " ".join(LINES), ""  # a long line, and an empty one


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as the published ones: an MT5ForRegression without a tokenizer, beside an mT5's."""
    folder = tmp_path_factory.mktemp("metricx")
    torch.manual_seed(5)
    config = transformers.MT5Config(**SIZES, tie_word_embeddings=False)
    model = transformers.MT5ForConditionalGeneration(config)
    # Version 5 ties the output to the token table whatever the config says.
    model.lm_head.weight = torch.nn.Parameter(torch.empty(SIZES["vocab_size"], SIZES["d_model"]))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(1.0 if "norm" in name else 0.0, 0.4)
        model.lm_head.weight[SCORE_ID] *= 15
    model.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    published = {"architectures": ["MT5ForRegression"], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(values | published))
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "config.json").write_text(json.dumps(values))
    (tokenizer / "spiece.model").write_bytes(train(text(1), 130, **T5))
    (tokenizer / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    return folder


def of_transformers(model, tokenizer, version, lines):
    """Return the scores as the published program computes them, a line at a time."""
    tokenizer = transformers.T5Tokenizer.from_pretrained(tokenizer)
    scores = []
    for line in lines:
        read = tokenizer(line, max_length=LONGEST[version], truncation=True)
        ids = torch.tensor([read["input_ids"][:-1]])
        with torch.no_grad():
            logits = model(ids, decoder_input_ids=torch.tensor([[0]])).logits
        scores.append(logits[0, 0, SCORE_ID].clamp(0, 25).item())
    return np.array(scores)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("version", "references", "sources"),
    [(23, REFERENCES, []), (23, [], SOURCES), (24, REFERENCES, SOURCES), (24, [], SOURCES)],
)
def test_scores_are_those_of_the_published_program(
    folder, tmp_path, x64, version, references, sources
):
    """In float64, so that the scores differ by one rounding to float32 alone."""
    lines, tokenizer = inputs(version, TRANSLATIONS, references, sources), folder / "tokenizer"
    model = transformers.MT5ForConditionalGeneration.from_pretrained(folder).double().eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    scores = load_metricx(tmp_path, version, tokenizer)(lines)
    expected = of_transformers(model, tokenizer, version, lines)
    assert len(set(expected)) > 4  # few of them are at a bound
    np.testing.assert_allclose(scores, expected, rtol=0, atol=2e-7 * expected.max())


def test_a_version_reads_what_it_was_trained_on():
    assert inputs(23, ["a"], ["b"], []) == ["candidate: a reference: b"]
    assert inputs(23, ["a"], ["b"], ["c"]) == ["candidate: a reference: b"]
    assert inputs(23, ["a"], [], ["c"]) == ["candidate: a source: c"]
    assert inputs(24, ["a"], ["b"], ["c"]) == ["source: c candidate: a reference: b"]
    assert inputs(24, ["a"], [], ["c"]) == ["source: c candidate: a"]
    for version, references in ((23, []), (24, ["b"])):
        with pytest.raises(InputError, match=f"sources=None: MetricX-{version} reads them"):
            inputs(version, ["a"], references, [])


def test_another_base_is_refused_by_its_name(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text"}')
    with pytest.raises(InputError, match="model_type='gemma3_text' is no MetricX-23 or MetricX-24"):
        load_metricx(tmp_path, 24)


@pytest.mark.exhaustive
def test_the_command_prints_the_mean(folder, tmp_path, capsys):
    files = {}
    sides = {"out": TRANSLATIONS, "sources": SOURCES, "references": REFERENCES}
    for name, lines in sides.items():
        files[name] = tmp_path / name
        files[name].write_text("".join(f"{line}\n" for line in lines))
    options = [f"--metricx={folder}", "--metricx-version=24", f"--sources={files['sources']}"]
    options.append(f"--metricx-tokenizer={folder / 'tokenizer'}")
    cli.main(["evaluate", str(files["out"]), *options, f"--references={files['references']}"])
    *others, line = capsys.readouterr().out.splitlines()
    model = transformers.MT5ForConditionalGeneration.from_pretrained(folder).eval()
    lines = inputs(24, TRANSLATIONS, REFERENCES, SOURCES)
    scores = of_transformers(model, folder / "tokenizer", 24, lines)
    assert line == f"MetricX-24 = {scores.mean():.4f} (0 is the best, 25 the worst)"
    assert [each.partition(" =")[0] for each in others] == ["BLEU", "chrF2", "exact match"]
    cli.main(["evaluate", str(files["out"]), *options, "--worst=1"])
    lines = inputs(24, TRANSLATIONS, [], SOURCES)
    scores = of_transformers(model, folder / "tokenizer", 24, lines)
    worst = int(scores.argmax())
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"line {worst + 1}: MetricX = {scores[worst]:.2f}",
        f"  source:      {SOURCES[worst]}",
        f"  translation: {TRANSLATIONS[worst]}",
    ]


def test_a_score_that_is_not_finite_is_refused_by_its_line(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][SCORE_ID] = 3e38
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    judge = load_metricx(tmp_path, 23, folder / "tokenizer")
    with pytest.raises(InputError, match=r"the score of line 1 is -?(inf|nan); its weights are"):
        judge(inputs(23, TRANSLATIONS[:2], REFERENCES[:2], []))
