"""The columns: each compares one thing of a folder with transformers, and says "equal" or what."""

import json
import re

import numpy as np
import torch

from jax_transformer import classify
from jax_transformer.audio.log_mel import log_mel
from jax_transformer.convert.huggingface import from_huggingface, load_folder, to_huggingface
from jax_transformer.convert.languages import generating
from jax_transformer.convert.origin import read_origin
from jax_transformer.errors import InputError
from jax_transformer.transcription.transcriber import Transcriber
from tests.convert.families.case import as_inputs, ragged_tokens
from tests.decoding.plain import quick_generate, run
from tests.published.folder import WEIGHTS, auto_class, transformers, write_folder
from tests.published.lines import LINES

BOUND = 1e-5  # of logits in float32, relative to the largest
NEW_TOKENS = 12  # of a greedy search


class Comparison:
    """A row's folder as both sides read it. Each column is a method that returns its cell.

    Both models compute in float32, those of float16 files too.
    """

    def __init__(self, row, path):
        self.row, self.path = row, path
        write_folder(row, path)

    def load(self):
        source, target = self.row.languages or (None, None)
        self.loaded = load_folder(self.path, source_lang=source, target_lang=target)
        return "equal"

    def logits(self):
        self.config, self.params = from_huggingface(self.path, dtype="float32")
        self.src, self.tgt = self.batch()
        self.model = their_model(self.path)
        with torch.no_grad():
            inputs = self.inputs()
            if self.config.generates:
                inputs["decoder_input_ids"] = torch.tensor(self.tgt, dtype=torch.int64)
            theirs = self.model(**inputs).logits.numpy()
        if self.config.generates:
            ours = np.asarray(run(self.params, self.config, self.src, self.tgt))
        else:
            ours = np.asarray(classify(self.params, self.config, self.src))
        error = np.abs(ours - theirs).max() / np.abs(theirs).max()
        return "equal" if error <= BOUND else f"differ by {error:.0e}"

    def batch(self):
        """Return what the encoder and the decoder read."""
        return ragged_tokens(self.config)

    def inputs(self):
        return as_inputs(self.config, self.src)

    def ids(self):
        """Compare the ids of the odd lines, and the text of these ids."""
        tokenizer, theirs = self.loaded[2], their_tokenizer(self.path)
        if self.row.languages:
            theirs.src_lang, theirs.tgt_lang = self.row.languages
        different = refused = 0
        for line in LINES:
            line = self.row.start + line
            ids = self.their_ids(theirs, line)
            text = theirs.decode(ids, skip_special_tokens=True)
            try:
                found = tokenizer.encode_source([line])[0]
            except InputError:
                refused += 1
                continue
            different += (found, tokenizer.decode(ids)) != (ids, text)
        counts = (different, "differ"), (refused, "refused")
        return ", ".join(f"{count} {words}" for count, words in counts if count) or "equal"

    def their_ids(self, tokenizer, line):
        return tokenizer(line).input_ids

    def greedy(self):
        config = self.config
        if not config.generates:
            return "-"
        own = self.model.generation_config
        self.model.generation_config = transformers.GenerationConfig(
            decoder_start_token_id=config.bos_id,
            eos_token_id=config.eos_id,
            pad_token_id=config.pad_id,
            max_new_tokens=NEW_TOKENS,
        )
        options = {"max_new_tokens": NEW_TOKENS, "allow_padding": True}
        cell = self._generated(config, options, {})
        self.model.generation_config = own
        return cell

    def defaults(self):
        """Compare targets by the folder's own generation defaults."""
        if not self.config.generates:
            return "-"
        config, _, tokenizer, options = self.loaded
        # Trained weights never choose a row without a token; random ones may.
        theirs = {"suppress_tokens": [*options.get("banned_tokens", ())]}
        if self.row.languages:
            config, options = generating(config, options, tokenizer, str(self.path))
            languages = tokenizer.languages
            key = "decoder_start_token_id" if languages.starts else "forced_bos_token_id"
            theirs[key] = languages.ids[self.row.languages[1]]
        return self._generated(config, options, theirs)

    def _generated(self, config, options, theirs):
        found = quick_generate(self.params, config, self.src, **options)
        # That of Whisper's own class adds rules.
        generate = transformers.GenerationMixin.generate
        expected = generate(self.model, **self.inputs(), **theirs)[:, 1:].tolist()
        different = 0
        for row, length, tokens in zip(found.tokens, found.lengths, expected, strict=True):
            ours = row[0, : int(length[0])].tolist()
            rest = tokens[len(ours) :]
            different += tokens[: len(ours)] != ours or any(i != config.pad_id for i in rest)
        return f"{different} differ" if different else "equal"

    def back(self):
        """Compare the folder that is written with the one that came: tensors, then files."""
        config, params, tokenizer, _ = load_folder(self.path)  # in its own languages
        home, origin = self.path.with_name("home"), read_origin(self.path)[0]
        to_huggingface(params, config, home, tokenizer=tokenizer, origin=origin)
        before, after = self.model.state_dict(), their_model(home).state_dict()
        other = [name for name in before if not torch.equal(before[name], after[name])]
        for path in self.path.iterdir():
            if path.name.startswith(WEIGHTS):
                continue
            new = home / path.name
            if not new.exists():
                other.append(f"no {path.name}")
            elif content(path) != content(new):
                other.append(path.name)
        return f"differ: {', '.join(other)}" if other else "equal"


