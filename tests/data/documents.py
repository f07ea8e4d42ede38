"""Writes files of documents."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
from array_record.python.array_record_module import ArrayRecordWriter

from manualpar.data.document_files import SUFFIXES

DOCUMENTS = [f"{i} \u00e9\u4e2d " + "x\n" * (i * 7 % 40) for i in range(60)]


def write_documents(directory, source: str, documents=DOCUMENTS, field: str = "text") -> str:
    """Writes documents, texts or lists of tokens, into a file of a source."""
    path = str(directory / f"documents{SUFFIXES[source][0]}")
    if source == "jsonl":
        with open(path, "w") as file:
            for number, document in enumerate(documents):
                ends = "\r\n" if number % 3 else "\n\n"
                ascii_only = bool(number % 2)
                file.write(json.dumps({"a": 1, field: document}, ensure_ascii=ascii_only) + ends)
    elif source == "parquet":
        table = pyarrow.table({"a": range(len(documents)), field: documents})
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    else:
        writer = ArrayRecordWriter(path, "group_size:4")
        for document in documents:
            writer.write(
                document.encode()
                if isinstance(document, str)
                else np.array(document, "<u2").tobytes()
            )
        writer.close()
    return path
