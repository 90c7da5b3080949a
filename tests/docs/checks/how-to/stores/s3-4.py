import os
from pathlib import Path

folder = Path.home() / ".aws"
folder.mkdir()
(folder / "credentials").write_text(
    f"[research]\naws_access_key_id={os.environ['AWS_ACCESS_KEY_ID']}\n"
    f"aws_secret_access_key={os.environ['AWS_SECRET_ACCESS_KEY']}\n"
)