class SpeechComparison(Comparison):
    """A row that reads sound. Its lines are targets, without the tokens of language and task."""

    def batch(self):
        frames, bands = 2 * self.config.stack("encoder").max_length, self.config.source_features
        src = np.random.default_rng(0).normal(size=(3, frames, bands)).astype(np.float32)
        return src, ragged_tokens(self.config)[1]

    def inputs(self):
        return {"input_features": torch.tensor(self.src.swapaxes(1, 2))}

    def their_ids(self, tokenizer, line):
        ids = tokenizer(line, add_special_tokens=False).input_ids
        return [*ids, tokenizer.eos_token_id]

    def defaults(self):
        """Compare the tokens of sounds of one window, without times and with them, and of four."""
        transcriber = Transcriber(self.path, dtype="float32")
        random, different = np.random.default_rng(0), 0
        for seconds, timed in ((1.0, False), (1.0, True), (3.3, True)):
            sound = random.normal(0, 0.1, int(16_000 * seconds)).astype(np.float32)
            features = torch.tensor(log_mel(sound, self.config.source_features).T[None])
            (expected,) = self.model.generate(features, return_timestamps=timed).tolist()
            while expected[-1:] == [self.config.eos_id]:
                expected.pop()
            # transformers knows silence and further attempts by options alone.
            (found,) = transcriber([sound], timestamps=timed, temperatures=(0.0,), no_speech=2.0)
            assert found.fault is None
            different += [i for part in found.segments for i in part.tokens] != expected
        return f"{different} differ" if different else "equal"


def content(path):
    """Return the values of config.json, or the bytes of another file.

    The spaces and the order of config.json are free, and the class that it names has the output.
    """
    if path.name != "config.json":
        return path.read_bytes()
    values = json.loads(path.read_text())
    names = [re.sub("Model$", "ForConditionalGeneration", name) for name in values["architectures"]]
    return values | {"architectures": names}


def their_model(path):
    values = json.loads((path / "config.json").read_text())
    names, model_class = values["architectures"], auto_class(values["model_type"])
    if all(name.endswith("ForSequenceClassification") for name in names):
        model_class = transformers.AutoModelForSequenceClassification
    return model_class.from_pretrained(path, dtype=torch.float32).eval()


def their_tokenizer(path):
    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except TypeError:  # of T5Tokenizer in 5.24 where tokenizer.json is no unigram model
        return transformers.PreTrainedTokenizerFast.from_pretrained(path)


# For each column, those without which there is nothing to compare.
COLUMNS = {
    "load": (),
    "logits": (),
    "ids": ("load",),
    "greedy": ("logits",),
    "defaults": ("load", "logits"),
    "back": ("load", "logits"),
}


def compare(row, path, columns=COLUMNS):
    """Return the cell of each column: "equal", what differs, a refusal, or "-" for nothing."""
    is_speech = row.config["model_type"] == "whisper"
    comparison = (SpeechComparison if is_speech else Comparison)(row, path)
    cells, failed = {}, set()
    for name in columns:
        if failed & {*COLUMNS[name]} or (name == "logits" and not row.weights):
            cells[name] = "-"
            failed.add(name)
            continue
        try:
            cells[name] = getattr(comparison, name)()
        except InputError as error:
            sentence = str(error).splitlines()[0].replace(str(path), "FOLDER")
            cells[name] = "-" if sentence in cells.values() else sentence  # said once
            failed.add(name)
    return cells
