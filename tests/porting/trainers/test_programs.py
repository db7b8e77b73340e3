"""The programs themselves, where they are installed: their code, their checkpoints, their ids.

Each needs its own versions of libraries; `benchmarks.trainers` says how to compare them all.
"""

import pytest
import torch

from benchmarks import trainers

PACKAGES = {
    "annotated_transformer": "the_annotated_transformer",
    "fairseq": "fairseq",
    "joeynmt": "joeynmt",
    "opennmt_py": "onmt",
}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_program_and_this_library_agree(name, tmp_path):
    pytest.importorskip(PACKAGES[name])
    for case in getattr(trainers, name)(tmp_path, torch.float32):
        layers, logits = trainers.errors(name, case)
        print(f"\n{name} {case.name}: layers {layers:.1e}, logits {logits:.1e}")
        assert max(layers, logits) <= trainers.BOUND
        trainers.check_rest(name, case)
