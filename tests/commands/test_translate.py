"""`jax-transformer translate` as a command and as a program."""

import dataclasses
import gzip
import io
import os
import pty
import select
import subprocess
import sys

import pytest

from jax_transformer import Translator
from jax_transformer.commands import main as cli
from jax_transformer.commands.translate import Arguments
from jax_transformer.config.declared import declarations
from jax_transformer.decoding import GenerationConfig
from jax_transformer.decoding.slots import SlotSearch
from jax_transformer.tokenizers import Tokenizer
from jax_transformer.translation import alignment_plot, text_stream
from jax_transformer.translation.model_folder import save
from jax_transformer.translation.sources import LineOptions
from jax_transformer.translation.text_stream import Files
from jax_transformer.translation.translate import translate
from tests.models import random_params, tiny_model
from tests.tiers import tiered_rows

LINES = ["cab", "", "üß abc", "b"]
TEXT = "\n".join(LINES).encode()
PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)


@pytest.fixture(scope="module")
def checkpoint():
    return tiny_model(["abc cab üß"], vocab_size=12, seed=3, max_length=12)


@pytest.fixture(scope="module")
def directory(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint") / "model"
    save(directory, checkpoint)
    return directory


@pytest.fixture
def run(directory, monkeypatch, capsysbinary):
    """Run the command; return its exit code, and what it wrote to standard output and error."""

    def run(text, *options, checkpoint=directory):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(text))))
        code, message = 0, ""
        try:
            cli.main(["translate", str(checkpoint), *map(str, options)])
        except SystemExit as left:  # Python would print what is no number, and leave with 1
            code, message = (1, f"{left.code}\n") if isinstance(left.code, str) else (left.code, "")
        out, err = capsysbinary.readouterr()
        return code, out.decode(), err.decode() + message

    return run


def command(directory):
    return [sys.executable, "-m", "jax_transformer.commands.main", "translate", directory]


@pytest.mark.exhaustive
def test_a_program_translates_what_a_slow_pipe_has_brought(checkpoint, directory):
    program = subprocess.Popen(command(directory), **PIPES)
    texts = [best.text for best, *_ in translate(checkpoint, LINES)]
    assert len({*texts}) > 2
    with program:
        for line, text in zip(LINES, texts, strict=True):
            program.stdin.write(f"{line}\n".encode())
            program.stdin.flush()  # and the pipe stays open
            assert select.select([program.stdout], [], [], 40)[0], "it waits for more lines"
            assert program.stdout.readline().decode() == f"{text}\n"
        program.stdin.close()
        assert (program.wait(60), program.stdout.read(), program.stderr.read()) == (0, b"", b"")


@pytest.mark.exhaustive
def test_a_line_that_is_refused_ends_the_program_while_the_pipe_is_open(directory):
    program = subprocess.Popen(command(directory), **PIPES)
    with program:
        program.stdin.write(b"a\xff\n")
        program.stdin.flush()
        assert program.wait(60) == 1
        said = program.stderr.read().decode()
    assert said.count("\n") == 1
    assert said.startswith("error: standard input:1:2: byte 0xff is not UTF-8")


@pytest.mark.exhaustive
def test_on_a_terminal_each_line_is_translated_when_it_is_entered(
    directory, checkpoint, monkeypatch, capfdbinary
):
    first, blank, last = (best.text for (best,) in translate(checkpoint, ["cab", "", "b"]))
    typing, terminal = pty.openpty()
    shown, to_type = [], [b"abc abc abc abc abc\nb\n", b"\x04"]  # Ctrl-D
    advance = SlotSearch.advance

    def typing_on(*arguments):
        shown.append(capfdbinary.readouterr())
        os.write(typing, to_type.pop(0))
        return advance(*arguments)

    monkeypatch.setattr(SlotSearch, "advance", typing_on)
    os.write(typing, b"cab\n\n")
    with open(terminal) as keyboard:
        monkeypatch.setattr(sys, "stdin", keyboard)
        cli.main(["translate", str(directory)])
    os.close(typing)
    refused = (
        b"error: line 1 is 16 tokens long, EOS included, but the model takes max_length=12; raise "
        b"max_length, split it or set overlong to 'cut'\n"
    )
    assert shown == [(b"", b"> "), (f"{first}\n{blank}\n".encode(), b"> > " + refused + b"> ")]
    assert capfdbinary.readouterr() == (f"{last}\n".encode(), b"> \n")


