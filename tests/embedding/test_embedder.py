"""Vectors of texts against sentence-transformers, on folders of its own making."""

import json
import os
import shutil

import jax
import numpy as np
import pytest
import torch

import jax_transformer
from jax_transformer import Embedder, InputError, encode
from jax_transformer.commands import main as cli
from jax_transformer.embedding import embedder as module
from tests.convert.families.case import foreign_model
from tests.programs import run_python
from tests.tiers import tiered
from tests.tokenizers.class_folders import NLLB, write_bart, write_nllb, write_t5
from tests.tokenizers.sentencepiece_models import odd_strings, text

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
sentence_transformers = pytest.importorskip("sentence_transformers")
parts = pytest.importorskip("sentence_transformers.sentence_transformer.modules")

WIDTH = 32
LINES = [line for line in odd_strings(text(1), 120) if "\0" not in line][:96]
LINES += ["", "x", " ".join(text(3)[:9]), "a"]
SHAPE = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


def write_encoder(folder):
    folder.mkdir()
    size = len(write_t5(folder))
    torch.manual_seed(0)
    transformers.T5EncoderModel(transformers.T5Config(vocab_size=size, **SHAPE)).save_pretrained(
        folder
    )
    return folder


def write_bart_encoder(folder):
    folder.mkdir()
    size = len(write_bart(folder))
    sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers",)}
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64)
    torch.manual_seed(0)
    config = transformers.BartConfig(vocab_size=size, d_model=WIDTH, **sizes)
    transformers.BartForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoder") / "t5")


def sentence_model(encoder, folder, mode, layers=(), include_prompt=True, **options):
    """Return a model of sentence-transformers, which it has also saved."""
    model = sentence_transformers.SentenceTransformer(
        modules=[
            parts.Transformer(str(encoder), max_seq_length=40),
            parts.Pooling(WIDTH, mode, include_prompt=include_prompt),
            *layers,
        ],
        device="cpu",
        **options,
    )
    model.save(str(folder))
    return model


def dense(inputs, outputs, activation, **options):
    torch.manual_seed(1)
    return parts.Dense(inputs, outputs, activation_function=activation, **options)


# By name: the modes, and the layers behind them.
FOLDERS = {
    "mean": ("mean", ()),
    "cls": ("cls", ()),
    "max": ("max", ()),
    "mean_sqrt_len": ("mean_sqrt_len_tokens", ()),
    "weighted": ("weightedmean", ()),
    "last": ("lasttoken", ()),
    "sentence-t5": (
        "mean",
        (dense(WIDTH, 24, torch.nn.Identity(), bias=False), parts.Normalize()),
    ),
    "two modes": (("mean", "max"), (dense(2 * WIDTH, 16, torch.nn.Tanh()),)),
    "residual": ("mean", (dense(WIDTH, WIDTH, torch.nn.GELU(), use_residual=True),)),
    "two layers": (
        "cls",
        (
            dense(WIDTH, 20, torch.nn.ReLU()),
            dense(20, 12, torch.nn.SiLU(), bias=False),
            parts.Normalize(),
        ),
    ),
}


@pytest.mark.parametrize("name", tiered([*FOLDERS], ["sentence-t5", "two modes"]))
def test_vectors_are_those_of_sentence_transformers(name, encoder, tmp_path):
    theirs = sentence_model(encoder, tmp_path / "folder", *FOLDERS[name])
    ours = Embedder(tmp_path / "folder")
    found, expected = ours(LINES), theirs.encode(LINES)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_a_folder_of_a_whole_bart_is_read_without_its_decoder(tmp_path):
    bart = write_bart_encoder(tmp_path / "bart")
    read = transformers.AutoModel.from_pretrained(bart)
    tokenizer = transformers.AutoTokenizer.from_pretrained(bart)
    embedder = Embedder(bart)
    assert "decoder" not in embedder.model.params
    for line, vector in zip(LINES, embedder(LINES), strict=True):
        ids = torch.tensor(tokenizer([line]).input_ids)
        states = read.get_encoder()(input_ids=ids).last_hidden_state.detach()
        np.testing.assert_allclose(vector, states[0].mean(0), atol=1e-5)


