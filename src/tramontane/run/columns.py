"""Sampled tokens as columns of Parquet files, for rollouts and checkpoints.

Each row is a sequence: `token_ids` (list of int32), `logprobs` (list of float32), and
`version_spans`, the weights versions of the tokens as run lengths: a list of (version, tokens).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tramontane.errors import InputError
from tramontane.tokens import SampledTokens, floats, ints

Row = dict[str, Any]
SPAN = pa.struct([("version", pa.int32()), ("tokens", pa.int32())])
TOKEN_FIELDS = [
    pa.field("token_ids", pa.list_(pa.int32())),
    pa.field("logprobs", pa.list_(pa.float32())),
    pa.field("version_spans", pa.list_(SPAN)),
]
ROWS_READ = 64  # rows held in memory while a file is read


def warm_up() -> None:
    """Do the first conversion, which imports pandas if installed. During a run it would block every
    thread for 0.3 s."""
    pa.array([0])


def token_columns(sampled: Sequence[SampledTokens]) -> list[pa.Array]:
    """The columns of `TOKEN_FIELDS`, one row per sequence."""
    lengths = np.array([len(s.token_ids) for s in sampled], dtype=np.int64)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    versions = _flat([s.versions for s in sampled], np.int32)
    # A span begins where the version changes, and at the start of each sequence.
    begins = np.ones(len(versions), dtype=bool)
    begins[1:] = versions[1:] != versions[:-1]
    begins[ends[:-1][lengths > 0]] = True
    places = np.flatnonzero(begins)
    tokens = np.diff(np.append(places, len(versions)))
    spans = pa.StructArray.from_arrays(
        [pa.array(versions[places]), pa.array(tokens, pa.int32())], fields=[*SPAN]
    )
    return [
        _lists(ends, pa.array(_flat([s.token_ids for s in sampled], np.int32))),
        _lists(ends, pa.array(_flat([s.logprobs for s in sampled], np.float32))),
        _lists(np.searchsorted(places, ends), spans),
    ]


def _flat(columns: Sequence[Any], dtype: type) -> NDArray[Any]:
    # Copies, since an array with a shared buffer cannot grow.
    return np.concatenate([np.array([], dtype), *(np.array(c, dtype) for c in columns)])


def _lists(ends: NDArray[np.int64], values: pa.Array) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values)


def versions_of(spans: Sequence[Row]) -> list[int]:
    """The version of each token, from a row's `version_spans`."""
    return [span["version"] for span in spans for _ in range(span["tokens"])]


def sampled_of(row: Row) -> dict[str, Any]:
    """The fields of `SampledTokens`, from a row with the columns of `TOKEN_FIELDS`."""
    return {
        "token_ids": ints(row["token_ids"]),
        "logprobs": floats(row["logprobs"]),
        "versions": ints(versions_of(row["version_spans"])),
    }


def writer(file: IO[bytes], schema: pa.Schema) -> pq.ParquetWriter:
    """A writer whose pages are compressed and carry checksums.

    No min/max statistics for tokens and text: nothing queries them, and they cost a third of the
    write.
    """
    tokens = {field.name for field in TOKEN_FIELDS} | {"log_ratios"}
    different = {*tokens, "text", "reward", "advantage"}  # hardly any value occurs twice
    return pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        use_dictionary=[name for name in schema.names if name not in different]
        + ["version_spans.list.element.version"],
        write_statistics=[name for name in schema.names if name not in {*tokens, "text"}],
        write_page_checksum=True,
    )


def read_rows(file: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """The rows of a Parquet file, of all columns or of some.

    Raises:
        InputError: the file is truncated or damaged.
    """
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
            for batch in parquet.iter_batches(ROWS_READ, columns=columns):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file}: not a whole Parquet file ({error})") from None
