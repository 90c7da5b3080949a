from pathlib import Path

import fastload

Path("ca.pem").write_text("a certificate")