@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts_are_those_of_the_folder(include_prompt, encoder, tmp_path):
    prompts = {"query": "abc de: ", "passage": "zz: "}
    theirs = sentence_model(
        encoder,
        tmp_path / "folder",
        "mean",
        include_prompt=include_prompt,
        prompts=prompts,
        default_prompt_name="passage",
    )
    ours = Embedder(tmp_path / "folder")
    lines = text(1)[:20]
    for prompt, name in ((None, None), (prompts["query"], "query"), ("", "")):
        expected = theirs.encode(lines, prompt_name=name or None, prompt="" if name == "" else None)
        np.testing.assert_allclose(ours(lines, prompt=prompt), expected, atol=1e-6)


def test_older_files_are_read(encoder, tmp_path):
    theirs = sentence_model(encoder, tmp_path / "folder", ("mean", "max"))
    path = tmp_path / "folder" / "1_Pooling" / "config.json"
    modes = {f"pooling_mode_{mode}_tokens": True for mode in ("mean", "max")}
    path.write_text(json.dumps({"word_embedding_dimension": WIDTH, **modes}))
    path = tmp_path / "folder" / "sentence_bert_config.json"
    path.write_text(json.dumps({"max_seq_length": 12, "do_lower_case": True}))
    found, lines = Embedder(tmp_path / "folder")(["AB Cde", *text(2)[:9]]), ["ab cde", *text(2)[:9]]
    theirs.max_seq_length = 12
    expected = theirs.encode(lines)
    np.testing.assert_allclose(found, np.roll(expected, WIDTH, axis=1), atol=1e-6)  # max first


def test_a_vector_does_not_depend_on_other_texts(encoder):
    embedder = Embedder(encoder, max_tokens=640)
    together = embedder(LINES)
    for number in (0, 5, 97, 98):
        (alone,) = embedder([LINES[number]])
        np.testing.assert_allclose(alone, together[number], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(embedder(LINES[::-1]), together[::-1])


@pytest.mark.exhaustive
def test_a_stream_reads_a_window_at_a_time(encoder, monkeypatch):
    monkeypatch.setattr(module, "WINDOW", 16)
    taken = []

    def lines():
        for line in LINES:
            taken.append(line)
            yield line

    vectors = Embedder(encoder).stream(lines())
    first = [next(vectors) for _ in range(3)]
    assert len(taken) == 16
    rest = [*first, *vectors]
    np.testing.assert_allclose(rest, Embedder(encoder)(LINES), atol=1e-6)


def test_special_tokens_are_left_out_where_they_are_not_wanted(encoder):
    config, params, tokenizer, _ = jax_transformer.load(encoder, part="encoder")
    lines = [*LINES[::12], ""]
    found = Embedder(encoder, special_tokens=False)(lines)
    rows = tokenizer.encode_source(lines)
    src = jax_transformer.pad(rows, config.pad_id)
    read = np.arange(src.shape[1]) < np.array([[len(ids)] for ids in rows])  # one may spell padding
    states = jax.jit(encode, static_argnums=1)(params, config, src, read[:, None, None])
    for ids, vector, of_line in zip(rows, found, states, strict=True):
        own = of_line[: max(1, len(ids) - 1)]
        np.testing.assert_allclose(vector, own.mean(0), atol=1e-5)


ON_A_MESH = """
import sys
import numpy as np
from jax_transformer import Embedder, make_mesh
folder, lines, output = sys.argv[1:]
texts = open(lines).read().splitlines()
np.save(output, Embedder(folder, mesh=make_mesh("data=2,tensor=2"))(texts))
"""


@pytest.mark.exhaustive
def test_a_mesh_gives_the_same_vectors(encoder, tmp_path):
    lines = text(1)[:40]
    (tmp_path / "lines").write_text("\n".join(lines))
    run_python("-c", ON_A_MESH, encoder, tmp_path / "lines", tmp_path / "x.npy", devices=4)
    np.testing.assert_allclose(np.load(tmp_path / "x.npy"), Embedder(encoder)(lines), atol=1e-6)


def test_a_text_that_is_too_long_is_named_or_cut(encoder):
    long = " ".join(text(4)[:150])
    with pytest.raises(
        InputError, match=r"text 2 has \d+ tokens, but the model takes 512; set max"
    ):
        Embedder(encoder)(["a", long])
    cut = Embedder(encoder, max_length=700)
    ids = cut.model.tokenizer.encode_source([long], 700)
    assert len(ids[0]) == 700
    whole = jax.jit(encode, static_argnums=1)
    states = whole(cut.model.params, cut.model.config, np.array(ids, np.int32))
    np.testing.assert_allclose(cut([long])[0], states[0].mean(0), atol=1e-5)


def test_what_is_no_list_of_texts_is_refused(encoder):
    with pytest.raises(InputError, match="dtype='int8' must be 'float32' or 'bfloat16'"):
        Embedder(encoder, dtype="int8")
    embedder = Embedder(encoder)
    assert embedder([]).shape == (0, 0)
    for texts, message in (
        ("a text", "must be a list of texts"),
        (iter(["a", 3]), "text 2 is 3, and"),
    ):
        with pytest.raises(InputError, match=message):
            embedder(texts)


def test_the_language_of_the_texts_is_named_where_a_model_has_several(tmp_path):
    (tmp_path / "nllb").mkdir()
    size = len(write_nllb(tmp_path / "nllb"))
    foreign_model("m2m_100", None, vocab_size=size).save_pretrained(tmp_path / "nllb")
    with pytest.raises(InputError, match="source_lang='x' is none of the model's 4 language codes"):
        Embedder(tmp_path / "nllb", source_lang="x")
    vectors = [Embedder(tmp_path / "nllb", source_lang=code)(["ab"]) for code in NLLB[:2]]
    assert abs(vectors[0] - vectors[1]).max() > 1e-3


def damaged(folder, encoder, name, **values):
    shutil.copytree(encoder, folder)
    path = folder / name
    content = json.loads(path.read_text())
    if isinstance(content, list):
        content[1] |= values
    else:
        content |= values
    path.write_text(json.dumps(content))
    return folder


REFUSALS = {
    "another module": (
        ("modules.json", {"type": "sentence_transformers.models.LSTM"}),
        r"has the modules .*'LSTM', 'Dense'.*; only Transformer and Pooling are supported",
    ),
    "another mode": (
        ("1_Pooling/config.json", {"pooling_mode": "median"}),
        r"pooling_mode='median' is none of cls, max, mean",
    ),
    "another activation": (
        ("2_Dense/config.json", {"activation_function": "torch.nn.modules.activation.Softmax"}),
        r"2_Dense: activation_function='Softmax' of sentence_embedding is not supported",
    ),
    "two modes for a layer of one": (
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}),
        r"bad: a layer reads 32 numbers, but there are 64",
    ),
    "a path outside": (
        ("modules.json", {"path": "../1_Pooling"}),
        r"the path '../1_Pooling' is outside of the folder",
    ),
    "a module without a type": (("modules.json", {"type": None}), r"modules.json: is damaged"),
    "a mode that is a number": (
        ("1_Pooling/config.json", {"pooling_mode": 3}),
        r"1_Pooling: is damaged .*; copy the folder again",
    ),
    "prompts that are a list": (
        ("config_sentence_transformers.json", {"prompts": ["query"]}),
        r"bad: is damaged \(Expected `object \| null`, got `array` - at `\$.prompts`\)",
    ),
    "a width that is a text": (
        ("2_Dense/config.json", {"in_features": "8"}),
        r"2_Dense: is damaged",
    ),
    "another width": (("2_Dense/config.json", {"in_features": 3}), r"the tensors are not "),
}


