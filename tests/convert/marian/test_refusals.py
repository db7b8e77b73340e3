"""Folders of Marian that cannot be read: one line each, which names the option or the file."""

import io
import pickle
import zipfile

import jax
import numpy as np
import pytest

import jax_transformer
from jax_transformer.convert import to_huggingface
from jax_transformer.convert.huggingface import load_folder
from jax_transformer.convert.report import ConversionError
from jax_transformer.errors import InputError
from tests.convert.marian.published import SSRU
from tests.convert.marian.rebuild import Marian

# The last of each is what no config has.
OPTIONS = (
    {"type": "s2s"},
    {"type": "amun"},
    {"transformer-preprocess": "n"},
    {"transformer-postprocess": "da"},
    {"transformer-postprocess": "dhn"},
    {"transformer-decoder-autoreg": "average-attention"},
    SSRU | {"dec-cell": "gru"},
    SSRU | {"layer-normalization": True},
    {"transformer-rnn-projection": True},
    {"transformer-ffn-depth": 3},
    {"transformer-tied-layers": [1, 1]},
    {"lemma-dim-emb": 8},
    {"right-left": True},
    {"input-types": ["sequence"] * 3},
    {"transformer-pool": True},
    {"transformer-ffn-activation": "glu"},
    {"transformer-heads": "many"},
)


def one_line(folder, expected):
    with pytest.raises(InputError) as error:
        load_folder(folder)
    assert expected in str(error.value)
    is_report = isinstance(error.value, ConversionError)  # a line for each tensor
    assert is_report or "\n" not in str(error.value)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_option_that_no_config_has_is_named(options, tmp_path):
    key, value = [*options.items()][-1]
    refused_with(options, f"{key}={value!r} must be", tmp_path)


def test_options_that_are_not_those_of_the_weights_are_named(tmp_path):
    refused_with({"dim-emb": {"a": 1}}, "must hold options by their names", tmp_path / "mapping")
    refused_with({"dim-emb": 16}, "Wemb", tmp_path / "size")


def refused_with(options, expected, folder):
    marian = Marian()
    marian.logits([0], [0])
    marian.options |= options
    marian.logits = lambda *_: None  # the weights stay those of a transformer
    one_line(marian.save(folder), expected)


def entries_of(folder):
    with zipfile.ZipFile(folder / "model.npz") as archive:
        return {entry: archive.read(entry) for entry in archive.namelist()}


