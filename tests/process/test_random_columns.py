"""Random tables as columns, against what pyarrow says of their rows.

The long form has 10,000: `python -m pytest -m stress tests/process/test_random_columns.py`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import fastload
from fastload import Jagged, ParquetDataset

NUMBERS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64(), pa.bool_()),
]


def number_of(draw: random.Random, kind: Any) -> Any:
    if pa.types.is_boolean(kind):
        return draw.random() < 0.5
    if pa.types.is_floating(kind):
        return np.dtype(kind.to_pandas_dtype()).type(
            draw.choice([0.0, -1.5, 7.25, float("inf"), draw.randrange(500)])
        )
    info = np.iinfo(kind.to_pandas_dtype())
    return draw.choice([0, 1, int(info.min), min(int(info.max), 2**63 - 1), draw.randrange(100)])


class Column:
    """A column of random values, in which a value is missing now and then."""

    def __init__(self, draw: random.Random, rows: int) -> None:
        self.inner = draw.choice(NUMBERS)
        self.form = draw.choice(
            ["number", "number", "text", "bytes", "fixed", "square", "list", "large", "boxes"]
        )
        self.holes = draw.choice([0, 0, 0, 0.05])
        self.draw = draw
        values = [self.value() for _ in range(rows)]
        self.array = pa.array(values, self.kind())
        if self.form in ("number", "text") and draw.random() < 0.2 and self.inner != pa.float16():
            self.array = self.array.dictionary_encode()
        self.bad = [self.form not in ("text", "bytes") and has_hole(value) for value in values]
        self.values = values

    def kind(self) -> Any:
        square = pa.list_(self.inner, 2)
        return {
            "number": self.inner,
            "text": pa.string(),
            "bytes": pa.binary(),
            "fixed": pa.list_(self.inner, 3),
            "square": pa.list_(square, 2),
            "list": pa.list_(self.inner),
            "large": pa.large_list(self.inner),
            "boxes": pa.list_(square),
        }[self.form]

    def value(self) -> Any:
        length = self.draw.randrange(4)
        pair = lambda: self.maybe([self.maybe(self.number()) for _ in range(2)])  # noqa: E731
        return self.maybe(
            {
                "number": self.number,
                "text": lambda: "é" * length,
                "bytes": lambda: b"\0" * length,
                "fixed": lambda: [self.maybe(self.number()) for _ in range(3)],
                "square": lambda: [pair(), pair()],
                "list": lambda: [self.maybe(self.number()) for _ in range(length)],
                "large": lambda: [self.maybe(self.number()) for _ in range(length)],
                "boxes": lambda: [pair() for _ in range(length)],
            }[self.form]()
        )

    def number(self) -> Any:
        return number_of(self.draw, self.inner)

    def maybe(self, value: Any) -> Any:
        return None if self.draw.random() < self.holes else value

    def check(self, column: Any, rows: list[int]) -> None:
        """Compare a column of a batch with these rows."""
        wanted = [self.values[row] for row in rows]
        if self.form in ("text", "bytes"):
            assert column == wanted
        elif self.form == "number":
            assert column.dtype == torch.utils.data.default_collate([self.plain(wanted[0])]).dtype
            assert torch.equal(
                column, torch.tensor([self.plain(value) for value in wanted], dtype=column.dtype)
            )
        elif self.form in ("fixed", "square"):
            assert torch.equal(column, self.tensor(wanted))
        else:
            assert (
                type(column) is Jagged
                and column.offsets.tolist() == np.cumsum([0, *map(len, wanted)]).tolist()
            )
            shape = (0, 2) if self.form == "boxes" else (0,)
            items = [item for value in wanted for item in value]
            assert torch.equal(column.values, self.tensor(items).reshape(len(items), *shape[1:]))

    def plain(self, value: Any) -> Any:
        return value.item() if isinstance(value, np.generic) else value

    def tensor(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(values, self.inner.to_pandas_dtype()))


def has_hole(value: Any) -> bool:
    return value is None or (isinstance(value, list) and any(map(has_hole, value)))


def run_case(seed: int, folder: Path) -> None:
    draw = random.Random(seed)
    rows = draw.randrange(1, 40)
    columns = {f"c{number}": Column(draw, rows) for number in range(draw.randrange(1, 6))}
    path = folder / f"{seed}.parquet"
    table = pa.table({name: column.array for name, column in columns.items()})
    pq.write_table(
        table, path, row_group_size=draw.randrange(1, 15), compression=draw.choice(["none", "zstd"])
    )
    bad = {row for row in range(rows) if any(column.bad[row] for column in columns.values())}
    order = [draw.randrange(rows) for _ in range(draw.randrange(1, 60))]
    batch_size = draw.randrange(1, 20)
    cache = folder / f"{seed}-cache" if draw.random() < 0.1 else None
    dataset = ParquetDataset(path, batches="columns", cache=cache)
    loader = fastload.DataLoader(dataset, batch_size, sampler=order, on_error="repeat")
    batches, start = iter(loader), 0
    while start < len(order):
        asked = order[start : start + batch_size]
        start += batch_size
        good = [place for place, row in enumerate(asked) if row not in bad]
        if not good:
            with pytest.raises(fastload.errors.DecodeError):
                next(batches)
            continue
        made = next(batches)
        used = [row if row not in bad else asked[good[place % len(good)]] for place, row in enumerate(asked)]
        for name, column in columns.items():
            column.check(made[name], used)
    assert next(batches, None) is None
    dataset.close()
    path.unlink()


def run_cases(seeds: range, folder: Path) -> None:
    for seed in seeds:
        try:
            run_case(seed, folder)
        except BaseException as error:
            error.add_note(f"(case {seed})")
            raise


def test_random_tables(tmp_path: Path) -> None:
    run_cases(range(30), tmp_path)


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_many_random_tables(tmp_path: Path) -> None:
    run_cases(range(30, 10_000), tmp_path)
