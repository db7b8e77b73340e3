"""What each command refuses: in one line, before any work, with nothing written."""

import shlex

import pytest

from tests.commands.training import PLAIN, SMALL, TEXT, refused, written

SIZES = [option for option in SMALL if not option.startswith("--vocab")]
WORDS = {
    "text": TEXT,
    "small": SMALL,
    "sizes": SIZES,
    "plain": PLAIN,
    "quickly": "--evaluation-interval=2 --bucket-count=1 --max-tokens=60 --warmup-steps=1".split(),
    "torch_nn": "--layout=torch_nn --config=config.json".split(),
    "prepared": "--prepared=prepared --steps=2 --evaluation-interval=2 --max-ratio=9".split(),
    "tiny": "--vocab-size=50 --d-model=8 --num-heads=2 --d-ff=16 --batch-rows=4 --length=6".split(),
}
BOTH_SIDES = "valid_pairs=2 holds pairs out of the training text"
HUGE = "1" + 23 * "0"
NO_PARAMETERS = "bad.toml: Object missing required field `parameters` - at `$.rows[0]`"
# By the fixture that writes the files and by the command: what is named, and what is said of it.
REFUSED = {
    ("corpus", "train {text} {small}"): {
        "--source=missing": "missing is no readable text",
        "--steps=x": "steps='x' must be a whole number, at least 1",
        "--steps=2.5": "steps=2.5 must be a whole number, at least 1",
        "--scan-layers=no": "--scan-layers/--no-scan-layers: ignored explicit argument 'no'",
        "--stepss=3": "'--stepss=3' is not an argument of jax-transformer train; did you mean "
        "--steps?",
        "--steps": "argument --steps: expected one argument; see jax-transformer train --help",
        "--compute-dtype=int8": "compute_dtype='int8' must be one of 'bfloat16', 'float32'",
        "--steps=0": "steps=0 must be a whole number, at least 1",
        "--label-smoothing=1": "label_smoothing=1 must be a finite number, at least 0 and below 1",
        "--num-heads=3": "num_heads=3 must divide d_model=8",
        "--d-model=7": "num_heads=2 must divide d_model=7",
        "--dropout=1.5": "dropout=1.5",
        "--vocab-size=4": "vocab_size=4 must be a whole number, at least 5 and at most 16777216",
        "--vocab-size=5": "vocab_size=5 must be at least",
        "--vocab-size=16777217": "must be a whole number, at least 5 and at most 16777216",
        "--max-length=2": "max_length=2 is too short for 5 of 6 validation pairs",
        "--preset=nonsense": "preset='nonsense' is unknown",
        "--preset=torch_nn": "token_embeddings='none'",
        "--output=source/model": "is not a writable directory",
        "--valid-pairs=2": BOTH_SIDES,
        "--output=model --bleu-tokenization=13b": "bleu_tokenization='13b' must be one of",
    },
    ("corpus", "train --source=source --target=target {small}"): {
        "--valid-pairs=0": "valid_pairs=0 must be a whole number, at least 1",
        "--valid-pairs=6": "valid_pairs=6 leaves none of 6 pairs to train on",
    },
    ("corpus", "train"): {
        "--valid-pairs=2": BOTH_SIDES,
        "--noise-density=0.2": "noise_density and mean_span_length need",
    },
    ("corpus", "prepare {text} {small} {prepared}"): {
        "--max-ratio=0.5": "max_ratio=0.5",
        "--max-ratio=inf": "max_ratio=inf",
        "--longest-side=0": "longest_side=0",
        "--bpe-dropout=1": "bpe_dropout=1 ",
        "--weights 1 0": "weights[1] is not",
        "--weights 1 inf": "weights=",
        "--bad-lines=drop": "bad_lines='drop' must be one of 'refuse', 'skip'",
        "--columns 1 2": "columns=1 2 needs two names, or numbers from 1, ",
        "--source=a.tsv --target --columns 1": "columns=1 needs two names",
        "--source=a.tsv --target --columns 1 1": "columns=1 1 needs two",
        "--source=a.tsv --target --columns 0 1": "columns=0 1 needs two names, or numbers from 1",
        "--text-column=content": "text_column=content needs a .csv or .jsonl file",
        "--source=a.json --target": "a.json: is no lines of text; write each record as a line of",
        "--source=a.tmx --target": "a.tmx: is a translation memory (TMX)",
        "--source a.tsv b --target": "1 source files that are no tables, and 0 target",
        "--dry-runn": "error: '--dry-runn' is not an argument of jax-transformer prepare; did you "
        "mean --dry-",
    },
    ("corpus", "prepare --source=source {small} {prepared}"): {"--weights=1": "target"},
    ("plain_text", "train {plain}"): {
        "--text=plain.txt": "objective='translation' with text=plain.txt: a denoising objective "
        "and a",
        "--objective=ul2 --batching=packed --source=pairs.tsv": "objective='ul2' with text=None",
    },
    ("plain_text", "train --text=plain.txt --objective=span_corruption {plain}"): {
        "--batching=buckets": "set batching='packed'",
        "--text=pairs.tsv": "pairs.tsv: a .tsv file holds pairs",
        "--prefixes a b": "prefixes=a b needs 1",
        "--fresh-weights": "fresh_weights=True needs the folder",
        "--optimizer=adafactor --weight-decay=0.1": "weight_decay=0.1 must be 0",
    },
    ("bad_models", "train {text} --init=base --output=on"): {
        "--d-model=16": "d_model=16 is not that of the model in base, which has 8; leave",
        "--activation=gelu": "activation='gelu' is not that of the model in base, which has 'relu'",
        "--pad-id=3": "pad_id=3 is not that of the model in base, which has 0",
        "--preset=pre_norm": "preset='pre_norm' has final_norm=True, but the model in base has "
        "False; leave preset out",
        "--preset=nonsense": "preset='nonsense' is unknown",
        "--vocab-size=17": "vocab_size=17 is not that of the tokenizer, which has 1",
        "--tokenizer=other.json": "tokenizer=other.json is not the tokenizer of the model in base: "
        "their sha256 are ",
        "--target-tokenizer=other.json": "tokenizer=None: name that of the sources beside "
        "target_tokenizer=other.json",
        "--config=mine.yaml": "num_heads=4 is not that of the model in base, which has 2; leave "
        "num_heads out",
        "--init=nowhere": "nowhere: is not the folder of a trained model",
        "--init=bert": "config.json: model_type='bert' is unknown",
        "--init=broken": "broken: the weights are not those of config.json: encoder.0.up.w: wrong",
        "--init=sampling": "do_sample=True cannot be honoured",
        "--dropout=1.5": "dropout=1.5",
        "--learning-rate=0.001": "learning_rate=0.001 has no effect with schedule='noam'; leave it "
        "out, or set schedule='constant' or 'cosine' or",
        "--schedule=t5 --learning-rate-factor=2": "learning_rate_factor=2.0 has no effect with",
        "--pack-length=64": "pack_length=64 has no effect with batching='buckets'",
        "--teacher-weight=0.3": "teacher_weight=0.3 has no effect without a teacher; name",
        "--freeze encodr/*": "freeze='encodr/*' matches no parameter; the nearest",
        "--freeze *": "freeze='*' leaves no parameter to train",
    },
    ("bad_models", "train {text} {sizes} --output=on"): {
        "--tokenizer=other.json --vocab-size=17": "vocab_size=17 is not that of the tokenizer, "
        "which has 16; leave vocab_size out",
        "--tokenizer=base --target-tokenizer=other.json": "target_tokenizer=other.json: two "
        "tokenizers need token_embeddings='separate', but the model has 'shared'",
        "--tokenizer=nowhere": "nowhere cannot be read; a tokenizer file must be there",
        "--tokenizer=damaged.json": "damaged.json: damaged tokenizer file",
        "--tokenizer=bert": "bert: holds no tokenizer: neither",
    },
    ("bad_models", "train {text} {small} --source=missing --output=thesis"): {
        "": "thesis: exists already",
        "--overwrite": "thesis: is not the output of a finished run",
    },
    ("bad_models", "train {text} --output=on"): {
        "--teacher=base --tokenizer=other.json": "error: teacher=base has another tokenizer than "
        "the run; leave"
    },
    ("base", "train {text} --output=on --init-keeps moments step"): {
        "--init=base/model": "error: init_keeps=moments step: init=base/model is no run with "
        "checkpoints; name one by --init",
        "": "error: init_keeps=moments step: init=None is no run with checkpoints",
        "--init=base --steps=12": "step: steps=12 must be above its step 12",
        "--init=base --freeze encoder/*": "step: freeze=('encoder/*',) must be ()",
        "--init=base --optimizer=muon": "step: optimizer='muon' must be 'adam'",
        "--init=base --lora-rank=2": "step: lora_rank=2 must be None",
        "--init=base --fresh-weights": "step: fresh_weights=True keeps nothing",
    },
    ("base", "train {text} {quickly} --schedule=constant --output=on"): {
        "--lora-rank=2": "error: lora_rank=2 needs a trained model: name it by init",
        "--init=base --lora-rank=9": "error: lora_rank=9 must be at most 8: the kernel of "
        "decoder/layers_0/cross_attention/query is",
        "--init=base --lora-rank=2 --lora-targets */q_proj": "error: lora_targets='*/q_proj' "
        "matches no parameter; the nearest are ",
        "--init=base --lora-dropout=0.1": "error: lora_dropout=0.1 needs lora_rank",
    },
    ("weights", "convert"): {
        "weights.pt out.pt --layout=torch_nn": "records no config",
        "missing.pt out.pt {torch_nn}": "missing.pt cannot be read",
        "weights.pt weights.pt {torch_nn}": "weights.pt already exists",
        "weights.pt out.pt --layout=x --config=config.json": "layout='x' is unknown",
        "weights.pt out.pt {torch_nn} --dtype=int8": "dtype='int8'",
        "weights.pt out.txt {torch_nn}": "out.txt: the name must end in",
        "folder out.pt": "is not the folder of a trained model",
        "weights.pt out {torch_nn} --output-layout=marian --buffers=weights.pt": "--buffers "
        "weights.pt is for a file; out will be a folder",
        "weights.pt out.pt --layout=torch_nn --config=cut.json": "cut.json is no readable JSON",
        "weights.pt out.pt --layout=torch_nn --config=list.json": "list.json must hold a JSON "
        "object",
        "weights.pt out.pt --layout=torch_nn --config=width.json": "width.json: width=3 is not a "
        "setting",
        "weights.pt out.pt --layout=torch_nn --config=preset.json": "preset.json: preset='x' is "
        "unknown",
        "weights.pt out.pt --config=config.json --layout=bad.toml": f"error: {NO_PARAMETERS}",
        "weights.pt out.pt {torch_nn} --output-layout=bad.toml": f"error: {NO_PARAMETERS}",
    },
    ("weights", "verify weights.pt {torch_nn}"): {
        "--against=missing.safetensors": "error: missing.safetensors cannot be read",
    },
    ("among_recordings", "suggest"): {
        "letters.safetensors --against letters.pt --output layout.txt": "must be a .toml file",
        "letters.safetensors --against letters.pt --output no/l.toml": "no does not exist",
        ".": "holds none of model.safetensors",
        "letters.safetensors --drop heads.*": "drop='heads.*' is the name of no tensor",
        "letters.safetensors --key model": "key='model' is for torch.save files",
        "absent.pt": "absent.pt cannot be read",
        "letters.safetensors --against letters.safetensors": "is no recording, it has ",
        "letters.safetensors --against linear_bias.pt": "give the weights with which the recording",
        "empty.pt": "the checkpoint holds no tensors",
    },
    ("systems", "evaluate"): {
        "better": "error: references=None: BLEU and chrF need them; name their file",
        "better --references=none": "error: none is no readable text; name a text file",
        "better --references=references --others short": "error: short: has 1 lines, but the "
        "translations 12; line i of one file must belong to",
        "empty --references=references": "error: empty: has no lines; name a file with a line for",
        "better --references empty": "error: empty: has no lines; name a file with a line for",
        "better --references=references --bleu-tokenization=spm": "error: bleu_tokenization='spm' "
        "downloads a model",
        "better --references references --others worse --line-scores=new": "error: line_scores: "
        "the lines are those of one system; leave out others",
        "better --references references --others worse --worst=3": "error: worst: the lines are "
        "those of one system; leave out others",
        "better --references references --worst=0": "error: worst=0 must be a whole number, at",
        "better --references references --line-scores ./better --overwrite": "error: better: is "
        "read and would be written; name another output",
        "better --references references worse --metricx=folder --metricx-version=23": "error: "
        "references=references worse: MetricX reads one text for each line",
        "better --references=references --metricx=folder": "error: metricx=folder, "
        "metricx_version=None: name both of them, or neither",
        "better --references=references --bleu-tokenization=13b": "error: bleu_tokenization='13b'",
    },
    ("corpus", "translate nowhere --input=target"): {
        "--nbest=3 --beam=2": "error: num_hypotheses=3 must be from 1 to beam_size=2",
        "--beam=0": "error: beam_size=0 must be a whole number, at least 1",
        "--nbest=0": "error: num_hypotheses=0 must be a whole number, at least 1",
        "--top-p=1.5": "error: top_p=1.5 must be a finite number, above 0 and at most 1",
        "--early-stopping=x": "error: early_stopping='x' must be",
        "--banned-sequences 5,x": "error: banned_sequences=",
        "--min-new-tokens=4 --max-new-tokens=4": "error: min_new_tokens=4 must be from 0 to 3",
        "--temperature=0.7": "error: temperature=0.7 is for sampling, which needs a key; for lines",
        "--seed=-1": "error: seed=-1 must be a whole number, at least 0",
        "--seed=1 --beam=2": "error: beam_size=2 searches, and a key or a seed samples",
        "--max-length=0": "error: max_length=0 must be a whole number, at least 1",
        "--split-sentences=de_DE": "error: split_sentences='de_DE' must be the code of the text's",
        "--split-sentences=en --nbest=2": "error: split_sentences='en' joins the best transl",
        "--split-sentences=en --alignments=plot.png": "error: split_sentences='en': alignments "
        "are of whole lines; leave one of the two out",
        "--alignments=plot.jpg": "error: plot.jpg: the name of a picture must end in .png, .pdf or",
        "--output=target --overwrite": "error: target: is the input and would be written; name "
        "another output",
    },
    ("corpus", "budget {tiny}"): {
        "--mesh=rows=2": "error: mesh='rows=2': 'rows' must be one of data, fsdp, tensor",
        "--mesh=data=-1": "error: mesh='data=-1' must name the size of each axis",
        "--mesh=data=x": "error: mesh='data=x': data=x must be a number",
        "--batch-rows=0": "error: rows=0 must be at least 1",
        f"--batch-rows={HUGE}": "error: rows=1000",
        f"--steps={2**31}": "error: steps=2147483648 must be a whole number, at least 1",
        f"--mesh=data={HUGE}": "error: the number of devices of mesh=1000",
        f"--d-model={10**9}": "error: d_model=1000000000 must be at most 131072",
        "--length=0": "error: length=0 must be at least 1",
        "--steps=0": "error: steps=0 must be a whole number, at least 1",
        "--utilisation=0": "error: utilisation=0 must be a finite number, above 0",
        "--utilisation=1.1": "error: utilisation=1.1 must be a finite number, above 0",
        "--freeze x/*": "error: freeze='x/*' matches no parameter; the nearest are ",
        "--preset=torch_nn": "error: a budget needs a model from token ids to logits",
        "--lora-rank=513 --d-model=512": "error: lora_rank=513 must be at most 512",
    },
}
ROWS = [
    pytest.param(files, f"{command} {options}", message, id=f"{command.split()[0]} {options}")
    for (files, command), rows in REFUSED.items()
    for options, message in rows.items()
]


@pytest.mark.parametrize(("files", "line", "message"), ROWS)
def test_bad_input_is_one_line_and_writes_nothing(files, line, message, request, capsys):
    request.getfixturevalue(files)
    capsys.readouterr()  # what the programs that write the files have printed
    argv = shlex.split(line.format(**{name: shlex.join(words) for name, words in WORDS.items()}))
    before = written()
    assert message in refused(*argv)
    assert written() == before
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out == "" or argv[0] in ("train", "convert")  # which tell what they have read
