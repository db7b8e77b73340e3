"""`jax-transformer train` on sounds and their texts: as transformers, resumed, masked, refused."""

import contextlib
import io
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

import jax_transformer
from jax_transformer import InputError, Transcriber
from jax_transformer.audio.log_mel import log_mel
from jax_transformer.commands import main as cli
from jax_transformer.commands import train
from jax_transformer.commands.train_arguments import named_settings
from jax_transformer.runs.metrics import read_metrics
from jax_transformer.text import sound_corpus
from jax_transformer.text.batches import make_batch, training_batches
from jax_transformer.text.plan import plan_epoch
from jax_transformer.training.objective import batch_loss
from tests.commands.test_train_init import same_model
from tests.commands.training import program, refusal, refused
from tests.programs import run_python
from tests.tiers import tiered
from tests.transcription.whisper_folder import SECOND, write_folder

soundfile = pytest.importorskip("soundfile")
transformers = pytest.importorskip("transformers")

WORDS = "one two three four five six".split()
USUAL = (
    "--source=sounds/list.tsv --schedule=constant --learning-rate=0.003 --warmup-steps=1 "
    "--steps=4 --max-tokens=400 --evaluation-interval=2 --bucket-count=1 --prepared=store "
    "--valid-pairs=3"
).split()
WHISPER, FREEZE = ["--init=whisper", "--language=en"], ["--freeze", "source_positions/*"]