@pytest.mark.exhaustive
def test_a_reader_that_leaves_early_ends_the_program_without_a_word(directory):
    environment = os.environ | {"PYTHONUNBUFFERED": ""}  # as where nothing is set
    program = subprocess.Popen(command(directory), **PIPES, env=environment)
    program.stdout.close()
    program.stdin.write(b"\n")
    program.stdin.close()
    assert program.stderr.read() == b""
    program.stderr.close()
    assert program.wait() == 1


def test_n_best_lines_with_scores(run, checkpoint):
    code, out, err = run(TEXT, "--beam=4", "--nbest=3", "--scores", "--length-penalty=1")
    assert (code, err) == (0, "")
    assert out.endswith("\n")
    rows = [line.split("\t") for line in out[:-1].split("\n")]
    options = {"beam_size": 4, "num_hypotheses": 3, "length_penalty": 1.0}
    expected = [one for best in translate(checkpoint, LINES, **options) for one in best]
    assert len(rows) == 3 * len(LINES)
    assert rows[3:6] == [["0.000000", ""]] * 3  # of the blank line
    for (score, text), one in zip(rows, expected, strict=True):
        assert text == one.text
        assert float(score) == pytest.approx(one.score, abs=1e-6)


@pytest.mark.exhaustive
def test_alignments_are_drawn_once(run, tmp_path):
    picture = tmp_path / "plot.png"
    plain = run(TEXT, "--beam=4", "--nbest=3")
    assert run(TEXT, "--beam=4", "--nbest=3", f"--alignments={picture}") == plain
    drawn = picture.read_bytes()
    assert drawn.startswith(b"\x89PNG")
    code, out, err = run(b"", f"--alignments={picture}")
    assert (code, out) == (1, "")
    remedy = "name another picture or overwrite it (--overwrite)"
    assert err == f"error: {picture}: exists already; {remedy}\n"
    assert picture.read_bytes() == drawn
    assert run(b"b\n", "--overwrite", f"--alignments={picture}", "--max-new-tokens=3")[0] == 0
    assert picture.read_bytes() != drawn


def test_the_defaults_of_the_model_hold_unless_a_flag_is_given(run, checkpoint, tmp_path):
    generation = {"beam_size": 4, "length_penalty": 1.0, "max_new_tokens": 5}
    save(tmp_path / "model", checkpoint._replace(generation=generation))
    flags = ("--beam=4", "--length-penalty=1", "--max-new-tokens=5")
    expected = run(TEXT, "--nbest=3", "--scores", *flags)
    assert run(TEXT, "--nbest=3", "--scores", checkpoint=tmp_path / "model") == expected
    options = ("--beam=1", "--length-penalty=0.6", "--max-new-tokens=7")
    assert run(TEXT, *options, checkpoint=tmp_path / "model") == run(TEXT, *options)
    code, out, err = run(TEXT, "--nbest=3")  # by default this model keeps one hypothesis
    assert (code, out, err) == (1, "", "error: num_hypotheses=3 must be from 1 to beam_size=1\n")


