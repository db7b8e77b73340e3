"""What the directory of a run may hold before the run, and what a killed run has left."""

import pytest

from jax_transformer import InputError
from jax_transformer.runs.output import check_output
from jax_transformer.storage.folder import SETTINGS_FILE


@pytest.mark.parametrize(
    "left",
    [
        [],
        [SETTINGS_FILE],
        [".writing.settings.yaml"],  # killed while it wrote its first file
        [SETTINGS_FILE, ".writing.metrics.jsonl"],
        [SETTINGS_FILE, "run/start/tokenizer.json"],  # killed before step 0 was committed
        [SETTINGS_FILE, "run/start/tokenizer.json", "run/0.orbax-checkpoint-tmp/run.json"],
    ],
)
def test_an_output_in_which_a_run_has_only_begun_is_free(tmp_path, left):
    for name in left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    check_output(tmp_path, overwrite=False)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InputError, match="exists already"):
        check_output(tmp_path, overwrite=False)


def test_only_the_output_of_a_run_is_overwritten(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(
        InputError, match="is not the output of a finished run and so is not overwritten"
    ):
        check_output(tmp_path, overwrite=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    check_output(tmp_path, overwrite=True)
    (tmp_path / "model" / "mine").mkdir()
    with pytest.raises(InputError, match="mine: is a folder"):
        check_output(tmp_path, overwrite=True)
