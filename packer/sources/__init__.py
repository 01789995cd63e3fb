"""Examples in: files, folders and globs to batches of rows, in an order that only the source decides.

    resolve_inputs   paths to input files, identified by content; what was ignored
    detect_format    which fields of the records are which; watch_of: what no later record may hold then
    index_input      one pass a file: counts records, finds where reading can begin, spools what cannot seek
    cut              partitions, a pure function of the indexes and the seed
    read_partition   batches of rows in stream order; every record is a row or a RowError

and, of a packed dataset that is packed anew:

    resolve_packed   dataset://ID to an input, and what made it
    read_segments    the segments of a partition, in the place of read_partition

What is a record: a line of .jsonl (\\n alone ends it; blank lines are none), an element of a .json array
(a .json file of one object a line is read as .jsonl), a row of .csv (values are text) or of a table, and
a whole .txt file. A record is at most 256 MiB (values.MAX_ROW_BYTES); a compressed file unpacks to at
most 256 GiB (values.MAX_UNPACKED_BYTES).

Errors: SourceError (a ValueError) for an input that cannot be read: permanent. A record that cannot be
read is no exception but a RowError. StoreError (packer.store) where the store cannot be written.
"""

from packer.sources.detect import detect_format
from packer.sources.files import resolve_inputs
from packer.sources.index import index_input
from packer.sources.packed import PackedSource, is_packed, names_dataset, resolve_packed
from packer.sources.partitions import cut, num_examples
from packer.sources.read import read_partition
from packer.sources.segments import Segments, first_segments, read_segments, segment_masks, segment_table
from packer.sources.values import (
    FileIndex,
    Location,
    Partition,
    RecordFile,
    Records,
    RowError,
    SourceError,
    Span,
)
from packer.sources.watch import watch_of

__all__ = [
    "FileIndex",
    "Location",
    "PackedSource",
    "Partition",
    "RecordFile",
    "Records",
    "RowError",
    "Segments",
    "SourceError",
    "Span",
    "cut",
    "detect_format",
    "first_segments",
    "index_input",
    "is_packed",
    "names_dataset",
    "num_examples",
    "read_partition",
    "read_segments",
    "resolve_inputs",
    "resolve_packed",
    "segment_masks",
    "segment_table",
    "watch_of",
]