# Flags of a search, and what they are in Python.
SEARCHES = [
    (
        "--beam=4 --nbest=2 --length-penalty=1 --length-normalization=power --early-stopping=True",
        {"beam_size": 4, "num_hypotheses": 2, "length_penalty": 1.0, "early_stopping": True}
        | {"length_normalization": "power"},
    ),
    ("--beam-size=3 --early-stopping=never", {"beam_size": 3, "early_stopping": "never"}),
    (
        "--beam-size=3 --early-stopping=shrinking --max-length-factor=1.5",
        {"beam_size": 3, "early_stopping": "shrinking", "max_length_factor": 1.5},
    ),
    (
        "--no-repeat-ngram-size=2 --repetition-penalty=1.3 --min-new-tokens=4 --max-new-tokens=9",
        {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3}
        | {"min_new_tokens": 4, "max_new_tokens": 9},
    ),
    (
        "--banned-tokens 5 6 --banned-sequences 7,8 9,4,3 --begin-suppressed-tokens 10",
        {"banned_tokens": (5, 6), "banned_sequences": ((7, 8), (9, 4, 3))}
        | {"begin_suppressed_tokens": (10,)},
    ),
    (
        "--encoder-no-repeat-ngram-size=2 --renormalize --allow-padding --eos-ids 2 3",
        {"encoder_no_repeat_ngram_size": 2, "renormalize": True, "allow_padding": True}
        | {"eos_ids": (2, 3)},
    ),
    (
        "--start-token=4 --forced-first-token=5 --forced-last-token=2",
        {"start_token": 4, "forced_first_token": 5, "forced_last_token": 2},
    ),
    (
        "--seed=3 --temperature=2.5 --top-k=7 --top-p=0.9",
        {"seed": 3, "temperature": 2.5, "top_k": 7, "top_p": 0.9},
    ),
]


@pytest.mark.parametrize(
    ("flags", "options"), tiered_rows(SEARCHES, lambda flags, _: "banned" in flags or "3" in flags)
)
def test_flags_of_a_search_do_what_python_does(run, checkpoint, flags, options):
    expected = [f"{one.text}\n" for best in translate(checkpoint, LINES, **options) for one in best]
    assert run(TEXT, *flags.split()) == (0, "".join(expected), "")


def test_every_option_of_a_search_is_a_flag_under_one_heading(run):
    tried = {name for _, options in SEARCHES for name in options}
    assert tried - {"seed"} == {field.name for field in dataclasses.fields(GenerationConfig)}
    _, usual, _ = run(b"", "--help")
    assert usual.count("\n") < 75
    assert "--beam N" in usual
    assert "--top-k" not in usual
    code, shown, err = run(b"", "--help-all")
    assert (code, err) == (0, "")
    headings = [line for line in shown.split("\n") if line.endswith(":") and line[0] != " "]
    assert headings[-3:] == ["files:", "lines:", "search:"]
    declared = map(declarations, (Arguments, Files, LineOptions))
    named = tried.union(*declared) - {"model", "files", "lines", "search"}
    for name in named:
        assert shown.count(f"--{name.replace('_', '-')}") >= 1, name


@pytest.mark.exhaustive
def test_a_sample_is_that_of_the_seed_and_the_line(run, directory, checkpoint, tmp_path):
    lines = [LINES[number % 4] for number in range(150)]
    text = "\n".join(lines).encode()
    sampling = ("--seed=5", "--temperature=3")
    expected = run(text, *sampling)
    assert expected[0] == 0
    assert run(text, *sampling, "--window=9", "--max-tokens=40") == expected
    assert run(text, "--seed=6", "--temperature=3") != expected
    drawn = expected[1].split("\n")
    assert len({*drawn[0:150:4]}) > 20  # of one line, by its number
    results = Translator(directory)(lines, seed=5, temperature=3.0, window=20)
    assert [result.text for result in results] == drawn[:150]


@pytest.fixture
def kill_at(monkeypatch):
    """Let the search with a number, from 1, end the process; 0 is none. Returns its calls."""
    advance, calls = SlotSearch.advance, []

    def kill_at(number):
        def search_until(*arguments):
            calls.append(len(calls))
            if len(calls) == number:
                raise SystemExit(137)
            return advance(*arguments)

        calls.clear()
        monkeypatch.setattr(SlotSearch, "advance", search_until)
        return calls

    return kill_at