def write_entries(folder, entries, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(folder / "model.npz", "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def npy(array, **options):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, **options)
    return file.getvalue()


class Hostile:
    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


def pickled(folder):
    objects = np.empty(1, object)
    objects[0] = Hostile()
    write_entries(folder, entries_of(folder) | {"Wemb.npy": npy(objects, allow_pickle=True)})


def pickle_alone(folder):
    (folder / "model.npz").write_bytes(pickle.dumps(Hostile()))


def truncated(folder):
    content = (folder / "model.npz").read_bytes()
    (folder / "model.npz").write_bytes(content[: len(content) // 2])


def compressed(folder):
    write_entries(folder, entries_of(folder), zipfile.ZIP_DEFLATED)


def claims_more(folder):
    content = npy(np.zeros((11, 8), np.float32)).replace(b"(11, 8), ", b"(11, 9), ")
    write_entries(folder, entries_of(folder) | {"Wemb.npy": content})


def claims_terabytes(folder):
    content = npy(np.zeros((11, 8), np.float32))
    content = content.replace(b"(11, 8), }            ", b"(99999999999999, 8), }")
    write_entries(folder, entries_of(folder) | {"Wemb.npy": content})


def with_options(text):
    def change(folder):
        content = npy(np.frombuffer(text, np.int8))
        write_entries(folder, entries_of(folder) | {"special:model.yml.npy": content})

    return change


def without(name):
    def change(folder):
        entries = entries_of(folder)
        del entries[f"{name}.npy"]
        write_entries(folder, entries)

    return change


def with_file(name, text):
    def change(folder):
        (folder / name).write_text(text)

    return change


def bin_alone(folder):
    (folder / "model.npz").rename(folder / "model.intgemm.alphas.bin")
    (folder / "decoder.yml").write_text("models: [model.intgemm.alphas.bin]\n")


BOMB = b"a: &a [x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (i + 1, i + 1, b", ".join([b"*%c" % i] * 8)) for i in range(97, 112)
)
FILES = {
    "pickled": (pickled, "is damaged"),
    "pickle_alone": (pickle_alone, "is damaged"),
    "truncated": (truncated, "is damaged"),
    "compressed": (compressed, "compressed; save it with numpy.savez"),
    "claims_more": (claims_more, "is damaged"),
    "claims_terabytes": (claims_terabytes, "is damaged"),
    "no_options": (without("special:model.yml"), "special:model.yml is missing"),
    "huge_options": (with_options(b"a: 1\n" * 2**15), "has more than 131,072 bytes"),
    "no_tensor": (without("encoder_l1_self_Wq"), "encoder.0.self_Wq"),
    "yaml_bomb": (with_options(BOMB), "more than 65,536 values"),
    "no_yaml": (with_options(b"\xff\xfe: [\n"), "is not YAML"),
    "deep_yaml": (with_options(b"[" * 5000), "is not YAML"),
    "list": (with_options(b"- 1\n"), "must hold options by their names"),
    "vocabulary_without_end": (with_file("vocab.yml", "a: 0\nb: 1\n"), "lacks </s> or <unk>"),
    "vocabulary_of_lists": (with_file("vocab.yml", "a: [1]\n"), "must be one mapping of words"),
    "vocabulary_twice": (with_file("vocab.yml", "a: 1\na: 2\n"), "each of which occurs once"),
    "vocabulary_of_text": (with_file("vocab.yml", "a: b\n"), "is not a vocabulary"),
    "vocabulary_bomb": (with_file("vocab.yml", "a: &a b\nc: *a\n"), "must be one mapping"),
    "two_vocabularies": (with_file("vocab.de.yml", "a: 1\n"), "holds several vocabularies"),
    "factored": (with_file("decoder.yml", "vocabs: [v.fsv, v.fsv]\n"), "v.fsv: such a vocabulary"),
    "two_models": (with_file("model2.npz", ""), "holds several models"),
    "word_penalty": (with_file("decoder.yml", "word-penalty: 0.5\n"), "word-penalty=0.5 must be 0"),
    "beam": (with_file("decoder.yml", "beam-size: none\n"), "beam-size"),
    "no_mapping": (with_file("decoder.yml", "- a\n"), "must hold options by their names"),
    "quantised": (bin_alone, "holds no .npz"),
}


@pytest.mark.parametrize(("change", "expected"), FILES.values(), ids=FILES)
def test_a_damaged_or_hostile_file_is_one_line(change, expected, tmp_path):
    folder = Marian().save(tmp_path / "model")
    change(folder)
    one_line(folder, expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"positions": "sinusoidal"}, "positions="),
        ({"norm_placement": "pre"}, "norm_placement="),
        ({"start_embedding": "token"}, "start_embedding="),
        ({"d_kv": 3}, "d_kv="),
        ({"gated_feed_forward": True}, "gated_feed_forward="),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_model_that_marian_cannot_express_is_named_by_the_field(fields, expected, tmp_path):
    _, _, tokenizer, _ = load_folder(Marian().save(tmp_path / "model"))
    sizes = dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), 12)
    layers = dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 1)
    config = jax_transformer.TransformerConfig.preset(
        "marian_npz",
        **sizes | layers | {"d_model": 8, "num_heads": 2, "d_ff": 8, "pad_id": 11, "bos_id": 11},
        **fields,
    )
    params = jax_transformer.init_params(jax.random.key(0), config)
    with pytest.raises(InputError, match=expected):
        to_huggingface(params, config, tmp_path / "o", family="marian_npz", tokenizer=tokenizer)
    assert not (tmp_path / "o").exists()
