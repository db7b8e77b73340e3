"""A trained model's folder: it comes back bit for bit, other tools read it, damage is refused."""

import dataclasses
import hashlib
import json
import os

import jax
import numpy as np
import pytest

import jax_transformer
from jax_transformer import InputError, TransformerConfig, Translator, generate, init_params
from jax_transformer.commands import main as cli
from jax_transformer.convert import huggingface
from jax_transformer.convert.origin import ORIGIN_FILE, Origin
from jax_transformer.runs.model_settings import read_initial_model
from jax_transformer.storage import weights as files
from jax_transformer.tokenizers import train_byte_pair, write_files
from jax_transformer.translation import model_folder
from jax_transformer.translation.model_folder import (
    GENERATION,
    TrainedModel,
    load,
    load_tokenizer,
    read_origin,
    save,
    write,
)
from tests.models import random_params, tiny_model
from tests.runs import runs

MODEL_FILES = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture(scope="module")
def trained():
    return tiny_model(["ein kleines Haus", "a small house"], vocab_size=30, d_model=6, d_ff=5)


@pytest.fixture(scope="module")
def other(trained):
    """The same model with other parameters."""
    return trained._replace(params=random_params(trained.config, seed=1))


@pytest.fixture
def directory(trained, tmp_path):
    save(tmp_path / "model", trained)
    return tmp_path / "model"


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def same_params(one, other):
    return all(map(np.array_equal, *(jax.tree.leaves(model.params) for model in (one, other))))


