"""Settings as YAML: there and back, and what is refused."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from jax_transformer import InputError, TransformerConfig
from jax_transformer.config.declared import checked, checked_fields, meant
from jax_transformer.storage.yaml_file import read_yaml, to_yaml
from jax_transformer.training.config import Count, TrainingConfig


@dataclasses.dataclass(frozen=True)
class Settings:
    source: Path | None = None
    preset: str = "vaswani2017"
    d_model: int = 8
    rate: float | None = None
    overwrite: bool = False


def read_settings(path, kind=Settings):
    return kind(**checked_fields(kind, read_yaml(path), f"{path}: "))


def test_settings_come_back_from_their_file(tmp_path):
    path = tmp_path / "settings.yaml"
    training = TrainingConfig(clip_norm=1.0, schedule="cosine", seed=3, freeze=("encoder/*", "x"))
    for settings in (Settings(Path("ö.en"), d_model=7, overwrite=True), training):
        path.write_text(to_yaml(dataclasses.asdict(settings)))
        assert read_settings(path, type(settings)) == settings


@pytest.mark.parametrize(
    ("text", "declared", "value"),
    [
        ("16", Count, 16),
        ("1e-3", float, 0.001),
        ("None", Count | None, None),
        ("None", str | None, None),
        ("None", str, "None"),
        ("true", bool | None, True),
        (["1", "2.5"], tuple[float, ...] | None, (1.0, 2.5)),
        ("a/b", Path | None, Path("a/b")),
        (np.float32(0.5), float, 0.5),
        (np.array([3, 4]), tuple[Count, ...], (3, 4)),
    ],
)
def test_the_text_of_a_flag_and_a_number_of_numpy_are_values(text, declared, value):
    read = checked("x", text, declared, text=True)
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    ("text", "declared"),
    [("nan", float), ("1e999", float), ("1" * 5000, Count), ("", Count), ("maybe", bool)],
)
def test_the_text_of_a_flag_that_is_not_a_value_is_refused(text, declared):
    with pytest.raises(InputError, match=r"^x=.* must be "):
        checked("x", text, declared, text=True)
    for value in (math.inf, [math.nan], (0.5, -math.inf)):
        with pytest.raises(InputError, match=r"each item a finite number|must be a finite"):
            checked("x", value, float | tuple[float, ...])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("d_modle: 9", "d_modle=9 is not a setting; did you mean d_model?"),
        ("x: 9", "x=9 is not a setting; the settings are source, preset, d_model"),
        ("d_model: 9.5", "d_model=9.5 must be a whole number"),
        ("d_model: true", "d_model=True must be a whole number"),
        ("[1, 2]", "must map names of settings to values, but is [1, 2]"),
        ("", "must map names of settings to values, but is None"),
        ("source: 3", "source=3 must be a path or None"),
        ("rate: 1e-3", "rate='1e-3' must be a finite number or None; write 1.0e-3, not 1e-3"),
        ("rate: .inf", "rate=inf must be a finite number or None"),
        ("preset: 2001-99-99\nd_model: 2001-99-99", "d_model='2001-99-99' must be a whole number"),
        ("preset: []", "preset=[] must be a text"),
        ("preset: {a: 1}", "preset={'a': 1} must be a text"),
        ("preset: [" + "x," * 30_000 + "]", "preset=['x', 'x'"),
        ("? " + "x" * 1000 + "\n: 1", "xxx"),
        ("5: 1", "the name 5 of a setting must be text"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, text, message):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_settings(path, Settings)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"none.yaml is not a YAML file .*No such"):
        read_settings(tmp_path / "none.yaml", Settings)


def test_what_other_programs_call_a_setting_is_understood():
    known = {*vars(TrainingConfig()), *TransformerConfig.__dataclass_fields__, "mesh", "output"}
    expected = {"lr": "learning_rate", "batch_size": "max_tokens", "epochs": "steps"}
    expected |= {"hidden_size": "d_model", "num_layers": "num_encoder_layers", "device": "mesh"}
    expected |= {"save_every": "evaluation_interval", "output_dir": "output", "stepps": "steps"}
    assert {name: meant(name, known) for name in expected} == expected
    # Not the nearest letters: these have nothing to do with it.
    assert meant("beam", known) is meant("lr", {"norm", "remat"}) is None
