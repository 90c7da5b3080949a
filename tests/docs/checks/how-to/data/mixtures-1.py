import pathlib, re

page = (pathlib.Path(__import__("fastload").__file__).parents[1] / "docs/how-to/data/mixtures.md").read_text()
assert str(mixture.ledger()) in page, mixture.ledger()
