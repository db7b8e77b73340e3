r"""Prepare the files of a large corpus on the machines of a Ray cluster: copy it, and change it.

    python ray_prepare.py --source part*.en --target part*.de --prepared /shared/store \
        --tokenizer opus-mt-en-de --valid-source valid.en --valid-target valid.de

A task prepares one pair of files, as `jax-transformer prepare` does, with all cores that it is
given. The arguments that this program does not know go to that command. Training with the same
arguments, all files and `--weights` then encodes nothing. All machines see the same files.
"""

import argparse
import os
import subprocess
import sys
from typing import Any

try:
    import ray
except ModuleNotFoundError:
    sys.exit('error: ray_prepare.py needs ray: pip install "jax-transformer[ray]"')

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports to its makers otherwise

CORES = 1  # of a machine for a task, which starts a process for each core that it sees


def prepare(files: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    """Prepare one pair of files; return the report, or why there is none."""
    command = [sys.executable, "-m", "jax_transformer", "prepare", *arguments]
    command += ["--source", files["source"], "--target", files["target"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return files | {"report": done.stdout if done.returncode == 0 else "", "error": done.stderr}


def main() -> None:
    """Prepare each pair of files; the first that cannot be prepared is told in one line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--source", nargs="+", required=True)
    parser.add_argument("--target", nargs="+", required=True)
    known, arguments = parser.parse_known_args()
    if len(known.source) != len(known.target):
        sys.exit(
            f"error: {len(known.source)} files of --source and {len(known.target)} of --target; "
            "name a target for each source"
        )
    files = zip(known.source, known.target, strict=True)
    rows = [{"source": source, "target": target} for source, target in files]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    for part in dataset.map(prepare, fn_args=(arguments,), num_cpus=CORES).iter_rows():
        if not part["report"]:
            sys.exit(f"{part['source']}: {part['error'].strip()}")
        print(part["source"], part["report"].partition("\n")[0], flush=True)


if __name__ == "__main__":
    main()