@pytest.mark.parametrize(("damage", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_not_supported_is_refused_by_name(damage, message, encoder, tmp_path):
    sentence_model(encoder, tmp_path / "good", "mean", (dense(WIDTH, 4, torch.nn.Tanh()),))
    path, values = damage
    folder = damaged(tmp_path / "bad", tmp_path / "good", path, **values)
    with pytest.raises(InputError, match=message) as caught:
        Embedder(folder)
    assert "\n" not in str(caught.value)


def test_the_command_writes_a_row_for_each_line(encoder, tmp_path, capsys):
    (tmp_path / "lines").write_text("\n".join(text(1)[:30]) + "\n")
    command = ["embed", str(encoder), f"--input={tmp_path / 'lines'}"]
    cli.main([*command, f"--output={tmp_path / 'x.npy'}"])
    assert "x.npy written: float32 [30, 32]" in capsys.readouterr().out
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), Embedder(encoder)(text(1)[:30]))
    (tmp_path / "dangling.npy").symlink_to("missing.npy")
    for options, message in (
        ((), "name the texts by --input FILE"),
        (("--output=x.txt",), "whose name ends in .npy"),
        ((f"--output={tmp_path / 'x.npy'}",), "exists already"),
        ((f"--output={tmp_path / 'dangling.npy'}",), "exists already"),
    ):
        with pytest.raises(SystemExit, match=message):
            cli.main([*command, *options])
