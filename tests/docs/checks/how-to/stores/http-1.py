import subprocess
import sys
import time
import urllib.request
from multiprocessing.util import Finalize
from pathlib import Path

import fastload
from tests.ports import free_port

Path("www").mkdir()
shards = fastload.open_store("s3://bucket/shards")
for page in shards.list():
    for info in page:
        (Path("www") / info.key).write_bytes(bytes(shards.read(info.key)))
port = free_port()
serve = [sys.executable, "-m", "http.server", str(port), "-b", "127.0.0.1", "-d", "www"]
server = subprocess.Popen(serve, stderr=subprocess.DEVNULL)
Finalize(None, server.terminate, exitpriority=1)
while True:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/")
        break
    except OSError:
        time.sleep(0.05)