@pytest.mark.parametrize(
    "options",
    [
        ("--seed=5", "--temperature=3"),
        ("--split-sentences=en", "--banned-tokens", "5", "6", "--banned-sequences", "7,8"),
        ("--split-sentences=en", "--seed=5"),
    ],
    ids=["sampled", "lists and sentences", "sampled sentences"],
)
def test_a_resumed_output_has_the_same_bytes(run, tmp_path, kill_at, options):
    path, output = tmp_path / "input", tmp_path / "output"
    path.write_text("".join(f"{LINES[n % 4]}. Abc {LINES[n % 3]}!  Cab.\n" for n in range(210)))
    options = (f"--input={path}", "--window=70", "--overlong=cut", *options)
    calls = kill_at(0)
    _, expected, _ = run(b"", *options)
    kill_at(len(calls))  # the last batch
    options = (*options, f"--output={output}", "--resume")
    assert run(b"", *options)[0] == 137
    code, _, err = run(b"", *options)
    assert (code, err.split("\n")[0]) == (0, "resumed after 140 lines")
    assert output.read_text() == expected
    assert len({*expected.split("\n")}) > 3


def test_sentences_of_a_line_stay_in_its_line(run, checkpoint):
    text = "  Cab abc. B!\tÜß.\n\n Abc"
    parts = [["  ", "Cab abc.", " ", "B!", "\t", "Üß.", ""], [""], [" ", "Abc", ""]]
    for of_line in parts:
        of_line[1::2] = [best.text for (best,) in translate(checkpoint, of_line[1::2])]
    expected = "".join("".join(of_line) + "\n" for of_line in parts)
    assert run(text.encode(), "--split-sentences=en") == (0, expected, "")
    long = "abc " * 12
    code, _, err = run(f"{text} b.\nCab. {long}.".encode(), "--split-sentences=en")
    assert (code, err.split(" tokens")[0]) == (1, "error: sentence 2 of line 4 is 39")
    code, out, err = run(f"Cab. {long}.".encode(), "--split-sentences=en", "--overlong=cut")
    assert (code, out.count("\n")) == (0, 1)
    said = "1 of 2 sentences cut to max_length=12 tokens, the first of them sentence 2 of line 1\n"
    assert err == said


def test_a_longer_line_is_translated_where_positions_are_computed(run, checkpoint, tmp_path):
    line = b"abc " * 12
    longer = checkpoint._replace(config=dataclasses.replace(checkpoint.config, max_length=40))
    ((best,),) = translate(longer, [line.decode()])
    assert run(line, "--max-length=40") == (0, f"{best.text}\n", "")
    code, _, err = run(line, "--max-length=1000000000")
    assert code == 1
    assert err.startswith("error: the attention to max_length=1000000000 tokens needs at least")
    learned = dataclasses.replace(checkpoint.config, positions="learned")
    params = random_params(learned)
    save(tmp_path / "model", checkpoint._replace(config=learned, params=params))
    assert run(b"b", "--max-length=12", checkpoint=tmp_path / "model")[0] == 0
    assert run(b"b", "--max-length=13", checkpoint=tmp_path / "model") == (
        *(1, ""),
        f"error: {tmp_path / 'model'}: max_length=13: the position table was learned for 12 "
        "tokens, and has no other rows; leave max_length out\n",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"cab\na\xffb\n", ":2:2: byte 0xff is not UTF-8"),
        (b"cab\n\n" + b"abc " * 12 + b"\n", "line 3 is 37 tokens long"),
    ],
)
def test_bad_lines_are_one_line_on_standard_error(run, monkeypatch, tmp_path, text, message):
    monkeypatch.setattr(SlotSearch, "advance", lambda *_: pytest.fail("work was done"))
    monkeypatch.setattr(alignment_plot, "draw", lambda *_, **__: pytest.fail("work was done"))
    code, out, err = run(text, f"--alignments={tmp_path / 'plot.png'}")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.fixture
