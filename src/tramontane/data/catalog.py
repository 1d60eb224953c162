"""Public datasets by short name: their location, and how their rows become problems.

`data.train: polaris` reads the hub's dataset, `polaris@FILE` a local file with the same layout. A
config can add its own sets in `data.sets`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tramontane.config import NamedSetConfig
from tramontane.data.bfcl import bfcl, bfcl_rows
from tramontane.data.files import read_rows
from tramontane.data.layouts import LAYOUTS, converted, verl

logger = logging.getLogger("tramontane")


def _known(
    source: str, split: str = "train", *, layout: str | None = None, **fields: str
) -> NamedSetConfig:
    return NamedSetConfig(source=source, split=split, layout=layout, fields=fields)


_BFCL = "gorilla-llm/Berkeley-Function-Calling-Leaderboard#BFCL_v3"

CATALOG: dict[str, NamedSetConfig] = {
    # For training: mathematics.
    "polaris": _known("POLARIS-Project/Polaris-Dataset-53K"),
    "deepscaler": _known("agentica-org/DeepScaleR-Preview-Dataset"),
    "big_math": _known("SynthLabsAI/Big-Math-RL-Verified", layout="big_math"),
    "dapo": _known("BytedTsinghua-SIA/DAPO-Math-17k", layout="verl"),
    "skywork": _known("Skywork/Skywork-OR1-RL-Data", "math", layout="verl"),
    "deepmath": _known("zwhe99/DeepMath-103K", problem="question", answer="final_answer"),
    "openr1": _known("open-r1/OpenR1-Math-220k"),
    "numina": _known("AI-MO/NuminaMath-1.5", layout="numina"),
    "intellect3": _known("PrimeIntellect/INTELLECT-3-RL#math", layout="intellect3"),
    # Mixed: rows of mathematics and of programs.
    "dolci": _known("allenai/Dolci-Think-RL-7B", layout="dolci"),
    # Programs.
    "skywork_code": _known("Skywork/Skywork-OR1-RL-Data", "code", layout="verl"),
    "intellect3_code": _known("PrimeIntellect/INTELLECT-3-RL#code", layout="intellect3"),
    "deepcoder": _known("agentica-org/DeepCoder-Preview-Dataset#primeintellect"),
    "deepcoder_taco": _known("agentica-org/DeepCoder-Preview-Dataset#taco"),
    "deepcoder_lcb": _known("agentica-org/DeepCoder-Preview-Dataset#lcbv5", layout="deepcoder_lcb"),
    # For evaluation.
    "aime24": _known("HuggingFaceH4/aime_2024"),
    "aime25": _known("MathArena/aime_2025"),
    "aime26": _known("MathArena/aime_2026"),
    "math500": _known("HuggingFaceH4/MATH-500", "test"),
    "gsm8k": _known("openai/gsm8k#main", "test"),
    "olympiadbench": _known("Hothan/OlympiadBench#OE_TO_maths_en_COMP", layout="olympiadbench"),
    "gpqa": _known("Idavidrein/gpqa#gpqa_diamond", layout="gpqa"),
    # With images. Rows of all subjects of MMMU/MMMU are in one subset there.
    "mmmu": _known("lmms-lab-encoder/MMMU", "validation", layout="mmmu"),
    "mmmu_pro": _known("MMMU/MMMU_Pro#standard (10 options)", "test", layout="mmmu"),
    "mmmu_pro_vision": _known("MMMU/MMMU_Pro#vision", "test", layout="mmmu_pro_vision"),
    "mathvista": _known("AI4Math/MathVista", "testmini", layout="mathvista"),
    "livecodebench_v5": _known(
        "lighteval/code_generation_lite#release_v5", "test", layout="livecodebench"
    ),
    "livecodebench_v6": _known(
        "lighteval/code_generation_lite#release_v6", "test", layout="livecodebench"
    ),
    "humaneval": _known("openai/openai_humaneval", "test", layout="humaneval"),
    "mbpp": _known("google-research-datasets/mbpp#sanitized", "test", layout="mbpp"),
    # Other abilities: instructions and function calls.
    "ifeval": _known("google/IFEval", layout="ifeval"),
    "ifeval_loose": _known("google/IFEval", layout="ifeval_loose"),
    "bfcl_simple": _known(f"{_BFCL}_simple.json", layout="bfcl"),
    "bfcl_multiple": _known(f"{_BFCL}_multiple.json", layout="bfcl"),
    "bfcl_parallel": _known(f"{_BFCL}_parallel.json", layout="bfcl"),
    "bfcl_parallel_multiple": _known(f"{_BFCL}_parallel_multiple.json", layout="bfcl"),
}


class NamedSource(NamedTuple):
    """A source with a name in the catalog."""

    name: str  # the short name
    source: str  # file or dataset that the rows are read from
    entry: NamedSetConfig  # split, columns and layout


def named_source(source: str, sets: Mapping[str, NamedSetConfig]) -> NamedSource | None:
    """The entry for `NAME` or `NAME@FILE`; None for a source without such a name.

    Args:
        source: as in `data.train`.
        sets: the config's entries (`data.sets`), which take precedence over the catalog's.
    """
    name, _, file = source.partition("@")
    entry = sets.get(name) or CATALOG.get(name)
    return NamedSource(name, file or entry.source, entry) if entry else None


def problem_rows(found: NamedSource) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a named source in the fields of docs/data.md, each with its location.

    Rows that the layout rejects are skipped, and so are repeated rows of verl's training files:
    DAPO's file holds each problem about a hundred times. A warning counts both.

    Raises:
        InputError: no such file or dataset, a damaged file, or a row with a different layout.
    """
    layout = LAYOUTS[found.entry.layout] if found.entry.layout else None
    seen: set[int] = set()
    repeated = rejected = 0
    rows = bfcl_rows(found.source) if layout is bfcl else read_rows(found.source, found.entry.split)
    for where, row in rows:
        problem = converted(layout, row, where) if layout else row
        if problem is None:
            rejected += 1
            continue
        if layout is verl:
            key = hash(str([problem.get(name) for name in ("problem", "answer", "tests")]))
            if key in seen:
                repeated += 1
                continue
            seen.add(key)
        yield where, problem
    if rejected:
        logger.warning("%s: rows skipped that cannot be graded: %d", found.name, rejected)
    if repeated:
        logger.warning(
            "%s: rows skipped that repeat the statement and reference of another: %d",
            found.name, repeated,
        )  # fmt: skip
