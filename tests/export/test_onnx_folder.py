"""Models exported to ONNX: the same ids, text without this library, and what is refused."""

import json

import numpy as np
import pytest

from jax_transformer import TransformerConfig, Translator, generate
from jax_transformer.commands.main import command_call
from jax_transformer.tokenizers import separate, train_byte_pair
from jax_transformer.translation.model_folder import load, save
from tests.convert.families.case import foreign_model, write_tokenizer
from tests.export.models import BLOCKS, OTHER_FUNCTION, OTHERS, refusal, with_preset
from tests.export.readme import run_readme
from tests.models import unchecked
from tests.tiers import tiered

onnx_folder = pytest.importorskip("jax_transformer.export.onnx_folder")

REFUSED = {
    "torch_nn": "token_embeddings='none'",
    "shared_heads": "decoder_attention='self_over_memory'",
    "merged": "decoder_attention='merged'",
    "t5gemma2": "decoder_attention='merged'",
    "ssru": "decoder_attention='ssru_then_cross'",
    "whisper": "source_features=80",
}
EXPRESSIBLE = sorted({*TransformerConfig.presets()} - REFUSED.keys())
FEW = ("bart", "umt5", "one_final_norm", "tensor2tensor", "windows")  # of which CI exports
LINES = ["abc cab", "bead", "", "xyz uvw dab fed", "a </s> b"]
WITHOUT = ["jax", "torch"]
ONE_LAYER = dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 1)
TWO_VOCABULARIES = (("dab bead", 20), ("xyz uvw", 24))


@pytest.fixture(autouse=True)
def tracing():
    """PyTorch traces lengths that are symbols, which the shape checks would compare."""
    with unchecked():
        yield


def greedy_texts(model, lines):
    return [result.text for result in Translator(model)(lines, beam_size=1)]


@pytest.fixture(scope="module")
def exported(base, tmp_path_factory):
    """A model's folder, and what the command has made of it."""
    folder = tmp_path_factory.mktemp("exported")
    save(folder / "model", with_preset(base, "vaswani2017", **ONE_LAYER))
    with unchecked():
        command_call("export", str(folder / "model"), str(folder / "out"), "--to", "onnx")()
    return folder


@pytest.mark.exhaustive
def test_the_readme_translates_without_this_library(exported):
    assert run_readme(exported / "out", LINES, without=WITHOUT) == greedy_texts(
        load(exported / "model"), LINES
    )
    names = {"README.md", "settings.json", "source.json", "target.json"}
    programs = ("encoder.onnx", "decoder.onnx")
    names |= {f"{program}{end}" for program in programs for end in ("", ".data")}
    assert {path.name for path in (exported / "out").iterdir()} == names
    assert b"site-packages" not in (exported / "out" / "decoder.onnx").read_bytes()


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [(1, 1), (3, 1), (2, 40)])
def test_batches_and_lengths_of_any_size(exported, sizes):
    model = load(exported / "model")
    src = np.random.default_rng(0).integers(4, model.config.src_vocab_size, sizes)
    settings = json.loads((exported / "out" / "settings.json").read_text())
    search = onnx_folder.by_onnxruntime(exported / "out", settings)
    found = search(src, np.full(len(src), 40))
    best = generate(model.params, model.config, src.astype(np.int32), max_new_tokens=40)
    lengths, tokens = np.asarray(best.lengths)[:, 0], np.asarray(best.tokens)[:, 0]
    expected = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    assert found == expected
    longer = np.full((1, 41), 5)
    with pytest.raises(Exception, match="Non-zero status code"):  # beyond the position table
        search(longer, np.full(1, 3))


@pytest.mark.exhaustive
def test_a_text_that_goes_on_past_the_positions_is_an_error(exported):
    """Not one whose later tokens all have the last position."""
    settings = json.loads((exported / "out" / "settings.json").read_text()) | {"eos_id": -1}
    search = onnx_folder.by_onnxruntime(exported / "out", settings)
    assert len(search(np.full((1, 3), 5), np.full(1, 40))[0]) == 40
    with pytest.raises(Exception, match="Non-zero status code"):
        search(np.full((1, 3), 5), np.full(1, 41))


@pytest.mark.exhaustive
def test_another_function_is_not_written(base, exported, tmp_path, monkeypatch):
    def programs_of_another_model(config, params, folder):
        for path in (exported / "out").glob("*.onnx*"):
            (folder / path.name).write_bytes(path.read_bytes())

    monkeypatch.setattr(onnx_folder, "write_programs", programs_of_another_model)
    other = with_preset(base, "vaswani2017", **ONE_LAYER, norm_epsilon=1.0)
    assert OTHER_FUNCTION.search(refusal(onnx_folder.export_onnx, other, tmp_path))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_expressed_is_refused_by_name(base, tmp_path, name):
    found = refusal(onnx_folder.export_onnx, with_preset(base, name), tmp_path)
    assert found.startswith(f"{REFUSED[name]}: an ONNX export can express ")


@pytest.mark.parametrize(
    "name", tiered([*EXPRESSIBLE, *OTHERS, *(BLOCKS.keys() - REFUSED)], [], FEW)
)
def test_every_expressible_model_translates_alike(base, tmp_path, name):
    model = with_preset(base, name, num_encoder_layers=1, num_decoder_layers=2)
    assert onnx_folder.export_onnx(model, tmp_path / "out").startswith("16 of 16")


@pytest.mark.parametrize("family", tiered(["marian", "pegasus"], [], ["marian"]))
def test_the_readme_of_families_with_sentencepiece_models(tmp_path, family):
    changes = write_tokenizer(family, tmp_path / "model")
    foreign_model(family, None, **changes).save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model", ignore_generation_config=True)
    assert onnx_folder.export_onnx(model, tmp_path / "out").startswith("16 of 16")
    lines = ["tlx 6r5, tlx", "</s> 漢字", "a b c"]
    assert run_readme(tmp_path / "out", lines, without=WITHOUT) == greedy_texts(model, lines)


@pytest.mark.exhaustive
def test_a_vocabulary_for_each_language(base, tmp_path):
    sides = [train_byte_pair(["abc cab fed uvwxyz", line], size) for line, size in TWO_VOCABULARIES]
    tokenizer = separate(*sides)
    fields = {"token_embeddings": "separate", "output_projection": "linear", **ONE_LAYER}
    fields |= {key: getattr(tokenizer, key) for key in ("src_vocab_size", "tgt_vocab_size")}
    model = with_preset(base._replace(tokenizer=tokenizer), "vaswani2017", **fields)
    assert fields["src_vocab_size"] != fields["tgt_vocab_size"]
    onnx_folder.export_onnx(model, tmp_path / "out")
    assert run_readme(tmp_path / "out", LINES, without=WITHOUT) == greedy_texts(model, LINES)