def files(tmp_path, checkpoint):
    """An input of several windows, the name of an output, and what it must hold."""
    lines = [LINES[number % 4] + " c" * (number % 3) for number in range(210)]
    path = tmp_path / "input.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    expected = "".join(f"{best.text}\n" for best, *_ in translate(checkpoint, lines))
    return path, tmp_path / "output", expected


def test_a_file_becomes_a_file(run, files):
    path, output, expected = files
    options = (f"--input={path}", f"--output={output}", "--window=70")
    assert run(b"", *options) == (0, "", "")
    assert output.read_text() == expected
    assert run(b"", f"--input={path}", "--window=70") == (0, expected, "")
    assert run(path.read_bytes(), "--window=70") == (0, expected, "")
    remedy = "name another output or overwrite it (--overwrite)"
    refused = f"error: {output}: exists already; {remedy}\n"
    assert run(b"", *options) == (1, "", refused)
    assert run(TEXT, f"--output={output}", "--overwrite") == (0, "", "")
    assert output.read_text() == run(TEXT)[1]
    assert run(b"", "--resume")[2].startswith("error: --resume goes on with a file")


def test_a_killed_translation_goes_on_to_the_same_bytes(run, files, kill_at):
    path, output, expected = files
    options = (f"--input={path}", f"--output={output}", "--window=70", "--resume")
    for number, told in ((1, ""), (2, ""), (2, "resumed after 70 lines\n")):
        kill_at(number)
        assert run(b"", *options) == (137, "", told)
        assert not output.exists()
    assert run(b"", *options, "--beam=2")[2].startswith("error: beam_size=2 is not that of the")
    kill_at(0)
    assert run(b"", *options) == (0, "", "resumed after 140 lines\n")
    assert output.read_text() == expected
    assert {*os.listdir(output.parent)} == {"input.gz", "output"}


def test_an_output_whose_name_ends_in_gz_is_gzip_also_after_a_kill(run, files, kill_at):
    path, output, expected = files
    packed = output.with_suffix(".gz")
    options = (f"--input={path}", f"--output={packed}", "--window=70")
    kill_at(2)
    assert run(b"", *options)[0] == 137
    kill_at(0)
    assert run(b"", *options, "--resume") == (0, "", "resumed after 70 lines\n")
    content = packed.read_bytes()
    assert gzip.decompress(content).decode() == expected
    assert run(b"", *options, "--overwrite")[0] == 0
    assert packed.read_bytes() == content
    assert run(b"", f"--output={packed}", "--overwrite")[0] == 0  # of no lines
    assert subprocess.run(["gzip", "-dc", packed], check=True, capture_output=True).stdout == b""
    with_xz = output.with_suffix(".xz")
    said = f"error: {with_xz}: is written plain, or with gzip as .gz; name one of these\n"
    assert run(b"", f"--output={with_xz}") == (1, "", said)


def test_a_line_without_end_is_refused(run, monkeypatch):
    monkeypatch.setattr(text_stream, "LONGEST_LINE", 40)
    text = b"cab\n" + b"b" * 41 + b"\n"
    fault = "is longer than 40 bytes; split the line, or set bad_lines to 'skip'"
    assert run(text) == (1, "", f"error: standard input:2: {fault}\n")


@pytest.fixture
def bad_files(tmp_path, checkpoint, monkeypatch):
    """An input of several windows with bad lines of each kind, its output, and their numbers."""
    monkeypatch.setattr(text_stream, "LONGEST_LINE", 60)
    lines = [(LINES[number % 4] + " c" * (number % 3)).encode() for number in range(210)]
    bad = {3: b"a\xff", 60: b"\0", 64: b"c" * 61, 65: b"abc " * 12, 100: b"\xff\xfe", 149: b"a\0b"}
    for number, line in bad.items():
        lines[number - 1] = line
    good = ["" if number in bad else line.decode() for number, line in enumerate(lines, 1)]
    path = tmp_path / "input"
    path.write_bytes(b"\n".join(lines))
    expected = "".join(f"{best.text}\n" for best, *_ in translate(checkpoint, good))
    return path, tmp_path / "output", expected, sorted(bad)


