"""Ray and servers under load: python -m benchmarks.serving bulk|serve|alone MODEL INPUT.

`bulk` translates a file by `jax-transformer translate` and by docs/examples/ray_translate.py, in
turn, and once more with a worker that is killed; the outputs must have the same bytes. `serve`
starts docs/examples/ray_serve.py, asks by many clients at once, compares each answer with
`translate`, and kills a replica under load; `alone` asks docs/examples/serve.py. Linux only; the
cluster is this machine.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import NamedTuple

import tyro
from rich.console import Console

from benchmarks.systems import processor, read_lines
from tests.examples.processes import (
    EXAMPLES,
    REPLICA,
    ROOT,
    WORKER,
    descendants,
    ray_command,
    translate_command,
)

LONGEST_WAIT = 60  # seconds for an answer; a request that takes longer hangs
LANGUAGES = {"source": "en", "target": "de"}  # fields that ray_serve.py needs


def timed(command: list[str], kill_after: float | None = None) -> float:
    """Run a command, kill one of its workers after some seconds; return the seconds it took."""
    begun = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(random.choice(descendants(process.pid, WORKER)), signal.SIGKILL)
    errors = process.communicate()[1].decode()
    if process.returncode:
        raise RuntimeError(f"{command} failed: {errors[-2000:]}")
    return time.monotonic() - begun


def bulk(
    model: tyro.conf.Positional[Path],
    source: tyro.conf.Positional[Path],
    /,
    workers: int = 2,
    lines: int = 2048,
    rounds: int = 3,
) -> None:
    """Translate a file with and without Ray; print the overhead of Ray.

    Args:
        model: Folder of a trained model.
        source: Text to translate.
        workers: Workers of the example.
        lines: Lines of a part.
        rounds: How often both translate the file.
    """
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        short = folder / "short"
        short.write_text("".join(f"{line}\n" for line in read_lines(source)[: workers * lines]))
        outputs, seconds = {}, {}

        def run(system: str, source: Path, kill_after: float | None = None) -> float:
            outputs[system] = output = folder / "output"
            output.unlink(missing_ok=True)
            if system == "translate":
                taken = timed(translate_command(model, source, output))
            else:
                count = 1 if system == "one worker" else workers
                taken = timed(ray_command(model, source, output, count, lines), kill_after)
            outputs[system] = output.read_bytes()
            return taken

        systems = ("translate", "one worker", f"{workers} workers")
        for system in systems:  # discarded: they compile
            run(system, short)
        for _ in range(rounds):
            for system in systems:
                seconds.setdefault(system, []).append(run(system, source))
        killed = run("killed", source, kill_after=median(seconds[systems[2]]) / 2)
        count = outputs["translate"].count(b"\n")
        console.print(f"{count:,} lines, {processor()}, {os.cpu_count()} cores")
        for system in systems:
            pairs = zip(seconds[system], seconds["translate"], strict=True)
            overheads = sorted(100 * (mine / its - 1) for mine, its in pairs)
            same = "the same bytes" if outputs[system] == outputs["translate"] else "OTHER BYTES"
            console.print(
                f"{system}: {median(seconds[system]):.1f} s, {overheads[0]:+.0f} % - "
                f"{median(overheads):+.0f} % - {overheads[-1]:+.0f} %, {same}"
            )
        same = "the same bytes" if outputs["killed"] == outputs["translate"] else "OTHER BYTES"
        console.print(f"{workers} workers, one killed in the middle: {killed:.1f} s, {same}")


class Load(NamedTuple):
    """What clients saw."""

    seconds: list[float]  # of each answer with status 200
    statuses: Counter[int]  # of all answers; 0 for a broken connection, -1 for none in time
    wrong: int  # answers that differ from `translate`
    moments: list[float]  # when each of `seconds` ended, as time.monotonic()


async def load(
    url: str, expected: dict[str, str], clients: int, seconds: float, **languages: str
) -> Load:
    """Let clients ask one question after the other for some seconds; each names the languages."""
    import aiohttp

    found = Load([], Counter(), 0, [])
    wrong = 0
    end = time.monotonic() + seconds

    async def client(session: aiohttp.ClientSession, chosen: random.Random) -> None:
        nonlocal wrong
        lines = list(expected)
        while (begun := time.monotonic()) < end:
            line = chosen.choice(lines)
            fields = {"q": line, **languages}
            try:
                async with session.post(f"{url}/translate", json=fields) as response:
                    status, content = response.status, await response.read()
            except TimeoutError:
                status = -1
            except aiohttp.ClientError:
                status = 0
            found.statuses[status] += 1
            if status == 200:
                found.seconds.append(time.monotonic() - begun)
                found.moments.append(time.monotonic())
                wrong += json.loads(content)["translatedText"] != expected[line]

    limits = {"connector": aiohttp.TCPConnector(limit=0)}
    limits["timeout"] = aiohttp.ClientTimeout(total=LONGEST_WAIT)
    async with aiohttp.ClientSession(**limits) as session:
        await asyncio.gather(*(client(session, random.Random(i)) for i in range(clients)))
    return found._replace(wrong=wrong)


async def load_and_kill(
    url: str, expected: dict[str, str], clients: int, seconds: float
) -> tuple[Load, float]:
    """Return what clients saw while a replica was killed, and the moment of the kill."""
    running = asyncio.create_task(load(url, expected, clients, seconds, **LANGUAGES))
    await asyncio.sleep(seconds / 3)
    os.kill(random.choice(descendants(os.getpid(), REPLICA)), signal.SIGKILL)
    killed = time.monotonic()
    return await running, killed


def report(console: Console, found: Load) -> None:
    """Print what clients saw."""
    ordered = sorted(found.seconds)
    p50, p99 = (ordered[int(share * len(ordered))] for share in (0.5, 0.99))
    console.print(
        f"{len(ordered):,} answers, p50 {p50:.3f} s, p99 {p99:.3f} s, longest {ordered[-1]:.1f} s, "
        f"{found.wrong} wrong; by status {dict(found.statuses)}"
    )


def expected_of(model: Path, source: Path, folder: Path) -> dict[str, str]:
    """Return up to 2,000 different lines of a text, and what `translate` makes of them."""
    lines = list(dict.fromkeys(line for line in read_lines(source) if line.strip()))[:2000]
    (folder / "lines").write_text("".join(f"{line}\n" for line in lines))
    timed(translate_command(model, folder / "lines", folder / "translated"))
    return dict(zip(lines, read_lines(folder / "translated"), strict=True))


def alone(
    model: tyro.conf.Positional[Path],
    source: tyro.conf.Positional[Path],
    /,
    clients: int = 200,
    seconds: float = 60,
    port: int = 8322,
) -> None:
    """Serve a model by docs/examples/serve.py, without Ray, and ask by many clients at once.

    The arguments are those of `serve`. The first 10 seconds, which compile, are discarded.
    """
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as name:
        expected = expected_of(model, source, Path(name))
        command = [sys.executable, str(EXAMPLES / "serve.py"), str(model.absolute()), str(port)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            server.stdout.readline()
            for duration in (10, seconds):
                url = f"http://localhost:{port}"
                found = asyncio.run(load(url, expected, clients, duration))
        finally:
            server.kill()
        report(console, found)
        console.print(f"{len(found.seconds) / seconds:.0f} answers a second, {processor()}")


def serve(
    model: tyro.conf.Positional[Path],
    source: tyro.conf.Positional[Path],
    /,
    clients: int = 200,
    seconds: float = 60,
    replicas: int = 2,
    port: int = 8321,
) -> None:
    """Serve a model, and ask by many clients at once; then again while a replica is killed.

    Args:
        model: Folder of a trained model.
        source: Text whose lines, up to 2,000 different ones, the clients ask for.
        clients: Clients; each asks again when it has an answer.
        seconds: How long they ask, each time.
        replicas: Processes that hold the model.
        port: Port of the server on loopback.
    """
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = expected_of(model, source, folder)
        # Whatever is compiled is kept there, so that its files are counted.
        (folder / "programs").mkdir()
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "programs")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        sys.path.insert(0, str(EXAMPLES))
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (EXAMPLES, ROOT)))  # of the replicas
        import ray
        import ray_serve
        from ray import serve

        ray.init(log_to_driver=False)
        begun = time.monotonic()
        serve.start(http_options={"port": port, "request_timeout_s": LONGEST_WAIT})
        deployment = ray_serve.LibreTranslate.options(num_replicas=replicas)
        serve.run(deployment.bind(str(model.absolute()), "en", "de"))
        programs = len(list((folder / "programs").iterdir()))
        console.print(
            f"{replicas} replicas ready after {time.monotonic() - begun:.0f} s, {programs} programs"
        )
        url = f"http://127.0.0.1:{port}"
        found = asyncio.run(load(url, expected, clients, seconds, **LANGUAGES))
        report(console, found)
        compiled = len(list((folder / "programs").iterdir())) - programs
        rate = len(found.seconds) / seconds
        console.print(f"{rate:.0f} answers a second; {compiled} programs compiled under load")
        found, killed = asyncio.run(load_and_kill(url, expected, clients, seconds))
        report(console, found)
        after = min(moment for moment in found.moments if moment > killed)
        console.print(f"a replica was killed; the next answer came {after - killed:.2f} s later")
        console.print(f"{clients} clients, {processor()}, {os.cpu_count()} cores")
        serve.shutdown()


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"bulk": bulk, "serve": serve, "alone": alone})
