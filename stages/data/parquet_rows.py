"""Read Parquet a few rows at a time, and refuse a file that was made to fill the memory.

A column of equal values takes a few bytes however many rows it has. So where texts could take too many, they are read as indices
into a dictionary, and the bytes of a row are counted before it is decoded. Not polars' reader: it decodes whole row groups, and
panics.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from stages.data.json_lines import MAX_ROW_BYTES

VALUE_BYTES = 64  # of a value at least, as Python has it


class ParquetSizeError(ValueError):
    """A file whose rows take too many bytes once they are decoded."""


def read_tables(path: Path, most_bytes: int, chunk_bytes: int, chunk_rows: int) -> Iterator[pl.DataFrame]:
    """Yield the rows as tables of about `chunk_bytes` and at most `chunk_rows`.

    Raises:
        ParquetSizeError: for more than `most_bytes` in all, or MAX_ROW_BYTES of one row.
    """
    import pyarrow as pa  # takes 0.25 s, and most data is JSON
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(path)
    columns = [
        metadata.row_group(g).column(c) for g in range(metadata.num_row_groups) for c in range(metadata.num_columns)
    ]
    stored = sum(column.total_uncompressed_size for column in columns)
    values = max(metadata.num_rows, sum(column.num_values for column in columns))
    if stored > MAX_ROW_BYTES * metadata.num_rows or max(stored, VALUE_BYTES * values) > most_bytes:
        raise ParquetSizeError
    read_rows = max(1, min(chunk_rows, chunk_bytes * metadata.num_rows // max(stored, 1)))  # a row may contain an image
    texts = _find_long_dictionaries(path, metadata, most_bytes - stored)
    left, waiting, size = most_bytes, list[Any](), 0
    with pq.ParquetFile(path, read_dictionary=texts) as file:
        for batch in file.iter_batches(batch_size=read_rows):
            decoded = _measure(batch.to_struct_array())
            rows = max(1, batch.num_rows * chunk_bytes // max(decoded, 1))
            for first in range(0, batch.num_rows, rows):
                part = batch.slice(first, rows)
                own = decoded if rows >= batch.num_rows else _measure(part.to_struct_array())
                left -= own
                if left < 0 or own > MAX_ROW_BYTES:
                    raise ParquetSizeError
                schema = pa.schema([field.with_type(_decode_type(field.type)) for field in part.schema])
                waiting.append(part.cast(schema))
                # Polars takes bytes that are no UTF-8, and fails where they are written.
                waiting[-1].validate(full=True)
                size += own
                if size >= chunk_bytes or sum(one.num_rows for one in waiting) + read_rows > chunk_rows:
                    yield pl.DataFrame(pl.from_arrow(pa.Table.from_batches(waiting)))
                    waiting, size = [], 0
    if waiting:
        yield pl.DataFrame(pl.from_arrow(pa.Table.from_batches(waiting)))


def _find_long_dictionaries(path: Path, metadata: Any, most_bytes: int) -> list[str]:
    """Return the text columns to read as indices, which takes ten times as long: none where all values fit `most_bytes`.

    A value is at most the longest of its dictionary, which the first row of a group comes with.
    """
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    texts, bound = set[str](), 0
    for group, index in itertools.product(range(metadata.num_row_groups), range(metadata.num_columns)):
        column = metadata.row_group(group).column(index)
        if column.physical_type != "BYTE_ARRAY" or not any("DICTIONARY" in encoding for encoding in column.encodings):
            continue
        name = column.path_in_schema
        texts.add(name)
        with pq.ParquetFile(path, read_dictionary=[name]) as file:
            for batch in itertools.islice(file.iter_batches(1, [group], [name]), 1):
                array = batch.column(0)
                while not hasattr(array, "dictionary"):
                    array = array.flatten() if hasattr(array, "value_lengths") else array.flatten()[0]
                bound += column.num_values * int(pc.max(pc.binary_length(array.dictionary)).as_py() or 0)
    return sorted(texts) if bound > most_bytes else []


def _measure(array: Any) -> int:
    """Return the bytes of an Arrow array once its dictionaries are decoded."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_dictionary(kind):
        lengths = pc.take(pc.binary_length(array.dictionary), array.indices)
        return VALUE_BYTES * len(array) + int(pc.sum(lengths.cast(pa.int64())).as_py() or 0)
    if pa.types.is_struct(kind):
        return VALUE_BYTES * len(array) + sum(map(_measure, array.flatten()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return VALUE_BYTES * len(array) + _measure(array.flatten())
    return VALUE_BYTES * len(array) + int(array.nbytes)


def _decode_type(kind: Any) -> Any:
    """Return an Arrow type with the types of values in place of dictionaries."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_decode_type(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return (pa.list_ if pa.types.is_list(kind) else pa.large_list)(_decode_type(kind.value_type))
    return kind