def digest(description):
    content = {name: value for name, value in description.items() if name != "config_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def edit(directory, change):
    """Change config.json, and its digest to match."""
    path = directory / "config.json"
    description = json.loads(path.read_text())
    change(description)
    description["config_sha256"] = digest(description)
    path.write_text(json.dumps(description))


def refusal(directory):
    with pytest.raises(InputError) as refused:
        load(directory)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(str(directory))
    return str(refused.value)


DEFAULTS = {"beam_size": 4, "max_new_tokens": 9, "banned_sequences": ((0, 3), (4,))}


@pytest.mark.parametrize("generation", [None, DEFAULTS], ids=["a plain tuple", "defaults"])
def test_comes_back_bit_for_bit(trained, tmp_path, generation):
    directory = str(tmp_path / "model")
    save(directory, trained[:3] if generation is None else (*trained[:3], generation))
    assert sorted(os.listdir(directory)) == MODEL_FILES
    config, params, tokenizer, found = jax_transformer.load(directory)
    assert config == trained.config
    assert tokenizer.digest() == trained.tokenizer.digest()
    assert found == (generation or {"beam_size": 1, "length_penalty": 0.6})
    assert jax.tree.structure(params) == jax.tree.structure(trained.params)
    for actual, expected in zip(*map(jax.tree.leaves, (params, trained.params)), strict=True):
        assert isinstance(actual, jax.Array)
        assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


def test_config_json_describes_the_model_and_every_other_file(trained, directory):
    description = json.loads((directory / "config.json").read_text())
    assert description["model_type"] == "jax_transformer"
    assert description["format"] == 1
    assert description["library_version"] == jax_transformer.__version__
    assert TransformerConfig.from_dict(description["config"]) == trained.config
    assert description["generation"] == dict(GENERATION)
    assert description["sha256"] == {
        name: hashlib.sha256((directory / name).read_bytes()).hexdigest()
        for name in MODEL_FILES[1:]
    }
    assert description["config_sha256"] == digest(description)


def test_an_existing_model_is_kept_unless_overwriting_is_allowed(trained, other, directory):
    before = contents(directory)
    with pytest.raises(InputError, match="exists already"):
        save(directory, trained)
    assert contents(directory) == before
    (directory / "notes").write_text("x")
    for model, rewrite in (
        (other, lambda: save(directory, other, overwrite=True)),
        (trained, lambda: write(directory, trained)),
    ):
        rewrite()
        assert (directory / "notes").read_text() == "x"
        assert same_params(load(directory), model)
    assert [path.name for path in directory.parent.iterdir()] == ["model"]


def test_a_write_that_fails_leaves_the_old_model(trained, other, directory, monkeypatch):
    before, whole = contents(directory), files.write

    def fail(path, *arguments, **options):
        whole(path, *arguments, **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_folder.files, "write", fail)
    for target in (directory, directory.parent / "another"):
        with pytest.raises(InputError, match=r"cannot be written .*No space left on device"):
            write(target, other)
    assert contents(directory.parent) == before
    assert same_params(load(directory), trained)


def test_parameters_that_are_not_finite_are_not_written(trained, tmp_path):
    params = jax.tree.map(np.array, trained.params)
    params["source_embedding"]["embedding"][3, 2] = np.nan
    with pytest.raises(InputError, match=r"source_embedding.*: not finite, nan at \[3, 2\]"):
        save(tmp_path / "model", trained._replace(params=params))
    assert not list(tmp_path.iterdir())


def test_every_file_is_needed(directory):
    for path, content in contents(directory).items():
        path.unlink()
        message = refusal(directory)
        expected = "it has no config.json" if path.name == "config.json" else f"{path}: is missing"
        assert expected in message
        path.write_bytes(content)
    load(directory)


@pytest.mark.exhaustive
def test_every_flipped_bit_is_found(trained, directory):
    """In config.json too: whatever still is the same JSON is the same model."""
    random, tried = np.random.default_rng(0), 0
    for path, content in contents(directory).items():
        count = 400 if path.name == "config.json" else 40
        for position in random.choice(len(content), count):
            damaged = bytearray(content)
            damaged[position] ^= 1 << random.integers(8)
            path.write_bytes(damaged)
            if path.name == "config.json" and is_same_json(damaged, content):
                continue
            refusal(directory)
            tried += 1
        path.write_bytes(content)
    print(f"\n{tried} flipped bits, all refused")
    assert tried > 400
    assert same_params(load(directory), trained)


def is_same_json(one, other):
    try:
        return json.loads(one.decode()) == json.loads(other)
    except ValueError:
        return False


DESCRIPTIONS = [
    ("", "is damaged"),
    ("{", "is damaged"),
    ("[]", "is damaged"),
    ("{}", "is damaged"),
    ('{"a":' * 50_000, "is damaged"),
    ("\xff", "is damaged"),
    ('{"model_type": 3}', "is damaged"),
    ('{"model_type": "jax_transformer"}', "is of format None"),
    ('{"model_type": "jax_transformer", "format": 2}', "is of format 2, but this version"),
    ('{"model_type": "jax_transformer", "format": 1}', "config_sha256 differs"),
    ({"config": 3}, "is damaged"),
    ({"config": {"width": 3}}, "width=3"),
    ({"config": {"d_model": "wide"}}, "d_model='wide'"),
    ({"sha256": 5}, "is damaged"),
    ({"sha256": {}}, "sha256 must name the files model.safetensors, tokenizer.json"),
    ({"sha256": {"../../secret": ""}}, "sha256 must name the files"),
    ({"sha256": ["model.safetensors", "tokenizer.json"]}, "is damaged"),
    ({"tokenizer": []}, "is damaged"),
    ({"tokenizer": {"kind": [], "files": ["tokenizer.json"]}}, "tokenizer.kind=[] must be a text"),
    ({"tokenizer": {"kind": {}, "files": ["tokenizer.json"]}}, "tokenizer.kind={} must be a text"),
    ({"tokenizer": {"kind": "byte_pair", "files": [1]}}, "tokenizer.files=[1] must be a list"),
    ({"tokenizer": {"kind": "byte_pair", "files": "abc"}}, "tokenizer.files='abc' must be a"),
    ({"generation": 7}, "is damaged"),
    ({"generation": {"beam_size": 10**6}}, "generation: beam_size=1000000 needs a vocabulary"),
    ({"generation": {"eos_ids": [30]}}, "generation: eos_ids[0]=30 is outside the vocabulary"),
    ({"generation": {"beams": 4}}, "generation: 'beams' is not an option"),
    ({"generation": {"beam_size": {}, "prefix": 4}}, "generation: 'prefix' is not an option"),
]


@pytest.mark.parametrize(("content", "message"), DESCRIPTIONS, ids=lambda value: str(value)[:40])
def test_a_description_that_makes_no_sense_is_refused(directory, content, message):
    """Damaged, or changed with a digest to match."""
    if isinstance(content, str):
        (directory / "config.json").write_text(content, encoding="latin-1")
    else:
        edit(directory, lambda description: description.update(content))
    found = refusal(directory)
    assert found.startswith(f"{directory / 'config.json'}: ")
    assert message in found


SIZES = {
    "num_encoder_layers": (
        10_000,
        "num_encoder_layers=10000: missing, the tensors hold at most 1 layers",
    ),
    "d_model": (2**30, r"wrong shape, \[30, 6\], expected \[30, 1073741824\]; \d+ more tensors"),
    "qkv_bias": (False, "bias: unexpected.* more tensors are at fault"),
    "src_vocab_size": (10**9, r"wrong shape, \[30, 6\], expected \[1000000000, 6\]"),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_config_that_the_weights_do_not_fit_is_refused(directory, name):
    """At once, whatever it claims: a config of ten million layers takes hours to build."""
    value, message = SIZES[name]
    edit(directory, lambda description: description["config"].update({name: value}))
    with pytest.raises(InputError, match=message):
        load(directory)
    assert "model.safetensors: " in refusal(directory)


def test_a_long_position_table_costs_nothing(directory):
    edit(directory, lambda description: description["config"].update(max_length=10**9))
    assert load(directory).config.max_length == 10**9


def test_the_origin_of_a_model_is_kept_and_guarded(trained, tmp_path):
    origin = Origin("marian", {"d_model": 8, "kept": None}, {"README.md": b"card \xff\x00"})
    write(tmp_path / "model", trained, origin)
    assert read_origin(tmp_path / "model") == origin
    assert load(tmp_path / "model").config == trained.config
    save(tmp_path / "plain", trained)
    assert read_origin(tmp_path / "plain") is None
    path = tmp_path / "model" / ORIGIN_FILE
    path.write_bytes(path.read_bytes().replace(b"marian", b"maria_"))
    for read in (load, read_origin):
        with pytest.raises(InputError, match=rf"{ORIGIN_FILE}: is damaged or of another model"):
            read(tmp_path / "model")
    for damaged in (
        b"",
        b"[]",
        b"{}",
        b"[" * 10**5,
        b'{"model_type": "a", "config": 1, "files": 2}',
    ):
        with pytest.raises(InputError, match=ORIGIN_FILE):
            Origin.from_bytes(damaged)


@pytest.mark.parametrize(
    "name", ["../evil", "/evil", ".", "", "a\\b", "a\0b", "config.json", "a.bin"]
)
def test_an_origin_names_only_files_of_its_folder(name):
    """They are written when the model goes home."""
    content = Origin("marian", {}, {name: b"x"}).to_bytes()
    with pytest.raises(InputError, match=f"{ORIGIN_FILE}: the name .* is not that of a file"):
        Origin.from_bytes(content)


def test_another_tokenizer_is_refused(trained, directory):
    another = train_byte_pair(["ein kleines Hsau", "a small hsoue"], vocab_size=30)
    assert another.src_vocab_size == trained.tokenizer.src_vocab_size
    write_files(directory, another)
    message = refusal(directory)
    assert message.startswith(f"{directory / 'tokenizer.json'}: is damaged or of another model")


def test_parts_that_do_not_fit_are_refused(trained, tmp_path):
    smaller = train_byte_pair(["ein kleines Haus", "a small house"], vocab_size=29)
    write(tmp_path / "size", trained._replace(tokenizer=smaller))
    assert "src_vocab_size=30 must be the tokenizer's 29" in refusal(tmp_path / "size")
    half = jax.tree.map(lambda leaf: leaf.astype("float16"), trained.params)
    write(tmp_path / "precision", trained._replace(params=half))
    assert "is float16, but must be float32" in refusal(tmp_path / "precision")


def test_a_model_of_ids_alone_is_saved_loaded_and_refused_where_text_is_needed(trained, tmp_path):
    folder = tmp_path / "model"
    save(folder, (trained.config, trained.params, None, {"beam_size": 3}))
    again = load(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert same_params(again, trained)
    assert (again.config, again.tokenizer, again.generation) == (
        trained.config,
        None,
        {"beam_size": 3},
    )
    assert "tokens; fields: config, params, tokenizer" in repr(again)
    source = np.array([[5, 6, trained.config.eos_id]])
    options = {"max_new_tokens": 4, **again.generation}
    found = generate(again.params, again.config, source, **options)
    assert found.tokens.shape == (1, 1, 4)
    save(tmp_path / "again", again)
    (lines := tmp_path / "lines").write_text("a\n")
    for needs_text in (
        lambda: Translator(folder),
        lambda: Translator(again),
        lambda: load(folder, source_lang="de"),
        lambda: read_initial_model(folder),
        lambda: load_tokenizer(folder),
        lambda: cli.main(["translate", str(folder), "--input", str(lines)]),
        lambda: cli.main(["export", str(folder), str(tmp_path / "out"), "--to", "stablehlo"]),
    ):
        with pytest.raises((InputError, SystemExit), match="is a model of ids alone") as error:
            needs_text()
        assert "\n" not in str(error.value)


def test_what_could_not_be_loaded_is_not_saved(trained, tmp_path):
    config, params, tokenizer, _ = trained
    half = jax.tree.map(lambda leaf: leaf.astype("float16"), params)
    replace = dataclasses.replace
    smaller = replace(config, src_vocab_size=9)
    of_smaller = init_params(jax.random.key(0), smaller)
    decoder = {"decoder": params["decoder"]}
    for fault, model in {
        "model of type tuple must be what load returns": (config, params),
        "is float16, but must be float32 or bfloat16": (config, half, tokenizer),
        "params do not fit the config: encoder/": (config, decoder, tokenizer),
        "tokenizer of type str must be a Tokenizer .* or None: ids alone": (config, params, "x"),
        "src_vocab_size=9 must be the tokenizer's": (smaller, of_smaller, tokenizer),
        "'temperature' is no default that a model may have": (*trained[:3], {"temperature": 1.0}),
        "beam_size=0": (*trained[:3], {"beam_size": 0}),
        "beam_size=1000000 needs": (*trained[:3], {"beam_size": 10**6}),
        "start_token=30 is outside": (*trained[:3], {"start_token": 30}),
        "pad_id=5 must be the tokenizer's 0": (replace(config, pad_id=5), params, tokenizer),
        "bos_id=5 must be the tokenizer's 1": (replace(config, bos_id=5), params, tokenizer),
        "eos_id=5 must be the tokenizer's 2": (replace(config, eos_id=5), params, tokenizer),
    }.items():
        with pytest.raises(InputError, match=fault) as error:
            save(tmp_path / "model", model)
        assert "\n" not in str(error.value)
    assert not any(tmp_path.iterdir())


def test_a_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for name, reason in {
        "": "it has no config.json",
        "missing": "there is no such folder",
        "file": "it has no config.json",
    }.items():
        fault = f"is not the folder of a trained model, because {reason}"
        assert fault in refusal(tmp_path / name)


def test_an_unfinished_run_is_named_with_the_remedies(tmp_path):
    output = tmp_path / "runs" / "0"
    output.mkdir(parents=True)
    (output / "settings.yaml").touch()
    assert "training has not finished and has written no checkpoint; start" in refusal(output)
    runs.save(output / "run", runs.make_settings(), [3])
    message = refusal(output)
    assert "training has not finished; resume it with " in message
    assert f"`jax-transformer train --resume --output {output}`" in message
    assert f"`jax-transformer average {output} NEW_FOLDER`" in message


def test_a_folder_of_hugging_face_goes_to_its_reader(trained, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "marian"}')

    def load_folder(folder, **options):
        return trained.config, trained.params, trained.tokenizer, {"folder": folder, **options}

    monkeypatch.setattr(huggingface, "load_folder", load_folder)
    options = {"ignore_generation_config": True, "source_lang": "a", "target_lang": "b"}
    model = model_folder.read(str(tmp_path), **options)
    assert isinstance(model, TrainedModel)
    assert model.generation == {"folder": tmp_path, **options}
    assert model.tokenizer is trained.tokenizer


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_is_far_too_long_is_refused_unread(directory, name):
    with (directory / name).open("r+b") as file:
        file.truncate(2**40)  # takes no room on the disk, and days to digest
    with pytest.raises(InputError, match=f"{name}.*(file not fully covered|at most 67,108,864)"):
        load(directory)
