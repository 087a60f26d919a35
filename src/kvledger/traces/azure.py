"""Reader of the Azure LLM inference traces of 2023 and 2024: CSV, one request a line, without any content.

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:17:03.9799600,4808,10
    2024-05-10 00:00:00.009930+00:00,2162,5

There are no hash ids, so every prompt is unique: such a trace measures load, never sharing.
"""

from collections.abc import Mapping

from kvledger.traces.clock import iso_seconds
from kvledger.traces.csv_rows import CsvReader
from kvledger.traces.first_record import FirstRecord
from kvledger.traces.trace_request import TraceRequest


class AzureReader(CsvReader):
    name = "azure"
    mark = "the header TIMESTAMP,ContextTokens,GeneratedTokens"
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    time_column = "TIMESTAMP"

    @staticmethod
    def recognises(first: FirstRecord) -> bool:
        return first.columns == AzureReader.columns

    def request(self, row: Mapping[str, str]) -> TraceRequest | None:
        seconds = iso_seconds(row["TIMESTAMP"])
        if seconds is None:
            self.lines.bad("TIMESTAMP", f"expected a time like 2023-11-16 18:17:03.97, got {row['TIMESTAMP'][:40]}")
            return None
        num_prompt = self.count(row, "ContextTokens", 1)
        num_output = self.count(row, "GeneratedTokens", 0) if num_prompt is not None else None
        if num_prompt is None or num_output is None:
            return None
        return TraceRequest(seconds, num_prompt, max(1, num_output), [], 0)
