"""Whole Hugging Face folders: everything comes in, and everything goes home."""

import json
import os
import shutil

import numpy as np
import pytest

import jax_transformer
from jax_transformer.commands import main as cli
from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.huggingface import (
    from_huggingface,
    load_folder,
    load_tokenizer,
    to_huggingface,
)
from jax_transformer.convert.origin import Origin, read_origin
from jax_transformer.errors import InputError
from jax_transformer.storage.weights import formats
from jax_transformer.tokenizers import train_byte_pair
from jax_transformer.tokenizers.readers.classes import read_marian
from jax_transformer.translation import model_folder
from jax_transformer.translation.model_folder import TrainedModel
from tests.convert.families.case import (
    change_values,
    foreign_class,
    foreign_model,
    read_values,
    strictly_loaded,
    transformers,
    weights_of,
    write_tokenizer,
)
from tests.convert.tools import assert_same_params, assert_same_tensors
from tests.models import random_params
from tests.tiers import tiered
from tests.tokenizers.sentencepiece_models import write_marian

LINES = ["tlx 6r5, tlx", "", "</s> 漢字"]
# What transformers does not know, in a layout of its own: it must come back byte for byte.
GENERATION = '{"num_beams": 2,\n\n "max_length": 17, "length_penalty": 0.60, "mine": [1, 2]%s}'
EXTRA = {"README.md": b"---\nlicense: mit\n---\n\xff\r\n", ".gitattributes": b"*.bin lfs\n"}
LEFT = ["flax_model.msgpack", "large.txt", "onnx", "pytorch_model.bin", "tf_model.h5"]


