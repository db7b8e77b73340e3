"""What the directory of a run may hold before the run, and what a killed run has left."""

import pytest

from jax_transformer import InputError
from jax_transformer.runs.output import SETTINGS_FILE, check_output, claimed


@pytest.mark.parametrize(
    "left",
    [
        [],
        [SETTINGS_FILE],
        [".writing.settings.yaml"],  # killed while it wrote its first file
        [SETTINGS_FILE, ".writing.metrics.jsonl"],
    ],
)
def test_an_output_in_which_a_run_has_only_begun_is_free(tmp_path, left):
    for name in left:
        (tmp_path / name).touch()
    check_output(tmp_path, overwrite=False)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InputError, match="exists already"):
        check_output(tmp_path, overwrite=False)


def test_a_model_that_a_killed_run_was_writing_is_removed_at_the_start(tmp_path):
    output = tmp_path / "run"
    staging = tmp_path / ".writing.run"
    (staging / "new").mkdir(parents=True)
    (staging / "new" / "model.safetensors").write_bytes(bytes(100))
    with claimed(output):
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
