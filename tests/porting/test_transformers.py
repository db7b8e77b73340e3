"""The classes of transformers are found as from_huggingface converts them, however they are run."""

import pytest
import torch

from jax_transformer.convert import from_huggingface
from jax_transformer.convert.families import FAMILIES
from jax_transformer.porting import suggest
from tests.convert.families.case import CASES, foreign_model, transformers
from tests.porting.recorded import record
from tests.tiers import tiered

CALL = """\
def call(model, src, tgt):
    return model(
        input_ids=src, attention_mask=(src != PAD).long(), decoder_input_ids=tgt, use_cache=False
    )"""
UNTOLD = {"dropout", "attention_dropout", "activation_dropout", "initialization"}
UNTOLD |= {"embedding_dropout", "final_dropout", "dropout_placement", "bos_id", "eos_id"}
LEFT = (
    "rows[row : row + 1, length - max(1, end * length // 4) :] = PAD",
    "rows[row : row + 1, : max(1, end * length // 4)] = PAD",
)
INFERENCE = ("with torch.no_grad(), sdpa", "with torch.inference_mode(), sdpa")
LABELLED = CALL.replace("decoder_input_ids=tgt", "labels=tgt")


def check(model, call=CALL, changes=()):
    """The config is that of from_huggingface, and the logits agree."""
    config, _ = from_huggingface(model)
    sizes = config.src_vocab_size, config.tgt_vocab_size
    recording = record(model, config.pad_id, sizes, call=call, changes=changes)
    suggestion = suggest(dict(model.state_dict()), recording)
    assert suggestion.fits, suggestion
    assert max(suggestion.errors.values()) < 1e-12
    right, found = (x.explicit() for x in (config, suggestion.config))
    unbounded = suggestion.layout.buffers == () and config.positions != "learned"  # by no table
    told = right.keys() - UNTOLD - ({"max_length"} if unbounded else set())
    assert {name: found[name] for name in told} == {name: right[name] for name in told}
    return suggestion


@pytest.mark.parametrize("family", tiered(CASES, ["bart"], ["t5", "m2m_100"]))
def test_a_family_is_found(family):
    check(foreign_model(family))


@pytest.mark.parametrize("family", tiered(["marian", "t5"], [], ["t5"]))
def test_a_model_as_it_was_initialised_is_found(family):
    """Rows of padding, biases and tables of distances are zeros."""
    kind = getattr(transformers, FAMILIES[family].architecture)
    config = kind.config_class(**next(iter(CASES[family].shapes.values())))
    torch.manual_seed(0)
    config._attn_implementation = "sdpa" if family == "marian" else "eager"
    check(kind(config).eval())


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", [LEFT, INFERENCE], ids=["padding left", "inference_mode"])
@pytest.mark.parametrize("family", tiered(["bart", "t5"], [], ["t5"]))
def test_a_family_is_found_however_it_is_run(family, change):
    check(foreign_model(family), changes=[change])


@pytest.mark.parametrize("family", tiered(["bart", "t5"], [], ["t5"]))
def test_half_precision_is_read_as_what_it_rounds(family):
    check(foreign_model(family, dtype=torch.bfloat16))


@pytest.mark.parametrize("family", tiered(["bart", "t5"], [], ["t5"]))
def test_labels_are_shifted_inside(family):
    model = foreign_model(family)
    suggestion = check(model, call=LABELLED)
    start = model.config.decoder_start_token_id
    assert suggestion.config.bos_id == start
    assert f"itself puts the id {start} before" in " ".join(suggestion.notes)
