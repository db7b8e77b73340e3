"""What `suggest` says holds: masks that are found are used; what is only near is not found."""

import pytest

from jax_transformer import convert
from jax_transformer.convert.table import Masks
from jax_transformer.porting.compare import compare
from jax_transformer.porting.suggest import suggest
from tests.porting.renamed import run_snippet
from tests.porting.workshop import PAD, WORDS, workshop


def weights_and_record(module):
    weights = {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}
    return weights, run_snippet(module, PAD, WORDS, WORDS)


@pytest.mark.exhaustive
def test_masks_that_are_found_stand_in_the_layout_and_are_used(tmp_path):
    module = workshop(source_mask="nothing")
    weights, record = weights_and_record(module)
    suggestion = suggest(weights, record)
    assert suggestion.fits
    path = tmp_path / "layout.toml"
    convert.write_layout(path, suggestion.layout, suggestion.config)
    assert "[masks]\nencoder = false\nmemory = false\n" in path.read_text()
    read = convert.read_layout(path)
    assert read.layout.masks == Masks(encoder=False, memory=False)
    params, _ = convert.to_params(weights, read.config, read.layout)
    batch = record.batches[2]
    result = compare(module, params, read.config, str(path), batch.src, batch.tgt)
    assert (result.first_differing, result.masks) == (None, "default")


@pytest.mark.exhaustive
def test_padding_that_is_hidden_from_queries_and_not_from_keys_is_not_found():
    """Each layer follows from the one before it; what padding holds is the program's own."""
    suggestion = suggest(*weights_and_record(workshop(source_mask="rows")))
    assert not suggestion.fits
    text = str(suggestion)
    assert "nothing fits at logits in batch 2: " in text
    assert "the masks are others than a config can have" in text
