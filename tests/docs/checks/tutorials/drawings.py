from pathlib import Path

from tests.docs.pages import blocks

(drawings,) = [
    block.code for block in blocks(Path(PAGE).with_name("first-batch.md")) if "store.write(" in block.code
]
exec(drawings)