def test_bad_lines_are_skipped_in_their_places_and_counted(run, bad_files):
    path, output, expected, bad = bad_files
    named = ", ".join(f"{path}:{number}" for number in bad[:5])
    told = f"6 bad lines gave blank lines, the first: {named}\n"
    options = ("--window=70", "--bad-lines=skip")
    assert run(b"", f"--input={path}", f"--output={output}", *options) == (0, "", told)
    assert output.read_text() == expected
    told = told.replace(str(path), "standard input")
    assert run(path.read_bytes(), *options) == (0, expected, told)
    code, out, err = run(path.read_bytes(), *options, "--overlong=cut", "--beam=2", "--nbest=2")
    assert (code, out.count("\n")) == (0, 420)
    assert out.split("\n")[4:6] == ["", ""]
    assert out.split("\n")[128] != ""  # line 65 is cut and no bad line
    cut, told = err.splitlines()
    assert cut.startswith("1 of 210 lines cut to max_length=12 tokens")
    assert told.startswith("5 bad lines gave blank lines, the first: standard input:3, ")


@pytest.mark.parametrize(("number", "done", "told"), [(2, 70, [100, 149]), (3, 140, [149])])
def test_a_killed_translation_with_bad_lines_goes_on_to_the_same_bytes(
    run, bad_files, kill_at, number, done, told
):
    path, output, expected, _ = bad_files
    options = (f"--input={path}", f"--output={output}", "--window=70", "--resume")
    kill_at(number)
    assert run(b"", *options, "--bad-lines=skip")[0] == 137
    kill_at(0)
    refused = "error: bad_lines='refuse' is not that of the unfinished output, which has 'skip'"
    assert run(b"", *options)[2].startswith(refused)
    named = ", ".join(f"{path}:{number}" for number in told)
    message = f"{len(told)} bad lines gave blank lines, the first: {named}"
    resumed = f"resumed after {done} lines\n{message}\n"
    assert run(b"", *options, "--bad-lines=skip") == (0, "", resumed)
    assert output.read_text() == expected


def test_a_refused_line_leaves_the_windows_before_its_own(run, bad_files, tmp_path):
    path, output, _, _ = bad_files
    lines = path.read_bytes().split(b"\n")
    for number in (3, 60, 64, 65):
        lines[number - 1] = b"cab"
    path.write_bytes(b"\n".join(lines))
    code, out, err = run(path.read_bytes(), "--window=70")
    assert (code, out.count("\n")) == (1, 70)
    assert err.startswith("error: standard input:100:1: byte 0xff is not UTF-8")
    options = (f"--input={path}", f"--output={output}", "--window=70", "--resume")
    assert run(b"", *options)[0] == 1
    assert (tmp_path / "output.part").read_text() == out
    lines[99] = lines[148] = b"b"  # mended
    path.write_bytes(b"\n".join(lines))
    assert run(b"", *options) == (0, "", "resumed after 70 lines\n")
    assert output.read_text().startswith(out)
    assert output.read_text().count("\n") == 210


@pytest.mark.exhaustive
def test_a_bad_line_in_a_slow_pipe_gives_a_blank_line_at_once(directory):
    program = subprocess.Popen([*command(directory), "--bad-lines=skip"], **PIPES)
    with program:
        for line in (b"a\xff\n", b"\0\n"):
            program.stdin.write(line)
            program.stdin.flush()
            assert program.stdout.readline() == b"\n"
        program.stdin.close()
        said = program.stderr.read().decode()
    named = "standard input:1, standard input:2"
    assert said == f"2 bad lines gave blank lines, the first: {named}\n"


def test_a_translation_is_one_line_whatever_its_tokens_are(run, monkeypatch):
    monkeypatch.setattr(Tokenizer, "decode", lambda *_: "a\nb")
    assert run(TEXT)[1] == "a b\n\na b\na b\n"
