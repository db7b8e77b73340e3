"""Models exported to CTranslate2: the same ids, text without this library, and what is refused."""

import json
import re

import pytest

from jax_transformer import TransformerConfig, Translator
from jax_transformer.commands.main import command_call
from jax_transformer.translation.model_folder import load, save
from tests.export.models import OTHER_FUNCTION, OTHERS, refusal, with_preset
from tests.programs import run_python
from tests.tiers import DISTINCT_PRESETS, tiered

ctranslate2_folder = pytest.importorskip("jax_transformer.export.ctranslate2_folder")

REFUSED = {
    "torch_nn": "token_embeddings='none'",
    "shared_heads": "decoder_attention='self_over_memory'",
    "pre_norm": "norm='std_norm'",
    "pre_norm_memory_norm": "memory_norm=True",
    "pre_norm_log_softmax": "norm='std_norm'",
    "modern": "positions='rotary'",
    "t5gemma": "norm='zero_centered_rms_norm'",
    "t5gemma2": "decoder_attention='merged'",
    "whisper": "source_features=80",
}
REFUSED_FIELDS = {
    "decoder_attention": "merged",
    "norm_placement": "sandwich",
    "decoder_norm_placement": "sandwich",
    "norm": "zero_centered_rms_norm",
    "positions": "rotary",
    "sliding_window": 3,
    "num_kv_heads": 1,
    "query_key_norm": True,
    "attention_softcap": 5.0,
    "logit_softcap": 5.0,
    "encoder_d_model": 28,
    "encoder_num_heads": 2,
    "encoder_num_kv_heads": 1,
    "encoder_d_ff": 27,
    "d_v": 9,
}
EXPRESSIBLE = sorted({*TransformerConfig.presets()} - REFUSED.keys())


@pytest.mark.parametrize(
    "name",
    tiered(
        [*EXPRESSIBLE, *OTHERS],
        ["bart", "t5_v1_1", "vaswani2017"],
        [*DISTINCT_PRESETS, *OTHERS],
    ),
)
def test_every_expressible_model_translates_alike(base, tmp_path, name):
    line = ctranslate2_folder.export_ctranslate2(with_preset(base, name), tmp_path / "out")
    assert line.startswith("16 of 16")


SEPARATE = {"token_embeddings": "separate", "output_projection": "linear"}
USUAL = {"norm_bias": False, "d_kv": 8, **SEPARATE}


@pytest.mark.parametrize(
    ("preset", "fields", "fault"),
    [
        *((preset, {}, fault) for preset, fault in REFUSED.items()),
        *(
            ("vaswani2017", {name: value, **USUAL}, f"{name}={value!r}")
            for name, value in REFUSED_FIELDS.items()
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(base, tmp_path, preset, fields, fault):
    model = with_preset(base, preset, **fields)
    found = refusal(ctranslate2_folder.export_ctranslate2, model, tmp_path)
    assert found.startswith(f"{fault}: CTranslate2 can express ")


@pytest.mark.parametrize("name", tiered(["vaswani2017", "no_positions", "bart"], ["bart"]))
def test_a_text_without_an_end_or_a_long_line_does_not_stop_the_engine(base, tmp_path, name):
    """Its model has 40 positions; CTranslate2 reads 1,024 tokens and writes 256, untold."""
    model = with_preset(base, name)
    line = ctranslate2_folder.export_ctranslate2(model, tmp_path / "out")
    limits = {key: int(value) for key, value in re.findall(r"(max_\w+_length)=(\d+)", line)}
    learned = name == "bart"
    assert limits == ({"max_input_length": 40, "max_decoding_length": 40} if learned else {})
    translator = ctranslate2_folder.ctranslate2.Translator(str(tmp_path / "out"))
    source = [["a"] * 2000]
    endless = {"suppress_sequences": [["</s>"]], "beam_size": 1}
    (result,) = translator.translate_batch(source, **endless, **limits)
    assert len(result.hypotheses[0]) == (40 if learned else 256)
    if learned:
        with pytest.raises(RuntimeError, match="No position encodings are defined"):
            translator.translate_batch(source, **endless)


def test_positions_that_the_engine_lacks_are_not_written(base, tmp_path, monkeypatch):
    positions = ctranslate2_folder._positions
    monkeypatch.setattr(
        ctranslate2_folder, "_positions", lambda *arguments: positions(*arguments)[:40].copy()
    )
    line = refusal(
        ctranslate2_folder.export_ctranslate2, with_preset(base, "vaswani2017"), tmp_path
    )
    assert "No position encodings are defined for positions >= 40" in line


def test_another_function_is_not_written(base, tmp_path, monkeypatch):
    positions = ctranslate2_folder._positions
    monkeypatch.setattr(
        ctranslate2_folder, "_positions", lambda *arguments: positions(*arguments)[::-1].copy()
    )
    export = ctranslate2_folder.export_ctranslate2
    assert OTHER_FUNCTION.search(refusal(export, with_preset(base, "vaswani2017"), tmp_path))


WITHOUT_THIS_LIBRARY = """
import json, sys
import ctranslate2, tokenizers
tokenizer = tokenizers.Tokenizer.from_file("out/tokenizer.json")
translator = ctranslate2.Translator("out", compute_type=sys.argv[1])
sources = [tokenizer.encode(line).tokens + ["</s>"] for line in sys.argv[2:]]
options = {"beam_size": 1, "min_decoding_length": 0, "max_decoding_length": 20}
results = translator.translate_batch(sources, suppress_sequences=[["<pad>"]], **options)
ids = [[tokenizer.token_to_id(token) for token in result.hypotheses[0]] for result in results]
assert not any("jax" in name for name in sys.modules)
print(json.dumps([tokenizer.decode(target) for target in ids]))
"""


def test_the_command_and_text_without_this_library(base, tmp_path, capsys):
    model = with_preset(base, "vaswani2017")
    save(tmp_path / "model", model)
    command_call("export", str(tmp_path / "model"), str(tmp_path / "out"))()
    assert "written: 16 of 16 random sources have the same translation" in capsys.readouterr().out
    lines = ["abc cab", "bead", "xyz uvw dab fed", "a"]
    done = run_python("-c", WITHOUT_THIS_LIBRARY, "float32", *lines, cwd=tmp_path)
    results = Translator(model)(lines, beam_size=1, max_new_tokens=20)
    assert json.loads(done.stdout) == [result.text for result in results]


@pytest.mark.parametrize("quantization", ["float16", "int8"])
def test_smaller_weights_are_written_and_counted(base, tmp_path, quantization):
    save(tmp_path / "model", with_preset(base, "vaswani2017", d_model=48))
    model = load(tmp_path / "model")  # arrays of JAX, which nothing may write to
    line = ctranslate2_folder.export_ctranslate2(model, tmp_path / "half", quantization)
    assert " of 16 random sources have the same translation" in line
    ctranslate2_folder.export_ctranslate2(model, tmp_path / "whole")
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("half", "whole")]
    assert sizes[0] < 0.7 * sizes[1]
