"""Fuzz the parsers, coverage-guided: `make fuzz`, or `python -m fuzz --seconds 600 [TARGET …]`.

Each target runs in its own process (libFuzzer, through atheris) for its share of the time. Its
corpus stays in build/fuzz/TARGET, and the next run starts from it. An input that breaks a check, or
takes too long, is a finding: it is written to build/fuzz/findings, one for each place in the code,
and the run continues. The exit code is 1 if there are findings.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path

from fuzz.vocabulary import TOKENS

BUILD = Path("build/fuzz")
FINDINGS = BUILD / "findings"
MAX_BYTES = 8000
HANG_SECONDS = 60  # wall-clock limit; Python code stops at its target's own limit
MEMORY_MB = 512
RESTARTS = 20  # restarts of a target after findings that end its process


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("--seconds", type=int, default=3600, help="for all targets together")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("targets", nargs="*", help="all of them by default")
    args = parser.parse_args()
    if args.child:
        fuzz(args.targets[0], args.seconds)
    from fuzz.parsers import TARGETS

    shutil.rmtree(FINDINGS, ignore_errors=True)
    FINDINGS.mkdir(parents=True)
    names = args.targets or list(TARGETS)
    shares = sum(TARGETS[name].share for name in names)
    print(f"{'target':12}{'seconds':>8}{'executions':>12}{'edges':>8}{'corpus':>8}"
          f"{'slowest s':>11}{'findings':>10}")  # fmt: skip
    for name in names:
        supervise(name, args.seconds * TARGETS[name].share / shares)
    found = sorted(FINDINGS.glob("*.txt"))
    for path in found:
        print(f"\n{path}\n{path.read_text()}")
    return 1 if found else 0


def supervise(name: str, seconds: float) -> None:
    """Run one target, restart it after an input that ends its process, and print its line."""
    log, corpus = BUILD / f"{name}.log", BUILD / name
    corpus.mkdir(parents=True, exist_ok=True)
    started, executions, edges = time.monotonic(), 0, "0"
    (BUILD / f"{name}.slowest").unlink(missing_ok=True)
    for _ in range(RESTARTS):
        remaining = seconds - (time.monotonic() - started)
        if remaining < 1:
            break
        command = [sys.executable, "-m", "fuzz", "--child", name, "--seconds", str(int(remaining))]
        with log.open("w") as out:
            status = subprocess.run(command, stdout=out, stderr=out).returncode
        text = log.read_text(errors="replace")
        executions += int((re.findall(r"number_of_executed_units: (\d+)", text) or ["0"])[-1])
        edges = (re.findall(r"cov: (\d+)", text) or ["0"])[-1]
        if status == 0:
            break
        tail = "\n".join(text.splitlines()[-60:])
        ended_by = list(BUILD.glob(f"{name}-*-*"))  # libFuzzer's own: crash-, timeout-, oom-HASH
        for path in ended_by:
            record(path.name.rpartition("-")[0], path.read_bytes(), tail, path.name)
            path.unlink()
        if not ended_by:
            record(f"{name}-ended", b"", f"the process ended with status {status}\n{tail}", tail)
            break
    slowest = BUILD / f"{name}.slowest"
    longest = slowest.read_text().partition(" ")[0] if slowest.exists() else "0.00"
    findings = len(list(FINDINGS.glob(f"{name}-*.txt")))
    kept = len(list(corpus.iterdir()))
    print(f"{name:12}{time.monotonic() - started:8.0f}{executions:12,}{edges:>8}{kept:8}"
          f"{longest:>11}{findings:10}", flush=True)  # fmt: skip


def record(name: str, data: bytes, what: str, place: str) -> None:
    """Keep the first input for each place in the code, or a later one if it is shorter."""
    key = hashlib.sha256(place.encode()).hexdigest()[:8]
    kept = FINDINGS / f"{name}-{key}.input"
    if not kept.exists() or len(data) < kept.stat().st_size:
        kept.write_bytes(data)
        text = data.decode(errors="replace")
        (FINDINGS / f"{name}-{key}.txt").write_text(
            f"{text[:300]!r}\n{what}\n", encoding="utf-8", errors="replace"
        )


def fuzz(name: str, seconds: int) -> None:
    """Run one target in this process, which libFuzzer's loop ends."""
    import atheris

    with atheris.instrument_imports(include=["tramontane", "math_verify"]):
        from fuzz.parsers import TARGETS, Late, run
        from tramontane.verifier import language, math
    math.warm_up()
    language.warm_up()
    target = TARGETS[name]
    slowest = 0.05

    def check(data: bytes) -> None:
        nonlocal slowest
        text = data.decode(errors="replace")
        started = time.process_time()
        try:
            run(target, text)
        except (Exception, Late) as error:
            frames = traceback.extract_tb(error.__traceback__)
            known = ("/tramontane/", "parsers.py")
            shown = [f for f in frames if any(part in f.filename for part in known)]
            place = " ".join(f"{f.name}:{f.lineno}" for f in shown)
            what = f"{type(error).__name__} {'' if isinstance(error, Late) else place}"
            record(name, data, traceback.format_exc(limit=-8), what)
        took = time.process_time() - started
        if took > slowest:
            slowest = took
            (BUILD / f"{name}.slowest").write_text(f"{took:.2f} {text!r}\n", errors="replace")

    corpus = BUILD / name
    for seed in target.seeds:
        data = seed.encode()
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
    words = BUILD / "tokens.dict"
    escaped = ("".join(map("\\x{:02x}".format, token.encode())) for token in TOKENS)
    words.write_text("".join(f'"{token}"\n' for token in escaped))
    options = [
        f"-max_total_time={seconds}", f"-max_len={MAX_BYTES}", f"-dict={words}",
        f"-timeout={HANG_SECONDS}", f"-rss_limit_mb={MEMORY_MB}", "-print_final_stats=1",
        f"-artifact_prefix={BUILD}/{name}-", "-reload=0", "-len_control=20", str(corpus),
    ]  # fmt: skip
    atheris.Setup(["fuzz", *options], check, custom_mutator=mutate)
    atheris.Fuzz()


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Half of the time insert, cut, repeat or wrap tokens; else mutate as libFuzzer does."""
    import atheris

    draw = random.Random(seed)
    if draw.random() < 0.5:
        return atheris.Mutate(data, len(data))
    for _ in range(draw.randint(1, 4)):
        a, b = sorted(draw.randint(0, len(data)) for _ in range(2))
        token = draw.choice(TOKENS).encode()
        data = draw.choice([
            data[:a] + token + data[a:],
            data[:a] + token + data[b:],
            data[:a] + data[b:],
            data[:b] + data[a:b] * draw.randint(1, 9) + data[b:],
            data[:a] + b"{" + data[a:b] + b"}" + data[b:],
        ])  # fmt: skip
    return data[:max_size]


if __name__ == "__main__":
    sys.exit(main())
