"""`jax-transformer prepare`: what it keeps, `jax-transformer train` does not do again."""

from pathlib import Path

import pytest

from jax_transformer.commands import main as cli
from jax_transformer.commands import train
from jax_transformer.text import prepare as text_prepare
from jax_transformer.text import samples, store
from jax_transformer.tokenizers import train_byte_pair
from tests.commands.training import FILES, WORDS, arguments, program, refused

OPTIONS = ("--prepared=prepared", "--steps=2", "--evaluation-interval=2", "--max-ratio=9")


def prepare(*argv):
    cli.main(["prepare", *argv])


def prepared_files():
    return sorted(Path("prepared").glob("corpora/*/*"))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_pictures")
def test_a_training_uses_what_was_prepared(corpus, monkeypatch, capsys):
    options = arguments(corpus, *OPTIONS)
    prepare(*options)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("training: 6 pairs read; 6 pairs of ")
    assert printed[1].startswith("validation: 6 pairs")
    assert printed[2:] == ["kept in prepared; train with the same arguments"]
    kept = {path: path.stat().st_mtime_ns for path in prepared_files()}
    assert len(kept) == 3  # ids, index and manifest

    monkeypatch.setattr(text_prepare, "prepare", None)  # nothing is encoded again
    monkeypatch.setattr(samples, "train_byte_pair", None)
    program(*options, "--output=model")
    assert printed[0] in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in prepared_files()} == kept
    prepare(*options)
    assert capsys.readouterr().out.splitlines() == printed


def test_a_dry_run_keeps_nothing_and_arguments_of_no_text_change_nothing(
    corpus, monkeypatch, capsys
):
    options = arguments(corpus, *OPTIONS)
    prepare(*options, "--dry-run")
    reported = capsys.readouterr().out.splitlines()
    missing = refused("prepare", *options, "--source=nowhere")
    assert missing.startswith("error: nowhere is no readable text")
    assert prepared_files() == []
    prepare(*options)
    assert reported == capsys.readouterr().out.splitlines()[:1]
    kept = prepared_files()
    monkeypatch.setattr(text_prepare, "prepare", None)
    prepare(*options, "--dropout=0.3", "--bpe-dropout=0.1")
    assert prepared_files() == kept
    with pytest.raises(TypeError):  # other pairs are kept: this is another corpus
        prepare(*options, "--max-ratio=8")


def test_bad_lines_are_skipped_and_columns_chosen_by_the_command(corpus, capsys):
    pairs = "".join(f"{word}\t0.9\t{word.upper()}\n" for word in WORDS)
    Path("scored.tsv").write_bytes(pairs.encode() + b"a\xff\t0.1\tb\nab\t0.1\n")
    Path("bad").write_bytes(b"ab\nb\0\n")
    options = [*arguments(corpus, *OPTIONS), "--source", "scored.tsv", "bad", "source"]
    options += ["--target", "bad", "target", "--columns", "1", "3"]
    assert "scored.tsv:7:2: byte 0xff is not UTF-8" in refused("prepare", *options)
    prepare(*options, "--bad-lines=skip")
    report = capsys.readouterr().out.splitlines()[0]
    assert "16 pairs read, 3 dropped for a bad line; 13 pairs of" in report
    assert report.endswith("; first bad lines: scored.tsv:7:2, scored.tsv:8, bad:2:2")
    message = refused("prepare", *options[:-3], "--bad-lines=refuse")
    assert "scored.tsv:1: has 2 tabs; write a source, one tab and a target, name" in message
    assert "by columns" in message


@pytest.mark.parametrize("option", ["--help", "-h", "--help-all"])
def test_help_lists_the_arguments_of_the_text(capsys, option):
    with pytest.raises(SystemExit) as left:
        prepare(option)
    assert not left.value.code
    printed = capsys.readouterr().out
    assert printed.startswith("usage: jax-transformer prepare ")
    for flag in ("--dry-run", "--init", "--source"):
        assert f"  {flag}" in printed
    for flag in ("--prepared FILE", "--max-length", "--seed"):
        assert (f"  {flag}" in printed) == (option == "--help-all")
    assert "--output" not in printed
    assert "--steps" not in printed
    cli.main(["--help"])
    assert "prepare" in capsys.readouterr().out


def test_a_tokenizer_without_bpe_dropout_is_refused_before_the_text_is_read(corpus, monkeypatch):
    for name, words in (("en", WORDS), ("de", [*map(str.upper, WORDS), "C"])):
        files = train_byte_pair(words, vocab_size=20).contents
        Path(f"{name}.json").write_bytes(files["tokenizer.json"])
    given = {**corpus, "tokenizer": "en.json", "target_tokenizer": "de.json"}
    options = [one for one in arguments(given, *OPTIONS) if not one.startswith("--vocab")]
    options += ["--token-embeddings=separate", "--bpe-dropout=0.1"]
    monkeypatch.setattr(store, "with_known_facts", None)
    monkeypatch.setattr(train, "read_corpora", None)
    message = refused("prepare", *options)
    assert "BPE-dropout works on a" in message
    assert "bpe_dropout" in message or "set its rate to 0" in message
    with pytest.raises(SystemExit, match="BPE-dropout works on a"):
        program(*options, "--output=model")
    assert not Path("prepared").exists()
    assert not Path("model").exists()
    assert set(FILES) < {path.name for path in Path().iterdir()}