def spoken(words, rate=SECOND):
    """Return a tone for each word."""
    times = np.arange(rate // 4) / rate
    tones = [0.3 * np.sin(2 * np.pi * (300 + 200 * WORDS.index(word)) * times) for word in words]
    return np.concatenate(tones).astype(np.float32)


def write_list(folder, count, seed=0):
    """Write sounds of one to three words, and list.tsv, whose paths begin at the list."""
    random, lines = np.random.default_rng(seed), []
    folder.mkdir()
    for number in range(count):
        words = random.choice(WORDS, random.integers(1, 4))
        soundfile.write(folder / f"{number}.flac", spoken(words), SECOND)
        lines.append(f"{number}.flac\t{' '.join(words)}\n")
    (folder / "list.tsv").write_text("".join(lines))


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """Return a folder with a model of transformers, one of English alone, and a list of sounds."""
    folder = tmp_path_factory.mktemp("start")
    write_folder(folder / "whisper", times=-10.0)
    write_folder(folder / "english", languages=(), times=-10.0)
    write_list(folder / "sounds", 23)
    return folder


@pytest.fixture
def sounds(start, tmp_path, monkeypatch):
    """A copy of that folder as the working directory."""
    shutil.copytree(start, tmp_path / "start")
    monkeypatch.chdir(tmp_path / "start")


def window(file):
    """Return the features of a sound and the silence behind it [frames, bands]."""
    samples, _ = soundfile.read(file, dtype="float32")
    return log_mel(np.pad(samples, (0, SECOND - len(samples))), 80)


def encoded(*options):
    """Return the settings and the corpora of a run that does not begin."""
    return encoded_by(*USUAL, *options)


def encoded_by(*options):
    arguments, initial = train.new_arguments(named_settings(options))
    train.check_values(arguments, initial)
    with contextlib.redirect_stdout(io.StringIO()):
        return train.read_and_encode_text(arguments, initial, train.training_console())


@pytest.mark.usefixtures("sounds")
def test_a_run_scores_words_and_its_model_transcribes(capsys):
    program(*USUAL, *WHISPER, *FREEZE, "--output=run", "--select-by=wer")
    shown = capsys.readouterr().out
    assert "training: 20 pairs read; 20 pairs of" in shown
    assert "validation: 3 pairs of the training text, chosen by the seed" in shown
    assert "to transcribe: jax-transformer transcribe run FILE\n" in shown
    assert "translate run" not in shown
    rates = [each["validation_wer"] for each in read_metrics(Path("run/metrics.jsonl"))[1::2]]
    assert len(rates) == 2
    assert f"word error rate {rates[-1]:.2f} %" in shown
    assert Path("run/curves.png").exists()
    assert not Path("run/attention.png").exists()
    once = {"temperatures": (0.0,), "no_speech": 1.0}
    heard = Transcriber("run")(["sounds/0.flac"], language="en", **once)
    assert heard[0].fault is None
    cli.main(["convert", "run", "back", "--output-layout=whisper"])
    model = transformers.WhisperForConditionalGeneration.from_pretrained("back").eval()
    features = torch.from_numpy(window("sounds/0.flac").T[None])
    found = model.generate(features, language="en", task="transcribe", do_sample=False, num_beams=1)
    tokenizer = transformers.WhisperTokenizer.from_pretrained("back")
    (text,) = tokenizer.batch_decode(found, skip_special_tokens=True)
    assert text.strip() == heard[0].text
    before, after = (jax_transformer.load(name).params for name in ("whisper", "run"))
    kept = jax.tree.map(lambda x, y: bool((x == y).all()), before, after)
    assert kept["source_positions"]["embedding"]
    assert not kept["source_convolution_1"]["kernel"]


TARGETS = {  # options, and the tokens before a text
    "whisper": (["--language=en"], ["en", "transcribe", "notimestamps"]),
    "whisper of French": (
        ["--language=fr", "--task=translate"],
        ["fr", "translate", "notimestamps"],
    ),
    "english": ([], ["notimestamps"]),
}


@pytest.mark.parametrize("kind", tiered(TARGETS, ["whisper of French"]))
@pytest.mark.usefixtures("sounds")
def test_the_loss_is_that_of_transformers(kind):
    name = kind.split()[0]
    options, begin = TARGETS[kind]
    settings, corpora = encoded(f"--init={name}", *options)
    (planned,) = plan_epoch(corpora.validation, settings.training_config, 0)
    batch = make_batch(corpora.validation, planned)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(name).eval()
    tokenizer = transformers.WhisperTokenizer.from_pretrained(name)
    texts = corpora.validation_text.targets
    labels = [
        [
            *tokenizer.convert_tokens_to_ids([f"<|{token}|>" for token in begin]),
            *tokenizer(text, add_special_tokens=False).input_ids,
            tokenizer.eos_token_id,
        ]
        for text in (texts[number] for number in planned.members)
    ]
    longest = max(map(len, labels))
    labels = torch.tensor([[*row, *[-100] * (longest - len(row))] for row in labels])
    for row, number in zip(batch.src, planned.members, strict=True):
        assert np.array_equal(row, window(corpora.validation_text.sources[number]))
    features = torch.from_numpy(batch.src.swapaxes(1, 2))
    with torch.no_grad():
        expected = model(features, labels=labels).loss
    params = jax_transformer.load(name).params
    total, count = batch_loss(params, batch, settings.config, 0.0)
    assert int(count) == int((labels >= 0).sum())
    assert abs(float(total / count) / float(expected) - 1) < 1e-6


KINDS = {
    "masked": ["--spec-augment"],
    "adapter": ["--lora-rank=2", "--spec-augment"],
    "teacher": ["--teacher=whisper", "--teacher-weight=0.7"],
    "microbatches": ["--num-microbatches=2", "--ema-decay=0.5"],
}


@pytest.mark.parametrize("kind", tiered(KINDS, []))
@pytest.mark.usefixtures("sounds", "no_pictures")
def test_a_resumed_run_ends_with_the_same_bits(kind):
    options = KINDS[kind]
    program(*USUAL, *WHISPER, *options, "--output=whole")
    program(*USUAL, *WHISPER, *options, "--output=part", "--steps=2")
    Path("sounds").rename("moved")  # the list may stand in another place
    program("--output=part", "--resume", "--steps=4", "--source=moved/list.tsv")
    assert same_model("whole", "part")
    Path("moved/list.tsv").write_text(Path("moved/list.tsv").read_text().replace("one", "two"))
    line = refused("train", "--output=part", "--resume", "--steps=6", "--source=moved/list.tsv")
    assert "text's sha256=" in line


@pytest.mark.exhaustive
@pytest.mark.usefixtures("sounds")
def test_eight_devices_have_the_losses_and_the_texts_of_one():
    logs = []
    for count, mesh in ((1, "data=1,fsdp=1,tensor=1"), (8, "data=2,fsdp=2,tensor=2")):
        options = [*USUAL, *WHISPER, *FREEZE, f"--mesh={mesh}", f"--output={mesh}"]
        argv = ["-m", "jax_transformer", "train", *options]
        shown = run_python(*argv, devices=count, cwd=Path.cwd())
        assert f"mesh: {mesh}" in shown.stdout.replace(", ", ",")
        logs.append(read_metrics(Path(mesh) / "metrics.jsonl"))
    for one, many in zip(*logs, strict=True):
        assert one.keys() == many.keys()
        for name in ("loss", "validation_loss"):
            assert abs(one.get(name, 1) / many.get(name, 1) - 1) < 1e-5
        assert one.get("validation_wer") == many.get("validation_wer")


@pytest.mark.usefixtures("sounds")
def test_masks_are_drawn_anew_for_each_sound_and_epoch():
    _, corpora = encoded(*WHISPER, "--spec-augment")
    corpus, every = corpora.training, np.arange(len(corpora.training))
    plain = corpus.features(every, len(every) + 1)
    assert (plain[-1] == 0).all()  # a row without a sound
    epochs = [corpus.masked(3, epoch).features(every, len(every)) for epoch in (0, 0, 1)]
    assert np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[0], epochs[2])
    assert not np.array_equal(epochs[0], corpus.masked(4, 0).features(every, len(every)))
    several = set()
    for number, (before, after) in enumerate(zip(plain, epochs[0], strict=False)):
        kept = before == after
        assert (after[~kept] == 0).all()
        heard = soundfile.info(corpus.files[number]).frames // 160
        masked = ~kept[:heard]
        frames, bands = masked.all(axis=1), masked.all(axis=0)
        assert (masked == frames[:, None] | bands).all()
        assert kept[heard:].all()  # the silence behind the sound
        assert frames.sum() <= 2 * 0.2 * heard
        assert bands.sum() <= 2 * 27
        several.add((int(frames.sum()), int(bands.sum())))
    assert len(several) > 10


