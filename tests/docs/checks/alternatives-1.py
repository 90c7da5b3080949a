import json
from pathlib import Path

from bench.show.figures import find, median, number, rows_of
from bench.show.report import newest

page = Path(PAGE).read_text()
document = json.loads(newest().read_text())
assert document["date"][:10] in page
FIGURES = {
    ("cold", "20 ms", "rates", 1): "fastload|s3torchconnector|torch + boto3|Grain + boto3|SPDL + boto3",
    ("cold", "100 ms", "rates", 1): "fastload|s3torchconnector",
    ("cold", "20 ms", "pss_bytes", 1000000.0): "fastload|Grain + boto3|SPDL + boto3",
    ("later", "raw", "rates", 1): "fastload|torchvision ImageFolder|DALI (CPU operators)|tf.data|Grain|SPDL",
    ("later", "raw", "pss_bytes", 1000000.0): "fastload|Grain|DALI (CPU operators)",
}
for (section, case, key, divisor), names in FIGURES.items():
    for name in names.split("|"):
        row = find(rows_of(document, section, case), name)
        shown = number(median(row[key]) / divisor)
        assert f"{shown}" in page.split("run first")[0], (section, case, name, key, shown)
