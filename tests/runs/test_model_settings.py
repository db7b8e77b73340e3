"""The fields of the model as flags and as lines of YAML, and the vocabulary of the tokenizer."""

import dataclasses
import inspect
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import yaml

from jax_transformer import InputError, TransformerConfig
from jax_transformer.commands.train import check_values, to_yaml
from jax_transformer.commands.train_arguments import named_settings
from jax_transformer.config import SPECIAL_IDS
from jax_transformer.runs.initial_model import NO_MODEL
from jax_transformer.runs.model_settings import VOCABULARY_SIZES, model_config
from jax_transformer.tokenizers import train_byte_pair
from tests.tiers import QUICK_PRESETS, tiered

ROOT = Path(__file__).parents[2]
WORDS = ["ab", "ba", "abba", "baab", "a b", "b a"]


def parsed(*argv):
    return named_settings(argv).arguments()


def other_value(name):
    """Return a value of a field that the preset does not have, as a flag has it and as YAML."""
    hint = inspect.get_annotations(TransformerConfig, eval_str=True)[name]
    value = getattr(TransformerConfig.preset("vaswani2017"), name)
    if isinstance(value, bool):
        return [f"--{'no-' * value}{name.replace('_', '-')}"], not value
    literal = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
    if literal:
        other = next(word for word in get_args(literal[0]) if word != value)
    elif hint == bool | None:
        other = not value
    elif hint == tuple[str, ...]:
        return ["--labels", "no", "yes"], ("no", "yes")
    else:
        other = 6 if "int" in str(hint) else 0.25
    return [f"--{name.replace('_', '-')}", str(other)], other


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TransformerConfig)])
def test_every_field_of_the_model_is_a_flag_and_a_line_of_yaml(tmp_path, name):
    flag, value = other_value(name)
    path = tmp_path / "settings.yaml"
    plain = [*value] if isinstance(value, tuple) else value
    path.write_text(yaml.safe_dump({"model": {name: plain}}))
    by_flag, by_file = parsed("--source=x", *flag), parsed("--config", str(path))
    assert by_flag.model[name] == by_file.model[name] == value
    assert value != parsed("--source=x").model.get(name)
    assert by_flag.model == by_file.model
    # settings.yaml of the run gives the same model again.
    path.write_text(to_yaml(by_flag.to_mapping()))
    assert parsed("--config", str(path)).model == by_flag.model


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("preset: pre_norm\nmodel: {final_norm: false, dropout: 0.4, d_ff: 20}\n")
    model = parsed("--config", str(path), "--dropout=0.3", "--no-memory-norm").model
    expected = {"norm": "std_norm", "final_norm": False, "dropout": 0.3, "d_ff": 20}
    assert model.items() >= expected.items()
    other = parsed("--config", str(path), "--preset=pre_norm_memory_norm")
    assert (other.preset, other.model["memory_norm"]) == ("pre_norm_memory_norm", True)
    assert (other.model["dropout"], other.model["max_length"]) == (0.4, 100)
    assert parsed("--source=x", "--preset=shared_heads").model["dropout"] == 0.2
    assert [parsed(*flags).model["d_model"] for flags in ((), ("--source=x",))] == [64, 256]


def test_settings_that_only_fit_together_may_come_from_both(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("source: text\ntraining: {schedule: cosine, warmup_steps: 9000}\n")
    read = parsed(f"--config={path}", "--steps=10000")
    assert (read.source, read.training.steps) == ((Path("text"),), 10_000)
    with pytest.raises(InputError, match="warmup_steps=9000 must be below steps=2600"):
        parsed(f"--config={path}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: {step: 9}", "training: step=9 is not a setting; did you mean steps?"),
        ("training: 3", "training: must map names of settings to values, but is 3"),
        ("training: {null: 1}", "training: the name None of a setting must be text"),
        ("training: {freeze: encoder/*}", "training: freeze='encoder/*' must be a list, each item"),
        ("model: {d_model: 9.5}", "model: d_model=9.5 must be a whole number, at least 1"),
        ("model: {width: 9}", "model: width=9 is not a setting"),
        ("valid_pairs: 0", "valid_pairs=0 must be a whole number, at least 1"),
    ],
)
def test_a_wrong_line_of_the_file_is_named(tmp_path, text, message):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        parsed(f"--config={path}")
    assert str(refused.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").iterdir()), ids=lambda path: path.name)
def test_the_recipes_are_settings(path):
    recipe = parsed(f"--config={path}")
    check_values(recipe, NO_MODEL)
    assert recipe.training.max_tokens >= 8192


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_pair(WORDS, vocab_size=8)


PRESETS = sorted({*TransformerConfig.presets()} - {"torch_nn", "whisper"})


@pytest.mark.parametrize("preset", tiered(PRESETS, quick=QUICK_PRESETS))
def test_the_ids_of_every_preset_are_the_tokenizers(tokenizer, preset):
    settings = parsed("--source=x", f"--preset={preset}", "--d-model=64", "--dropout=0.3")
    config = model_config(settings.model, tokenizer)
    assert (config.pad_id, config.bos_id, config.eos_id) == (0, 1, 2)
    assert config.src_vocab_size == config.tgt_vocab_size == tokenizer.src_vocab_size
    assert (config.d_model, config.dropout) == (64, 0.3)


@pytest.mark.parametrize("name", [*VOCABULARY_SIZES, *SPECIAL_IDS])
def test_what_contradicts_the_tokenizer_is_refused(tokenizer, name):
    right = getattr(model_config(parsed().model, tokenizer), name)
    flag = f"--{name.replace('_', '-')}"
    model_config(parsed(flag, str(right)).model, tokenizer)
    with pytest.raises(InputError, match=f"{name}=5 contradicts the tokenizer, which has {right};"):
        model_config(parsed(flag, "5").model, tokenizer)
