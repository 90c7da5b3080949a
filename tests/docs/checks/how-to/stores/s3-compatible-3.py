from pathlib import Path

Path("ca.pem").write_text("a certificate")
