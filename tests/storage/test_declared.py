"""Settings as YAML: there and back, what the command line adds, and what is refused."""

import dataclasses
from pathlib import Path

import pytest

from jax_transformer import InputError
from jax_transformer.storage.declared import replace_fields
from jax_transformer.storage.yaml_file import read_mapping, to_yaml
from jax_transformer.training.config import TrainingConfig


@dataclasses.dataclass(frozen=True)
class Settings:
    source: Path | None = None
    preset: str = "vaswani2017"
    d_model: int = 8
    overwrite: bool = False
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)


def read_settings(path, default):
    return replace_fields(default, read_mapping(path), str(path))


def test_settings_come_back_from_their_file(tmp_path):
    training = TrainingConfig(
        clip_norm=1.0, ema_decay=None, schedule="cosine", seed=3, freeze=("encoder/*", "x")
    )
    settings = Settings(Path("ö.en"), d_model=7, overwrite=True, training=training)
    (tmp_path / "settings.yaml").write_text(to_yaml(dataclasses.asdict(settings)))
    assert read_settings(tmp_path / "settings.yaml", Settings()) == settings


def test_what_a_file_does_not_name_stays(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("d_model: 9\ntraining:\n  clip_norm: 2\n  learning_rate: 5.0e-3\n")
    default = Settings(preset="marian", training=TrainingConfig(steps=5))
    expected = TrainingConfig(steps=5, clip_norm=2.0, learning_rate=0.005)
    assert read_settings(path, default) == Settings(preset="marian", d_model=9, training=expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("d_modle: 9", "d_modle=9 is not a setting; did you mean d_model?"),
        (
            "x: 9",
            "x=9 is not a setting; the settings are source, preset, d_model",
        ),
        ("training: {step: 9}", "training: step=9 is not a setting; did you mean steps?"),
        ("d_model: 9.5", "d_model=9.5 must be a whole number"),
        ("d_model: true", "d_model=True must be a whole number"),
        ("training: 3", "training: must map names of settings to values, but is 3"),
        ("[1, 2]", "must map names of settings to values, but is [1, 2]"),
        ("", "must map names of settings to values, but is None"),
        ("source: 3", "source=3 must be a path or None"),
        (
            "training: {clip_norm: 1e-3}",
            "training: clip_norm='1e-3' must be a finite number, above 0 or None; write 1.0e-3, ",
        ),
        (
            "training: {compute_dtype: int8}",
            "training: compute_dtype='int8' must be one of 'bfloat16', 'float32'",
        ),
        (
            "training: {freeze: encoder/*}",
            "training: freeze='encoder/*' must be a list",
        ),
        ("training: {freeze: [3]}", "training: freeze=[3] must be a list, each item a text"),
        ("a: b: c", "is not YAML ("),
        ("preset: 2001-99-99\nd_model: 2001-99-99", "d_model='2001-99-99' must be a whole number"),
        ("[" * 5_000, "is not YAML (it is nested too deep)"),
        ("preset: []", "preset=[] must be a text"),
        ("preset: {a: 1}", "preset={'a': 1} must be a text"),
        ("d_model: 1\nd_model: 2", "is not YAML (line 1, column 1 has the name 'd_model' 2 times)"),
        ("training: {null: 1}", "training: the name None of a setting must be text"),
        ("training: {steps: 1, steps: 2}", "is not YAML (line 1, column 11 has the name 'steps'"),
        ("preset: [" + "x," * 30_000 + "]", "preset=['x', 'x'"),
        ("? " + "x" * 1000 + "\n: 1", "xxx"),
        ("5: 1", "the name 5 of a setting must be text"),
        ("!!python/object/apply:os.system [touch canary]", "is not YAML ("),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_settings(path, Settings())
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(path))
    assert not (tmp_path / "canary").exists()


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"is not a YAML file of settings .*No such file or directory"
    ):
        read_settings(tmp_path / "none.yaml", Settings())
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not a YAML file"):
        read_settings(tmp_path / "bytes.yaml", Settings())


def test_an_alias_is_read_and_a_value_that_grows_by_aliases_is_refused_at_once(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("source: &name text\npreset: *name\n")
    assert read_settings(path, Settings()) == Settings(source=Path("text"), preset="text")
    doubled = "".join(f"- &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
    path.write_text(f"preset:\n- &a0 [x]\n{doubled}")
    with pytest.raises(InputError, match="more than 65,536 values"):
        read_settings(path, Settings())