@pytest.mark.usefixtures("sounds")
def test_sounds_that_are_too_long_are_dropped_and_bad_ones_are_refused_or_skipped():
    soundfile.write("sounds/0.flac", spoken(WORDS), SECOND)  # longer than the window
    Path("sounds/1.flac").write_bytes(b"no sound")
    soundfile.write("sounds/2.flac", np.repeat(spoken(["one"], 8000)[:, None], 2, 1), 8000)
    with Path("sounds/list.tsv").open("a") as file:
        file.write(f"absent.flac\tone\n3.flac\t\n4.flac\t{'one ' * 60}\n")
    line = refused("train", *USUAL, *WHISPER)
    assert line.startswith("error: sounds/1.flac is no sound that libsndfile reads;")
    assert line.endswith("; or set bad_lines to 'skip'")
    Path("other").mkdir()
    (path,) = [Path("sounds/5.flac").absolute()]
    Path("other/files.txt").write_text(f"{path}\n../sounds/2.flac\n")
    Path("other/texts.txt").write_text("three\none\n")
    validation = ["--valid-source=other/files.txt", "--valid-target=other/texts.txt"]
    usual = [each for each in (*USUAL, *WHISPER) if "valid-pairs" not in each]
    _, corpora = encoded_by(*usual, "--bad-lines=skip", *validation)
    training, validation = corpora.training, corpora.validation
    assert training.counts.dropped == {
        "dropped as too long": 2,
        "dropped for a bad line": 2,
        "dropped for an empty side": 1,
    }
    assert training.counts.bad_lines == ("sounds/1.flac", "sounds/absent.flac")
    assert training.files == ("sounds/2.flac", *(f"sounds/{n}.flac" for n in range(3, 23)))
    assert validation.files == (str(path), "other/../sounds/2.flac")
    # Another rate and two channels are the same tone.
    features = validation.features(np.array([1]), 1)[0]
    soundfile.write("sounds/2.flac", spoken(["one"]), SECOND)
    assert abs(features - validation.features(np.array([1]), 1)[0])[:20, :30].max() < 0.05


REFUSED = {
    "--weights 1": "weights=(1.0,) is for text",
    "--max-ratio=2": "max_ratio=2.0 is for text, and the model reads sound; leave it out",
    "--drop-duplicates": "drop_duplicates=True is for text",
    "--prefixes x": "prefixes=('x',) is for text",
    "--language=xx": "language='xx', what is spoken, must be one of en, de, fr",
    "--source=absent.tsv": "absent.tsv is no readable text",
    "--init=english": "language='en', what is spoken, must be one of none: the model is of",
    "--teacher=english": "teacher=english has another tokenizer than the run",
    "--bpe-dropout=0.1": "BPE-dropout works on a byte_pair tokenizer, not on tokenizer_json",
}


@pytest.mark.usefixtures("sounds")
def test_what_sounds_cannot_have_is_refused_in_one_line(capsys):
    for options, message in REFUSED.items():
        assert message in refusal(capsys, *USUAL, *WHISPER, *options.split()), options
    assert "source=None: name a list of sounds" in refusal(capsys, *WHISPER)
    assert "language=None, what is spoken" in refusal(capsys, *USUAL, "--init=whisper")
    line = refused("prepare", *USUAL, *WHISPER)
    assert line == "error: source_features=80: sounds are read while a model is trained"
    for option in ("--language=de", "--task=transcribe", "--spec-augment", "--select-by=wer"):
        assert "the model reads no sound; leave them out" in refusal(capsys, option)
    line = refusal(capsys, *USUAL, "--preset=whisper", "--language=en")
    assert "source_features=80: the model reads sound, not text" in line


@pytest.mark.usefixtures("sounds")
def test_a_sound_that_is_damaged_later_ends_the_run_in_one_line(monkeypatch, capsys):
    masked = sound_corpus.open_sound

    def vanished(source):
        if str(source).endswith("7.flac"):
            raise InputError(f"{source}: is damaged; fetch it again")
        return masked(source)

    settings, corpora = encoded(*WHISPER)
    monkeypatch.setattr(sound_corpus, "open_sound", vanished)
    with pytest.raises(InputError, match=r"^sounds/7.flac: is damaged; fetch it again$"):
        [
            *training_batches(
                corpora.training, plan_epoch(corpora.training, settings.training_config, 0)
            )
        ]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("sounds", "no_pictures")
def test_a_model_is_trained_from_fresh_weights_by_a_preset(capsys):
    sizes = "--d-model=16 --num-heads=2 --d-ff=24 --num-encoder-layers=1 --num-decoder-layers=1"
    sizes += " --encoder-max-length=50 --max-length=48 --preset=whisper --tokenizer=whisper"
    program(*USUAL, *sizes.split(), "--language=de", "--output=run")
    config = jax_transformer.load("run").config
    assert (config.source_features, config.d_model) == (80, 16)
    (heard,) = Transcriber("run")(["sounds/0.flac"], language="de")
    assert heard.fault is None