@pytest.fixture(scope="module", params=tiered(["marian", "pegasus"], ["marian"]))
def home(request, tmp_path_factory):
    """A folder with everything that a folder from the hub may have."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    changes = write_tokenizer(request.param, folder)
    model = foreign_model(request.param, None, **changes)
    model.save_pretrained(folder)
    change_values(folder, mine={"a": [1.50]})
    ids = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    ids |= {key: changes[key] for key in ids.keys() & changes.keys()}
    pad = f', "bad_words_ids": [[{ids["pad_token_id"]}]], {json.dumps(ids)[1:-1]}'
    (folder / "generation_config.json").write_text(GENERATION % pad)
    for name, content in EXTRA.items():
        (folder / name).write_bytes(content)
    for name in LEFT:
        (folder / name).write_bytes(b"stale")
    os.truncate(folder / "large.txt", 2**24 + 1)
    (folder / "onnx").unlink()
    (folder / "onnx").mkdir()
    return folder


@pytest.fixture
def convert(capsys):
    def convert(*arguments):
        cli.command_call("convert", *map(str, arguments))()
        return capsys.readouterr().out

    return convert


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def assert_home_again(folder, home):
    whole = {name: c for name, c in contents(home).items() if name not in LEFT}
    found = contents(folder)
    assert found.keys() == whole.keys()
    for name in ("config.json", "model.safetensors"):
        old, new = whole.pop(name), found.pop(name)
        if name == "config.json":
            assert list(json.loads(old).items()) == list(json.loads(new).items())
    assert found == whole
    old, new = weights_of(home), weights_of(folder)
    tables = {buffer.foreign for buffer in FAMILIES[read_values(home)["model_type"]].layout.buffers}
    for name in tables & old.keys():  # computed again
        np.testing.assert_allclose(new.pop(name), old.pop(name), atol=1e-6)
    assert_same_tensors(old, new)


def assert_loads_in_transformers(folder, home):
    model = strictly_loaded(foreign_class(read_values(home)["model_type"]), folder)
    tokenizers = [transformers.AutoTokenizer.from_pretrained(path) for path in (folder, home)]
    assert type(tokenizers[0]) is type(tokenizers[1])
    for options in ({"text": LINES}, {"text_target": LINES}):
        ids = [tokenizer(**options).input_ids for tokenizer in tokenizers]
        assert ids[0] == ids[1]
    return model


def test_load_gives_everything(home):
    config, params, tokenizer, generation = jax_transformer.load(home)
    assert tokenizer.src_vocab_size == config.src_vocab_size
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    assert tokenizer.encode_source(LINES) == theirs(LINES).input_ids
    assert tokenizer.bos_id == config.bos_id
    assert generation == {
        "beam_size": 2,
        "length_penalty": 0.6,
        "length_normalization": "power",
        "early_stopping": False,
        "max_new_tokens": 16,
    }
    assert_same_params(params, from_huggingface(home)[1])
    assert load_folder(home, ignore_generation_config=True)[3] == {}


def test_the_command_line_brings_a_continued_model_home(home, tmp_path, convert):
    """As an own model, as training leaves it; and directly."""
    model, (origin, _) = TrainedModel(*load_folder(home)), read_origin(home)
    options = {"beam_size": 2, "max_new_tokens": 16}  # options that every version of a folder has
    model_folder.write(tmp_path / "own", model._replace(generation=options), origin)
    layout = ["--output-layout", read_values(home)["model_type"]]
    assert "not carried" not in convert(tmp_path / "own", tmp_path / "continued", *layout)
    assert_home_again(tmp_path / "continued", home)
    printed = convert(home, tmp_path / "direct", *layout)
    assert f"not carried over: {', '.join(LEFT)}\n" in printed
    assert_home_again(tmp_path / "direct", home)
    generation = assert_loads_in_transformers(tmp_path / "direct", home).generation_config
    assert (generation.num_beams, generation.mine) == (2, [1, 2])


def test_only_what_changed_is_brought_up_to_date(home, tmp_path):
    config, params, tokenizer, _ = load_folder(home)
    origin, _ = read_origin(home)
    changed = jax_transformer.TransformerConfig(**config.to_dict() | {"dropout": 0.25})
    half = {**origin.config, "torch_dtype": "float16"}
    if config.activation == "silu":
        half["activation_function"] = "silu"  # another name of "swish"
    origin = Origin(origin.model_type, half, origin.files)
    to_huggingface(params, changed, tmp_path / "new", tokenizer=tokenizer, origin=origin)
    found = read_values(tmp_path / "new")
    assert list(found.items()) == list((half | {"dropout": 0.25, "torch_dtype": "float32"}).items())


def test_a_folder_without_an_origin_loads_whole_too(home, tmp_path):
    config, params, tokenizer, _ = load_folder(home)
    to_huggingface(params, config, tmp_path / "new", tokenizer=tokenizer)
    assert_loads_in_transformers(tmp_path / "new", home)
    assert load_tokenizer(tmp_path / "new")[1].encode_source(LINES) == tokenizer.encode_source(
        LINES
    )


def test_without_a_generation_config_none_is_written(home, tmp_path):
    """It would replace the defaults in config.json."""
    config, params, tokenizer, _ = load_folder(home)
    origin, _ = read_origin(home)
    others = {name: content for name, content in origin.files.items() if "generation" not in name}
    options = {"tokenizer": tokenizer, "origin": Origin(origin.model_type, origin.config, others)}
    to_huggingface(params, config, tmp_path / "new", **options)
    assert not (tmp_path / "new" / "generation_config.json").exists()
    shutil.copy(home / "generation_config.json", tmp_path / "new")
    before = contents(tmp_path / "new")
    with pytest.raises(InputError, match=r"holds a generation_config\.json, which the new model"):
        to_huggingface(params, config, tmp_path / "new", **options, overwrite=True)
    assert contents(tmp_path / "new") == before


def test_a_write_that_fails_leaves_the_folder_as_it_was(home, tmp_path, monkeypatch):
    config, params, tokenizer, _ = load_folder(home)
    options = {"tokenizer": tokenizer, "overwrite": True}
    to_huggingface(params, config, tmp_path / "model", **options)
    before, whole = contents(tmp_path), formats.write

    def fail(path, *arguments, **settings):
        whole(path, *arguments, **settings)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(formats, "write", fail)
    other = {**params, "output_projection": {"bias": params["output_projection"]["bias"] + 1}}
    with pytest.raises(InputError, match=r"cannot be written .*No space left on device"):
        to_huggingface(other, config, tmp_path / "model", **options)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ("two_tables", {"separate": True, "clean_up_tokenization_spaces": True}),
        ("three_heads", {"additional_special_tokens": ["<mask_1>"]}),
    ],
)
def test_the_settings_of_a_marian_tokenizer_need_no_origin(tmp_path, shape, settings):
    """The tokenizer_config.json that is written says how transformers reads the files."""
    write_marian(tmp_path / "files", **settings)
    tokenizer = read_marian(tmp_path / "files")
    assert tokenizer.src_vocab_size == tokenizer.tgt_vocab_size
    sizes = dict.fromkeys(("vocab_size", "decoder_vocab_size"), tokenizer.src_vocab_size)
    pad = dict.fromkeys(("pad_token_id", "decoder_start_token_id"), tokenizer.pad_id)
    model = foreign_model("marian", shape, **sizes, **pad, eos_token_id=0)
    config, params = from_huggingface(model)
    to_huggingface(params, config, tmp_path / "model", tokenizer=tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    lines = [*LINES, "h bk1 <mask_1> ."]
    assert tokenizer.encode_source(lines) == theirs(lines).input_ids
    ids = theirs(text_target=lines).input_ids
    assert tokenizer.encode_target(lines) == ids
    texts = [tokenizer.decode(row) for row in ids]
    assert texts == theirs.batch_decode(ids, skip_special_tokens=True)
    assert load_tokenizer(tmp_path / "model")[1].encode_target(lines) == ids


def test_what_cannot_be_carried_is_named_or_refused(home, tmp_path, convert):
    config, params, *_ = load_folder(home)
    origin, _ = read_origin(home)
    others = [name for name in FAMILIES if name != origin.model_type]
    with pytest.raises(InputError, match=f"origin is of the family {origin.model_type}, not"):
        to_huggingface(params, config, tmp_path / "x", family=others[0], origin=origin)
    larger = dict.fromkeys(("vocab_size", "decoder_vocab_size"), 999)
    foreign = Origin(origin.model_type, origin.config | larger, origin.files)
    with pytest.raises(InputError, match="says src_vocab_size=999, but the model has"):
        to_huggingface(params, config, tmp_path / "x", origin=foreign)
    byte_pair = train_byte_pair(["ab"], vocab_size=8)
    with pytest.raises(InputError, match="cannot have a tokenizer of the kind 'byte_pair'"):
        to_huggingface(params, config, tmp_path / "x", tokenizer=byte_pair)
    # An own model that another tokenizer was trained for: its name is printed.
    sizes = dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), byte_pair.src_vocab_size)
    fields = config.to_dict() | sizes | {"pad_id": 0, "bos_id": 1, "eos_id": 2}
    small = jax_transformer.TransformerConfig(**fields)
    model = TrainedModel(small, random_params(small), byte_pair)
    model_folder.save(tmp_path / "own", model)
    layout = ["--output-layout", origin.model_type]
    printed = convert(tmp_path / "own", tmp_path / "new", *layout)
    assert "not carried over: tokenizer.json\n" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "own"]


def test_a_real_folder_may_be_links(home, tmp_path):
    """The cache of huggingface_hub holds links to files."""
    for path in home.iterdir():
        (tmp_path / path.name).symlink_to(path)
    assert read_origin(tmp_path) == read_origin(home)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "fifo")
    assert read_origin(tmp_path)[1] == sorted([*LEFT, "dangling", "fifo"])
    assert load_tokenizer(tmp_path)[0] == load_tokenizer(home)[0]


def remove(*names):
    return lambda folder: [(folder / name).unlink(missing_ok=True) for name in names]


OWN_FILES = {"marian": "source.spm", "pegasus": "tokenizer.json"}
REMEDY = "--ignore-generation-config ignores the file's generation defaults"
DAMAGE = {
    "no tokenizer": (
        remove(*OWN_FILES.values(), "spiece.model"),
        "a tokenizer file must be there|no tokenizer.js",
    ),
    "truncated tokenizer": (
        lambda folder: os.truncate(folder / OWN_FILES[read_values(folder)["model_type"]], 700),
        "is not a sentencepiece model, or is damaged|damaged tokenizer file",
    ),
    "do_sample": (
        lambda folder: (folder / "generation_config.json").write_text('{"do_sample": true}'),
        rf"generation_config\.json: do_sample=True cannot be honoured; {REMEDY}",
    ),
    "no generation config": (
        lambda folder: (folder / "generation_config.json").write_text("{"),
        r"generation_config\.json is no readable JSON",
    ),
    "unknown family": (
        lambda folder: change_values(folder, model_type="vit"),
        "model_type='vit' is unknown",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_bad_folders_are_refused_in_one_line(home, tmp_path, damage, message):
    folder = shutil.copytree(home, tmp_path / "model", ignore=shutil.ignore_patterns("large.txt"))
    damage(folder)
    with pytest.raises(InputError, match=message) as refused:
        jax_transformer.load(folder)
    assert "\n" not in str(refused.value)
    if "generation" in message:
        assert load_folder(folder, ignore_generation_config=True)[3] == {}


def test_another_models_tokenizer_is_refused_with_both_numbers(home, tmp_path, convert):
    folder = shutil.copytree(home, tmp_path / "model", ignore=shutil.ignore_patterns("large.txt"))
    config = read_values(folder)
    wanted, size = config["vocab_size"] - 1, config["vocab_size"]
    pad = {"pad_token_id": wanted - 1, "decoder_start_token_id": wanted - 1}
    change_values(folder, vocab_size=wanted, decoder_vocab_size=wanted, **pad)
    message = f"has {size} ids, but the model {wanted}; use the"
    with pytest.raises(InputError, match=message):
        jax_transformer.load(folder)
    change_values(folder, **config | {"eos_token_id": 5})
    with pytest.raises(InputError, match=r"the tokenizer has eos_id=[01], but config.json says 5"):
        jax_transformer.load(folder)
    with pytest.raises(InputError, match="the tokenizer has eos_id="):
        convert(folder, tmp_path / "out", "--output-layout", config["model_type"])
    assert not (tmp_path / "out").exists()
